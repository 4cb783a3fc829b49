// The bars of a run's timeline, from its state. Pure.

/** Where an event is: its time, or its number where times are not known. */
function scaleOf(state, now) {
  const timed = state.first_at !== null && state.attempts.every((one) => one.start_at !== null);
  const to = state.end ? state.last_at : Math.max(state.last_at, now ?? 0);
  return timed ? { at: "_at", from: state.first_at, to } : { at: "_seq", from: 0, to: Math.max(1, state.seq) };
}

/** Each attempt by its turn, as people count: an attempt's own number counts through the whole run. */
export function attemptNames(attempts) {
  const tries = new Map();
  return new Map(attempts.map(({ attempt, turn }) => {
    tries.set(turn, (tries.get(turn) ?? 0) + 1);
    return [attempt, tries.get(turn) > 1 ? `turn ${turn + 1}, try ${tries.get(turn)}` : `turn ${turn + 1}`];
  }));
}

/** Rows of bars: each has `from` and `to` between 0 and 1, and `ms` if times are known. What is open lasts until `now`. */
export function spansOf(state, decisions = [], now = null) {
  const scale = scaleOf(state, now);
  const timed = scale.at === "_at";
  const width = Math.max(1, scale.to - scale.from);
  const place = (value) => Math.min(1, Math.max(0, ((value ?? scale.to) - scale.from) / width));
  const bar = (kind, label, start, end, more = {}) => ({
    kind, label, from: place(start), to: place(end), ms: timed && start !== null ? (end ?? scale.to) - start : null, ...more,
  });
  const byAttempt = new Map(state.attempts.map((attempt) => [attempt.attempt, []]));
  for (const block of state.blocks) if (block) byAttempt.get(block.attempt)?.push(block);
  const names = attemptNames(state.attempts);
  const rows = [];
  for (const attempt of state.attempts) {
    const start = attempt[`start${scale.at}`];
    const end = attempt[`end${scale.at}`];
    const name = names.get(attempt.attempt);
    const bars = [];
    const blocks = byAttempt.get(attempt.attempt).filter((block) => block.turn === attempt.turn);
    const firstBlock = blocks.length ? blocks[0][`start${scale.at}`] : end;
    bars.push(bar("wait", "first byte", start, firstBlock));
    for (const block of blocks) {
      if (block.kind === "tool_result") continue;
      bars.push(bar(block.kind, block.kind.replace("_", " "), block[`start${scale.at}`], block[`end${scale.at}`], { block: block.block, seq: block.start_seq, status: block.status }));
    }
    rows.push({
      type: "attempt", name, detail: attempt.answered_by ?? attempt.model, outcome: attempt.outcome, error: attempt.error,
      delay_ms: attempt.delay_ms, seq: attempt.start_seq, ms: timed ? (end ?? scale.to) - start : null, bars,
    });
    for (const block of blocks) {
      if (block.kind !== "tool_call" || block.status !== "complete") continue;
      const begin = block[`end${scale.at}`];
      const done = timed ? block.result_at : block.result_seq;
      if (done === undefined && state.end) continue;
      const span = bar("tool", block.tool_name ?? "tool", begin, done ?? null);
      rows.push({
        type: "tool", name: block.tool_name ?? "tool", outcome: done === undefined ? "open" : block.result_error ? "failed" : "done",
        seq: block.end_seq, ms: span.ms, bars: [span],
      });
    }
    for (const decision of decisions) {
      if (decision.turn !== attempt.turn || decision.attempt !== attempt.attempt) continue;
      const judged = state.blocks[decision.block];
      rows.push({
        type: "policy", name: decision.policy, outcome: decision.action, detail: decision.reason, ms: null, seq: judged?.start_seq ?? attempt.start_seq,
        bars: [bar("policy", decision.action, judged?.[`start${scale.at}`] ?? start, judged?.[`end${scale.at}`] ?? end)],
      });
    }
  }
  return { timed, total_ms: timed ? width : null, rows };
}
