import assert from "node:assert/strict";
import { test } from "node:test";
import { RunHistory } from "../../services/tokenbus_services/console/static/run/history.js";
import { apply, copy, initial } from "../../services/tokenbus_services/console/static/run/reducer.js";
import { spansOf } from "../../services/tokenbus_services/console/static/run/spans.js";

/** Events with seqs, each 10 ms after the one before. */
function log(...events) {
  let turn = 0;
  let attempt = 1;
  return events.map((event, seq) => {
    turn = event.turn ?? turn;
    attempt = event.attempt ?? attempt;
    return { run: "r", seq, at: 1000 + 10 * seq, turn, attempt, ...event };
  });
}

const chunk = (block, text, kind = "text") => ({ type: "chunk", block, kind, text, visible: kind === "text", depth: 0 });
const started = { type: "started", provider: "p", model: "m" };
const completed = { type: "completed", finish: "stop", timing: { total_ms: 5 }, usage: { input: 1, output: 2 } };

const RETRIED = log(
  started,
  { type: "block_start", block: 0, kind: "thinking" },
  chunk(0, "hm", "thinking"),
  { type: "retrying", error: { code: "overloaded_error" }, next_attempt: 2, delay_ms: 20, drop_from: 0 },
  { type: "block_start", block: 1, kind: "text", attempt: 2 },
  chunk(1, "one "),
  { type: "block_complete", block: 1, kind: "text", content: "one " },
  { type: "block_start", block: 2, kind: "tool_call", tool_id: "t", tool_name: "weather" },
  { type: "chunk", block: 2, kind: "tool_call", text: '{"a":', tool_call_part: "input", visible: false, depth: 0 },
  { type: "chunk", block: 2, kind: "tool_call", text: "1}", tool_call_part: "input", visible: false, depth: 0 },
  { type: "block_complete", block: 2, kind: "tool_call", tool_id: "t", tool_name: "weather", arguments: '{"a":1}', input: { a: 1 } },
  { type: "tool_progress", block: 2, tool_id: "t", tool_name: "weather", progress: 1, total: 2 },
  { type: "usage", usage: { input: 1 }, total: { input: 1 }, model: "m-1" },
  { type: "block_start", block: 3, kind: "tool_result", tool_id: "t", tool_name: "weather" },
  { type: "block_complete", block: 3, kind: "tool_result", tool_id: "t", tool_name: "weather", content: "rain", is_error: true },
  { type: "block_start", block: 4, kind: "text", turn: 1, attempt: 3 },
  chunk(4, "two"),
  completed,
);

function replayed(events, upTo = events.length) {
  const state = initial();
  for (const event of events.slice(0, upTo)) apply(state, event);
  return state;
}

test("a run's blocks, attempts and end follow from its events", () => {
  const state = replayed(RETRIED);
  assert.deepEqual(state.blocks.map((block) => [block.kind, block.status, block.text]), [
    ["thinking", "void", "hm"],
    ["text", "complete", "one "],
    ["tool_call", "complete", '{"a":1}'],
    ["tool_result", "complete", "rain"],
    ["text", "cut", "two"],
  ]);
  assert.deepEqual(state.attempts.map((one) => [one.turn, one.attempt, one.outcome]), [[0, 1, "retried"], [0, 2, "done"], [1, 3, "completed"]]);
  assert.equal(state.attempts[0].error.code, "overloaded_error");
  assert.deepEqual(state.usage, { input: 1, output: 2 });
  assert.equal(state.end.finish, "stop");
  assert.equal(state.blocks[2].result_at, 1130);
  assert.equal(state.blocks[2].result_error, true);
});

test("the phase says what the run does now", () => {
  const phases = RETRIED.map((_, index) => replayed(RETRIED, index + 1).phase);
  assert.deepEqual(phases, [
    "first_byte", "thinking", "thinking", "retrying", "speaking", "speaking", "speaking", "tool", "tool", "tool", "tool",
    "tool", "tool", "tool", "first_byte", "speaking", "speaking", "completed",
  ]);
});

test("the state at any seq is that of the events up to it, whatever came later", () => {
  const history = new RunHistory(4);
  for (const event of RETRIED) assert.equal(history.push(event), true);
  for (let seq = -1; seq < RETRIED.length; seq += 1) assert.deepEqual(history.at(seq), replayed(RETRIED, seq + 1), `seq ${seq}`);
  assert.deepEqual(history.at(999), replayed(RETRIED));
});

test("an event that came before counts once, and a gap is an error", () => {
  const history = new RunHistory();
  history.push(RETRIED[0]);
  assert.equal(history.push(RETRIED[0]), false);
  assert.throws(() => history.push(RETRIED[2]), /seq 2 came after 0/);
});

test("a block that did not change is the same object in the next state", () => {
  const before = replayed(RETRIED, 7);
  const after = copy(before);
  for (const event of RETRIED.slice(7)) apply(after, event);
  assert.equal(after.blocks[1], before.blocks[1]);
  assert.equal(before.blocks.length, 2);
});

test("an event of a type that is not known yet counts, and the run goes on", () => {
  const state = replayed(log(started, { type: "of_tomorrow", more: 1 }, chunk(0, "a"), completed));
  assert.equal(state.blocks[0].text, "a");
  assert.equal(state.seq, 3);
});

test("content that is hidden is counted", () => {
  const state = replayed(log(started, { type: "chunk", block: 0, kind: "text", visible: true, hidden: 12 }, { type: "chunk", block: 0, kind: "text", visible: true, hidden: 3 }));
  assert.equal(state.blocks[0].hidden, 15);
  assert.equal(state.blocks[0].text, "");
});

test("the timeline has attempts, tools and policies, by time if times are known, else by number", () => {
  const decisions = [{ n: 0, policy: "no-keys", action: "replace", turn: 0, attempt: 2, block: 1 }];
  const { timed, total_ms: total, rows } = spansOf(replayed(RETRIED), decisions);
  assert.equal(timed, true);
  assert.equal(total, 170);
  assert.deepEqual(rows.map((row) => [row.type, row.name, row.outcome]), [
    ["attempt", "turn 1", "retried"],
    ["attempt", "turn 1, try 2", "done"],
    ["tool", "weather", "failed"],
    ["policy", "no-keys", "replace"],
    ["attempt", "turn 2", "completed"],
  ]);
  assert.equal(rows[2].ms, 30);
  const untimed = RETRIED.map(({ at: _at, ...event }) => event);
  assert.equal(spansOf(replayed(untimed)).timed, false);
  for (const row of rows) for (const bar of row.bars) assert.ok(bar.from >= 0 && bar.to <= 1 && bar.to >= bar.from);
});

test("100,000 events and steps back through them take seconds at the most", { timeout: 60_000 }, () => {
  const history = new RunHistory();
  history.push({ ...started, run: "r", seq: 0, turn: 0, attempt: 1 });
  for (let seq = 1; seq < 100_000; seq += 1) history.push({ ...chunk(Math.floor(seq / 1000), "word "), run: "r", seq, turn: 0, attempt: 1 });
  assert.equal(history.checkpoints.length, 101);
  for (let seq = 99_999; seq >= 0; seq -= 997) assert.equal(history.at(seq).seq, seq);
});

test("what a run waits for is named until it is decided", () => {
  const waits = (wait) => ({ type: "waiting", wait, what: "approval", tool_name: "pay" });
  const open = log(started, waits("0.0"), waits("1.0"));
  assert.equal(replayed(open).waits, "0.0 1.0");
  assert.equal(replayed(log(started, waits("0.0"), waits("1.0"), { type: "resumed", wait: "0.0", decision: "deny" })).waits, "1.0");
});

test("what is open lasts until now", () => {
  const open = replayed(log(started, { type: "block_start", block: 0, kind: "text" }));
  const { total_ms: total, rows } = spansOf(open, [], 1500);
  assert.equal(total, 500);
  assert.equal(rows[0].bars[1].to, 1);
  assert.equal(spansOf(replayed(RETRIED), [], 99_999).total_ms, 170);
});
