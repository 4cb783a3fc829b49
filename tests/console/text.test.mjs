import assert from "node:assert/strict";
import { test } from "node:test";
import * as format from "../../services/tokenbus_services/console/static/lib/format.js";
import { parse, riverHash, runHash } from "../../services/tokenbus_services/console/static/lib/route.js";
import { oneLine, visible, visibleJson, windowOf } from "../../services/tokenbus_services/console/static/lib/safe_text.js";
import { SseParser } from "../../services/tokenbus_services/console/static/lib/sse_parser.js";
import { asCurl, asPython } from "../../services/tokenbus_services/console/static/run/snippets.js";

test("controls, overrides of direction and invisible characters are shown, and other text is left alone", () => {
  assert.equal(visible("a\u001b[31mb\u0007\u007f\u009b"), "a␛[31mb␇␡⟨U+009B⟩");
  assert.equal(visible("\u202egnihton\u202c \u2066x\u2069"), "⟨U+202E⟩gnihton⟨U+202C⟩ ⟨U+2066⟩x⟨U+2069⟩");
  assert.equal(visible("\u200b\ufeff\u{e0041}\ud800"), "⟨U+200B⟩⟨U+FEFF⟩⟨U+E0041⟩⟨U+D800⟩");
  const fine = "Zürich ☔🌤️ 👩‍👩‍👧 שלום مرحبا\n\ttab <script>";
  assert.equal(visible(fine), fine);
  assert.equal(visible("a\r\nb\rc"), "a\nb␍c");
  assert.equal(oneLine("a\nb\tc"), "a⏎b c");
});

test("of a long text a bounded part is drawn, and its beginning stays while the text grows", () => {
  const text = "x".repeat(1_000_100);
  const shown = windowOf(text);
  assert.ok(shown.text.length <= 24_000 && shown.before + shown.text.length === text.length);
  assert.equal(windowOf(`${text}abc`).before, shown.before);
  assert.ok(windowOf("a\n".repeat(100_000)).text.split("\n").length <= 601);
  const middle = windowOf(text, { from: 500_000 });
  assert.deepEqual([middle.before, middle.after], [500_000, 476_100]);
  assert.deepEqual(windowOf("short"), { text: "short", before: 0, after: 0 });
});

test("server-sent events are read from pieces of any size", () => {
  const wire = ": hello\n\nid: 4\nevent: chunk\ndata: {\"a\":\ndata: 1}\n\nretry: 5\ndata:x\r\n\r\nid: 9\n\ndata: no end";
  for (let size = 1; size < 20; size += 1) {
    const events = [];
    const parser = new SseParser((event) => events.push(event));
    for (let at = 0; at < wire.length; at += size) parser.feed(wire.slice(at, at + size));
    assert.deepEqual(events, [
      { name: "chunk", id: "4", data: '{"a":\n1}' },
      { name: "message", id: null, data: "x" },
    ]);
  }
});

test("an address names a run and a seq, or the filters of the river", () => {
  const { view, run, seq } = parse(runHash("a/b&c=d", 7));
  assert.deepEqual([view, run, seq], ["run", "a/b&c=d", 7]);
  assert.deepEqual(parse(riverHash({ q: "x y", state: "failed", odd: "no" })).filters, { q: "x y", state: "failed" });
  assert.equal(parse("#view=health").view, "health");
  assert.equal(parse("").view, "river");
  assert.equal(parse("#run=a&seq=-1").seq, null);
  assert.equal(parse("#run=a&ticket=t").ticket, "t");
});

test("JSON with what acts as escapes is the same JSON", () => {
  const value = { "a\u202e": "\u200b\u{e0041}ü\u2066" };
  const shown = visibleJson(JSON.stringify(value));
  assert.equal(shown, '{"a\\u202e":"\\u200b\\udb40\\udc41ü\\u2066"}');
  assert.deepEqual(JSON.parse(shown), value);
});

test("a request is copied as a curl line and a Python program that quote what is in it", () => {
  const request = { type: "generate", id: "old", provider: "p", model: "m", messages: [{ role: "user", content: "it's \"quoted\"" }], visible: true, stop: null };
  const curl = asCurl(request, "http://127.0.0.1:8088");
  assert.match(curl, /"model": "p\/m"/);
  assert.ok(curl.includes("it'\\''s"));
  assert.ok(!curl.includes("old"));
  const python = asPython(request);
  assert.match(python, /"visible": True,\n {4}"stop": None,/);
  assert.ok(python.includes('"content": "it\'s \\"quoted\\"",'));
});

test("numbers and times keep to a few characters", () => {
  assert.deepEqual([0, 999, 12_400, 3_100_000].map(format.short), ["0", "999", "12.4k", "3.1M"]);
  assert.deepEqual([0, 61_000, 3_700_000, 90_000_000].map(format.age), ["0 s", "1:01", "1 h 01", "1 d 1 h"]);
  assert.deepEqual([950, 1500, 61_000, null].map(format.ms), ["950 ms", "1.50 s", "1 min 1 s", "–"]);
  assert.deepEqual([null, 0, 0.0042, 1.5].map((value) => format.cost(value)), ["", "0", "0.00420", "1.50"]);
  assert.deepEqual([format.cost(0.0042, "EUR"), format.cost(12, "CHF").replace("\u00a0", " ")], ["€0.00420", "CHF 12.00"]);
});
