// A run's state after any number of its public events. Pure: no clock, no page. Time travel replays it.
//
// A block's object is replaced whenever it changes and never mutated: a copy of the state shares the blocks, and a
// view draws a block again only if its object is another.

export const TERMINAL = new Set(["completed", "incomplete", "failed", "cancelled"]);

export function initial() {
  return {
    seq: -1,
    run: "",
    provider: "",
    model: "",
    metadata: null,
    fallback: [],
    notes: [],
    participant: null,
    blocks: [],
    attempts: [],
    usage: null,
    /** What it waits for, as names joined by spaces. */
    waits: "",
    phase: "queued",
    first_at: null,
    last_at: null,
    end: null,
  };
}

/** A state that later events do not change. */
export function copy(state) {
  return { ...state, blocks: state.blocks.slice(), attempts: state.attempts.slice() };
}

/** Change the state by the next event. Unknown types count, and change nothing else. */
export function apply(state, event) {
  state.seq = event.seq;
  if (event.at !== undefined) {
    state.first_at ??= event.at;
    state.last_at = event.at;
  }
  if (!TERMINAL.has(event.type) || state.attempts.length === 0) enterAttempt(state, event);
  const handle = HANDLERS[event.type];
  if (handle) handle(state, event);
  else if (TERMINAL.has(event.type)) finish(state, event);
  return state;
}

const HANDLERS = {
  started(state, event) {
    state.run = event.run;
    state.provider = event.provider;
    state.model = event.model;
    state.metadata = event.metadata ?? null;
    state.fallback = event.fallback ?? [];
    state.notes = event.notes ?? [];
    state.participant = event.participant ?? null;
    state.phase = "first_byte";
    changeAttempt(state, { provider: event.provider, model: event.model });
  },

  block_start(state, event) {
    openBlock(state, event);
  },

  chunk(state, event) {
    const block = state.blocks[event.block] ?? openBlock(state, event);
    const next = { ...block, pieces: block.pieces + 1, hidden: block.hidden + (event.hidden ?? 0) };
    const text = event.text ?? "";
    if (event.kind === "tool_call") {
      if (event.tool_call_part === "input") next.text = block.text + text;
      next.tool_id = event.tool_id ?? block.tool_id;
      next.tool_name = event.tool_name ?? block.tool_name;
    } else {
      next.text = block.text + text;
    }
    state.blocks[event.block] = next;
    state.phase = PHASES[event.kind] ?? state.phase;
  },

  image_preview(state, event) {
    const block = state.blocks[event.block] ?? openBlock(state, event);
    state.blocks[event.block] = { ...block, preview: event.image, preview_index: event.index };
  },

  block_complete(state, event) {
    const block = state.blocks[event.block] ?? openBlock(state, event);
    const next = { ...block, status: event.cut ? "cut" : "complete", end_at: event.at ?? null, end_seq: event.seq };
    const text = event.kind === "tool_call" ? event.arguments : event.content;
    if (typeof text === "string") next.text = text;
    if (event.hidden !== undefined) next.hidden = event.hidden;
    for (const name of COMPLETE_FIELDS) if (event[name] !== undefined) next[name] = event[name];
    state.blocks[event.block] = next;
    if (event.kind === "tool_call") state.phase = "tool";
    if (event.kind === "tool_result") {
      finishCall(state, next);
      state.phase = hasOpenCall(state, next.turn) ? "tool" : "first_byte";
    }
  },

  tool_progress(state, event) {
    const block = state.blocks[event.block];
    if (!block) return;
    const { progress, total, message } = event;
    state.blocks[event.block] = { ...block, progress: { progress, total, message } };
    state.phase = "tool";
  },

  block_progress(state, event) {
    const block = state.blocks[event.block];
    if (block) state.blocks[event.block] = { ...block, progress: { message: event.status } };
  },

  waiting(state, event) {
    state.waits = [...names(state.waits), event.wait].join(" ");
    state.phase = "tool";
  },

  resumed(state, event) {
    state.waits = names(state.waits).filter((wait) => wait !== event.wait).join(" ");
  },

  answering(state, event) {
    changeAttempt(state, { answered_by: event.model, response_id: event.response_id });
  },

  usage(state, event) {
    state.usage = event.total;
    changeAttempt(state, { usage: event.usage });
  },

  retrying(state, event) {
    nextAttempt(state, event, event.continues ? "continued" : "retried");
  },

  restarted(state, event) {
    nextAttempt(state, event, "restarted");
  },
};

function names(text) {
  return text.split(" ").filter(Boolean);
}

const PHASES = { thinking: "thinking", text: "speaking", image: "speaking", audio: "speaking", tool_call: "tool", tool_result: "tool", server_tool: "tool" };
const COMPLETE_FIELDS = [
  "tool_id", "tool_name", "input", "input_error", "is_error", "signature", "image", "images", "blob_id",
];

function openBlock(state, event) {
  const block = {
    block: event.block,
    kind: event.kind,
    turn: event.turn,
    attempt: event.attempt,
    status: "open",
    text: "",
    pieces: 0,
    hidden: 0,
    tool_id: event.tool_id ?? null,
    tool_name: event.tool_name ?? null,
    prompt: event.prompt ?? null,
    start_at: event.at ?? null,
    start_seq: event.seq,
    end_at: null,
    end_seq: null,
  };
  state.blocks[event.block] = block;
  state.phase = PHASES[event.kind] ?? state.phase;
  const attempt = state.attempts[state.attempts.length - 1];
  if (attempt && attempt.first_block_at === null) changeAttempt(state, { first_block_at: event.at ?? null });
  return block;
}

function hasOpenCall(state, turn) {
  return ofTurn(state, turn).some((block) => block.kind === "tool_call" && block.status === "complete" && !block.result_seq);
}

/** Blocks of the newest turn, at the cost of this turn alone, however long the run is. */
function ofTurn(state, turn) {
  let first = state.blocks.length;
  while (first > 0 && (state.blocks[first - 1] === undefined || state.blocks[first - 1].turn >= turn)) first -= 1;
  return state.blocks.slice(first).filter((block) => block?.turn === turn);
}

function finishCall(state, result) {
  const index = state.blocks.findLastIndex((block) => block?.kind === "tool_call" && block.tool_id === result.tool_id);
  if (index < 0) return;
  const call = state.blocks[index];
  state.blocks[index] = { ...call, result_at: result.start_at, result_seq: result.start_seq, result_error: !!result.is_error };
}

function enterAttempt(state, event) {
  const last = state.attempts[state.attempts.length - 1];
  if (last && last.attempt === event.attempt && last.turn === event.turn) return;
  if (last && last.outcome === "open") closeAttempt(state, event, { outcome: "done" });
  state.attempts.push({
    attempt: event.attempt,
    turn: event.turn,
    provider: last?.next?.provider ?? last?.provider ?? state.provider,
    model: last?.next?.model ?? last?.model ?? state.model,
    start_at: begins(last, event),
    start_seq: event.seq,
    end_at: null,
    end_seq: null,
    first_block_at: null,
    outcome: "open",
    error: null,
    delay_ms: null,
    usage: null,
  });
}

/** An attempt has no event of its own at its start: it began when its predecessor's delay or tools were over. */
function begins(last, event) {
  if (!last || last.end_at === null) return event.at ?? null;
  const earliest = last.end_at + (last.delay_ms ?? 0);
  return event.at === undefined ? earliest : Math.min(earliest, event.at);
}

function changeAttempt(state, change) {
  const index = state.attempts.length - 1;
  state.attempts[index] = { ...state.attempts[index], ...change };
}

function closeAttempt(state, event, change) {
  const open = state.attempts[state.attempts.length - 1];
  const results = ofTurn(state, open.turn).filter((block) => block.kind === "tool_result");
  const end = results.length ? results[results.length - 1].end_at : null;
  changeAttempt(state, { end_at: end ?? event.at ?? null, end_seq: event.seq, ...change });
}

function nextAttempt(state, event, outcome) {
  closeAttempt(state, event, { outcome, error: event.error, delay_ms: event.delay_ms, next: event.fallback ?? null });
  for (let index = event.drop_from; index < state.blocks.length; index += 1) {
    const block = state.blocks[index];
    if (block) state.blocks[index] = { ...block, status: "void", void_by: event.error, end_at: block.end_at ?? event.at ?? null };
  }
  state.phase = "retrying";
}

function finish(state, event) {
  state.end = event;
  state.phase = event.type;
  if (event.usage) state.usage = event.usage;
  closeAttempt(state, event, { outcome: event.type, error: event.error ?? null });
  for (let index = 0; index < state.blocks.length; index += 1) {
    const block = state.blocks[index];
    if (block?.status === "open") state.blocks[index] = { ...block, status: "cut", end_at: event.at ?? null };
  }
}
