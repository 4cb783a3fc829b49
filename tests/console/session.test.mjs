// What a person reads of a session, after its events.

import assert from "node:assert/strict";
import { test } from "node:test";

import { parse, sessionHash, sessionsHash } from "../../services/tokenbus_services/console/static/lib/route.js";
import { beginWith, empty, take } from "../../services/tokenbus_services/console/static/session/fold.js";

let seq = 0;
const own = (type, fields) => ({ type, session_seq: seq++, at_ms: 1000 + seq, ...fields });
const of = (run, number, type, fields) => ({ type, run, seq: number, turn: 0, attempt: 1, ...fields });
const request = { provider: "p", model: "m" };
const config = own("configured", { append: "c", item: { type: "configure", request, when_busy: "steer" } });
const message = (append, content, more) => own("appended", { append, item: { type: "message", content, participant: "ada", ...more } });

function told(...events) {
  const state = empty();
  for (const event of events) take(state, event);
  return state;
}

test("a message stands where it took effect, and a steered answer goes on behind it", () => {
  const state = told(
    config,
    message("a", "hello"),
    own("delivered", { append: "a", run: "r" }),
    of("r", 0, "started", { provider: "p", model: "m" }),
    of("r", 1, "chunk", { block: 0, kind: "text", text: "Hel", visible: true }),
    message("b", [{ type: "text", text: "also" }, { type: "image" }]),
  );
  assert.equal(state.waiting.get("b").steers, true);
  assert.equal(state.open, "r");
  take(state, of("r", 2, "chunk", { block: 0, kind: "text", text: "lo", visible: true }));
  take(state, own("delivered", { append: "b", run: "r", turn: 1 }));
  take(state, of("r", 3, "chunk", { block: 1, kind: "text", text: "Yes", visible: true }));
  take(state, own("run_ended", { run: "r", status: "completed" }));
  assert.deepEqual(state.entries.map((entry) => [entry.kind, entry.text ?? entry.from, entry.to ?? null]), [
    ["said", "hello", null], ["run", 0, 1], ["said", "also [image]", null], ["run", 1, null],
  ]);
  assert.equal(state.entries[2].steered, true);
  assert.deepEqual(state.runs.get("r").blocks.map((block) => block.text), ["Hello", "Yes"]);
  assert.equal(state.open, null);
  assert.equal(state.waiting.size, 0);
});

test("a returned message says why; other appends show nothing", () => {
  const state = told(
    config, message("a", "hello"), own("returned", { append: "a", reason: "busy" }),
    own("appended", { append: "i", item: { type: "interrupt" } }), own("returned", { append: "i", reason: "nothing_open" }),
    own("delivered", { append: "x", run: "r" }), own("returned", { append: "p", reason: "rejected", problem: "no" }),
  );
  const shown = state.entries.map((entry) => [entry.kind, entry.why ?? entry.text]);
  assert.deepEqual(shown, [["returned", "the model was speaking"], ["note", "a message was returned: no"]]);
});

test("another model and a lost answer are noted, and a newer event changes nothing", () => {
  const other = own("configured", { append: "d", item: { type: "configure", request: { provider: "q", model: "n" } } });
  const state = told(config, config, other, own("run_ended", { run: "r", status: "lost" }), own("of_tomorrow", {}));
  assert.deepEqual(state.entries.map((entry) => entry.text), ["from now on q/n", "nothing is left of this answer"]);
});

test("events without content have their length in its place", () => {
  const state = told(config, own("appended", { append: "a", item: { type: "message" }, hidden: 9 }));
  assert.equal(state.waiting.get("a").hidden, 9);
  assert.equal(state.waiting.get("a").author, "user");
});

test("a fork begins with a history", () => {
  const state = empty();
  beginWith(state, [{ role: "user", content: "hi", participant: "ada" }, { role: "assistant", content: [{ type: "text", text: "yes" }] }, { role: "tool", content: "42" }]);
  assert.deepEqual(state.entries.map((entry) => [entry.author, entry.text, entry.answer]), [["ada", "hi", false], ["assistant", "yes", true]]);
});

test("addresses of sessions are read as they are written", () => {
  const { view, session, tenant } = parse(sessionHash("a&b=c", "d#e"));
  assert.deepEqual([view, session, tenant], ["session", "a&b=c", "d#e"]);
  assert.equal(parse(sessionHash("x")).tenant, "");
  assert.deepEqual(parse(sessionsHash({ words: "rain bonn", tenant: "" })).sessionFilters, { words: "rain bonn" });
  assert.equal(parse("#view=sessions").view, "sessions");
});
