/** What the client shares with Python's: tests/clients/test_typescript.py compares what both give. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { writeFile } from "node:fs/promises";
import { connect, type AddressInfo, type Socket } from "node:net";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { createServer } from "node:tls";
import { createClient } from "@redis/client";
import { Client, RunFailed, RunNotRepeatable, RunOpen, ServerUnavailable, type GenerateRequest, JsonElements, type Message, type Sentence, type SessionStep, type Status } from "../src/index.js";
import { sessionRef } from "../src/keys.js";
import { SentenceCutter, type SentenceRules } from "../src/sentence_cutter.js";

const url = process.env["TOKENBUS_REDIS_URL"] ?? "";
const bus = new Client(url);
const redis = createClient({ url });
const found: Record<string, unknown> = {};
interface Corpus {
  texts: [string[], SentenceRules][];
  jsons: [string[], string][];
}

before(() => redis.connect());
after(async () => {
  bus.close();
  redis.destroy();
  await writeFile(process.env["TOKENBUS_TEST_FOUND"] ?? "", JSON.stringify(found));
});

const ask = (model: string, more: Partial<GenerateRequest> = {}): GenerateRequest => ({
  provider: "anthropic",
  model,
  messages: [{ role: "user", content: "Go on." }],
  ...more,
});

async function all<T>(given: AsyncIterable<T>): Promise<T[]> {
  const taken: T[] = [];
  for await (const one of given) taken.push(one);
  return taken;
}

async function until(done: () => boolean | Promise<boolean>): Promise<void> {
  while (!(await done())) await sleep(20);
}

test("kinds and runs choose events as in Python, and a kind that never comes is refused", async () => {
  const wanted = new Set<string>();
  const texts = await bus.subscribe("blocks", { kinds: ["block_complete", "text"], runs: wanted });
  const thoughts = await bus.subscribe("chunks", { kinds: "thinking", runs: (run) => wanted.has(run) });
  wanted.add(await bus.publish(ask("greeter", { id: "wanted" })));
  await bus.result(await bus.publish(ask("greeter", { id: "unwanted" })));
  for await (const event of texts) {
    assert.deepEqual([event.run, event.type, "kind" in event && event.kind], ["wanted", "block_complete", "text"]);
    break;
  }
  for await (const event of thoughts) {
    assert.deepEqual([event.run, event.kind], ["wanted", "thinking"]);
    break;
  }
  await assert.rejects(bus.subscribe("runs", { kinds: "text" }), { code: "invalid_argument" });
  assert.throws(() => bus.group("runs", { group: "g", kinds: "sentence" }), { code: "invalid_argument" });
  assert.throws(() => bus.group("runs", { group: "a b" }), { code: "invalid_argument" });
});

test("the workers of a group share the runs, and one that leaves hands on what it had not done", async () => {
  const clients = [new Client(url), new Client(url)];
  const groups = clients.map((client) => client.group("visible", { group: "shared", from: "start", runs: (run) => run.startsWith("group-") }));
  const seen: string[][] = [[], []];
  const leaving = new AbortController();
  const working = groups.map(async (group, n) => {
    for await (const event of group) {
      seen[n]?.push(`${event.run} ${event.seq}`);
      if (leaving.signal.aborted && n === 0) break; // the event in hand is not done
    }
  });
  await until(() => groups.every(({ partitions }) => partitions.length === 4));
  const publish = (name: string) => Promise.all(Array.from({ length: 12 }, (_, n) => bus.publish(ask("greeter", { id: `group-${name}-${n}` }))));
  const expected = async (runs: string[]): Promise<string[]> => {
    const events: string[] = [];
    for (const run of runs) for await (const event of bus.follow(run)) if (event.type === "chunk" && event.visible) events.push(`${run} ${event.seq}`);
    return events;
  };
  const first = await expected(await publish("a"));
  await until(() => seen.flat().length >= first.length);
  assert.deepEqual([...seen.flat()].sort(), [...first].sort(), "each once");
  const runsOf = (n: number): Set<string> => new Set(seen[n]?.map((one) => one.split(" ")[0] ?? ""));
  assert.equal([...runsOf(0)].filter((run) => runsOf(1).has(run)).length, 0, "a run is one worker's");
  assert.ok(runsOf(0).size > 0 && runsOf(1).size > 0);

  leaving.abort();
  const second = await expected(await publish("b"));
  const all = (): Set<string> => new Set(seen[1]);
  const last = await working[0]?.then(() => seen[0]?.at(-1) ?? "") ?? "";
  await until(() => second.every((one) => all().has(one)  || (seen[0]?.includes(one) && one !== last)));
  assert.ok(all().has(last), "what was in hand came again");
  for (const run of new Set(second.map((one) => one.split(" ")[0]))) {
    const seqs = (seen[1] ?? []).filter((one) => one.startsWith(`${run} `)).map((one) => Number(one.split(" ")[1]));
    assert.deepEqual(seqs, [...seqs].sort((a, b) => a - b), "in order");
  }
  await clients[1]?.drain();
  await working[1];
  assert.equal(await redis.sendCommand(["ZCARD", "tokenbus:members:visible:shared"]), 0);
  clients[0]?.close();
});

test("an event that a group cannot handle is tried again, then is a dead letter, and comes back", async () => {
  await bus.result(await bus.publish(ask("greeter", { id: "poisoned" })));
  const options = { from: "start" as const, runs: "poisoned", kinds: ["started", "completed"] };
  const seen: string[] = [];
  let fails = true;
  const handler = ({ type }: { type: string }): void => {
    seen.push(type);
    if (type === "started" && fails) throw new Error("poison");
  };
  const group = bus.group("runs", { ...options, group: "poison" });
  const working = group.each(handler, { tries: 2 });
  await until(() => seen.includes("completed"));
  assert.deepEqual(seen, ["started", "started", "completed"]);
  const [entry] = (await redis.xRevRange("tokenbus:dead", "+", "-", { COUNT: 1 })) ?? [];
  const letter = JSON.parse(entry?.message["__data__"] ?? "") as Record<"run" | "seq" | "group" | "reason" | "stream" | "bytes", string>;
  assert.deepEqual([letter.run, letter.seq, letter.group, letter.reason], ["poisoned", 0, "runs:poison", "failed 2 times: Error: poison"]);
  fails = false;
  const lease = letter.stream.replace(/runs$/, "lease:runs:");
  const returned = `${lease}poison:returned`; // as `tokenbus dead retry` gives it back
  await redis.xAdd(returned, "*", { __data__: Buffer.from(letter.bytes, "base64").toString() });
  await until(async () => seen.length === 4 && (await redis.xLen(returned)) === 0);
  assert.equal(seen[3], "started");
  await group.close();
  await working;
  assert.deepEqual(await redis.hGetAll(`${lease}poison:failed`), {});

  fails = true;
  const alone = bus.group("runs", { ...options, group: "fails" });
  await assert.rejects(alone.each(handler), /poison/);
  // A process that died in this event's handler has left its mark: that was a try.
  await redis.hSet(`${lease}dies:failed`, "open:1", "1");
  seen.length = 0;
  const heir = bus.group("runs", { ...options, group: "dies" });
  const inheriting = heir.each(handler, { tries: 2, concurrency: 4 });
  await until(() => seen.includes("completed"));
  await heir.close();
  await inheriting;
  assert.deepEqual(seen, ["started", "completed"]);
  await assert.rejects(heir.each(handler, { tries: 0 }), { code: "invalid_argument" });
});

test("a run that failed is asked again, and what cannot be is refused", async () => {
  const run = await bus.publish(ask("broken", { metadata: { kept: 1 } }));
  await assert.rejects(bus.result(run), RunFailed);
  const [again, same, other] = [await bus.retry(run), await bus.retry(run), await bus.retry(run, { again: 2 })];
  assert.equal(again, same);
  assert.notEqual(again, other);
  for await (const event of bus.follow(again)) if (event.type === "started") assert.deepEqual(event.metadata, { kept: 1, retry_of: run });
  const done = await bus.publish(ask("greeter"));
  await bus.result(done);
  await assert.rejects(bus.retry(done), RunNotRepeatable);
  const open = await bus.publish(ask("stalled"));
  for await (const event of bus.follow(open)) if (event.type === "chunk") break;
  await assert.rejects(bus.retry(open), RunOpen);
  await bus.cancel(open);
  await assert.rejects(bus.retry("nobody"), { code: "run_not_found" });
  found["retried"] = [run, again];
});

test("a run that was cut off goes on from its text, as Python has it", async () => {
  const run = await bus.publish(ask("stalled"));
  let left = false;
  for await (const event of bus.follow(run)) {
    if (event.type !== "chunk" || !event.visible || left) continue;
    left = true;
    await bus.cancel(run, "left", { heardThrough: event.seq, heardCharacters: 3 });
  }
  const resumed = await bus.resume(run);
  assert.equal(await bus.resume(run), resumed);
  for await (const event of bus.follow(resumed)) {
    if (event.type === "started") assert.equal(event.metadata?.["resume_of"], run);
    break; // it stalls too
  }
  await bus.cancel(resumed);
  const tools = [{ name: "weather", description: "", parameters: { type: "object" } }];
  const turns = await bus.publish(ask("cut-later", { tools }));
  await assert.rejects(bus.result(turns), { code: "run_incomplete" });
  found["resumed"] = { [run]: resumed, [turns]: await bus.resume(turns) };
  const silent = await bus.publish(ask("broken"));
  await assert.rejects(bus.result(silent), RunFailed);
  await assert.rejects(bus.resume(silent), RunNotRepeatable);
});

test("a reader of a session goes on after a fail-over that lost what it has read", async () => {
  const session = bus.session("lossy");
  await session.configure({ provider: "anthropic", model: "greeter" });
  await session.withdraw("nobody", { append: "kept" });
  const [hash = ""] = (await redis.sendCommand(["KEYS", `tokenbus:*:session:${sessionRef("", "lossy")}`])) as unknown as string[];
  const replicated = [hash, hash.replace(":session:", ":log:")];
  for (const key of replicated) await redis.copy(key, `${key}~`);
  await session.withdraw("nobody", { append: "lost" });
  const told: [number, string | undefined][] = [];
  const note = ({ event }: SessionStep): void => void told.push("append" in event && "session_seq" in event ? [event.session_seq, event.append] : [-1, ""]);
  const steps = session.follow();
  for (let n = 0; n < 5; n++) note((await steps.next()).value as SessionStep);
  const next = steps.next();
  for (const key of replicated) await redis.rename(`${key}~`, key);
  await session.withdraw("nobody", { append: "other" });
  await session.withdraw("nobody", { append: "last" });
  note((await next).value as SessionStep);
  for (let n = 0; n < 3; n++) note((await steps.next()).value as SessionStep);
  await steps.return(undefined);
  assert.deepEqual(told.slice(1, 5), [[1, "kept"], [2, "kept"], [3, "lost"], [4, "lost"]]);
  assert.deepEqual(told.slice(5), [[3, "other"], [4, "other"], [5, "last"], [6, "last"]]);
});

test("a session is written to, steered, interrupted, followed from everywhere, forked and deleted", async () => {
  const session = bus.session("talk", { tenant: "ada" });
  await assert.rejects(bus.session("nobody").send("Hi."), { code: "request_invalid" });
  await assert.rejects(bus.session("nobody").messages(), { code: "session_not_found" });
  assert.throws(() => bus.session("a b"), { code: "invalid_argument" });
  const before = [{ role: "user" as const, content: "Before." }];
  const made = await session.configure({ provider: "anthropic", model: "greeter", metadata: { kept: 1 } }, { messages: before });
  assert.equal(made.fate.state, "delivered");
  const first = await session.send("Hi.", { append: "first", metadata: { said: "first" } });
  assert.deepEqual(await session.send("Hi.", { append: "first" }), first);
  const run = first.fate.run ?? "";
  let cursor = "";
  for await (const step of session.follow()) {
    cursor = step.cursor;
    if (step.event.type === "run_ended") break;
  }
  await session.configure({ provider: "anthropic", model: "stalled" });
  await session.send("And now?");
  let waiting = false;
  for await (const { event } of session.follow({ after: cursor })) {
    if (event.type === "chunk" && event.visible && !waiting) {
      waiting = true;
      await session.send("Wait.", { append: "waits" });
      assert.equal((await session.withdraw("waits")).fate.state, "delivered");
      await session.configure({ provider: "anthropic", model: "greeter" });
      await session.steer("Faster.", { append: "steers" });
      assert.equal((await session.send("No.", { whenBusy: "reject" })).fate.reason, "busy");
      await session.interrupt({ heardThrough: event.seq, heardCharacters: 3 });
    }
    if (event.type === "run_ended" && event.run !== run && event.status === "completed") break;
  }
  assert.deepEqual([(await session.fate("waits"))?.reason, (await session.fate("steers"))?.state], ["withdrawn", "delivered"]);
  const steps = [];
  for await (const step of session.follow({ live: false })) steps.push(step);
  for (const n of [0, 1, Math.floor(steps.length / 2), steps.length - 2]) {
    const rest = [];
    for await (const step of session.follow({ after: steps[n]?.cursor ?? "", live: false })) rest.push(step);
    assert.deepEqual(rest, steps.slice(n + 1));
  }
  await assert.rejects(session.follow({ after: cursor.replace(/^\d+/, "9999") }).next(), { code: "cursor_ahead" });
  await assert.rejects(session.follow({ after: "here" }).next(), { code: "invalid_argument" });
  const fork = await session.fork("branch", { through: run });
  found["session"] = {
    steps: steps.map(({ event, cursor }) => [event.type, cursor]),
    messages: await session.messages(),
    fork: await fork.messages(),
    sessions: await bus.sessions({ tenant: "ada" }),
  };
  assert.deepEqual((await bus.sessions({ metadata: { kept: 1 }, words: "BRANCH" })).map(({ session }) => session), []);
  const gone = await session.fork("gone");
  assert.equal((await gone.configuration()).request["model"], "greeter");
  const old = (await gone.follow({ live: false }).next()).value?.cursor ?? "";
  await gone.delete();
  await assert.rejects(gone.follow().next(), { code: "session_not_found" });
  await assert.rejects(gone.fork("other"), { code: "session_not_found" });
  await gone.configure({ provider: "anthropic", model: "greeter" });
  await assert.rejects(gone.follow({ after: old }).next(), { code: "session_replaced" });
  await gone.delete();
});

test("a run is read with the runs below it, and from each cursor on", async () => {
  const top = await bus.publish(ask("delegates", { tools: [{ name: "research" }] }));
  const steps = await all(bus.followTree(top));
  for (const run of [top, `${top}~0`, `${top}~1`]) {
    assert.deepEqual(steps.filter(({ event }) => event.run === run).map(({ event }) => event), await all(bus.follow(run)));
  }
  for (const [n, { cursor }] of steps.entries()) assert.deepEqual(await all(bus.followTree(top, { after: cursor })), steps.slice(n + 1));
  const child = await all(bus.followTree(`${top}~1`));
  assert.deepEqual(child.map(({ event }) => event), await all(bus.follow(`${top}~1`)));
  assert.deepEqual(child[0]?.path, [`${top}~1`]);
  await assert.rejects(bus.followTree("nobody", { waitMs: 1 }).next(), { code: "run_not_found" });
  await assert.rejects(bus.followTree(top, { after: "1-0.999" }).next(), { code: "cursor_ahead" });
  await assert.rejects(bus.followTree(top, { after: "17" }).next(), { code: "invalid_argument" });
  found["tree"] = [top, steps.map(({ event, path, cursor }) => [event.run, event.seq, path, cursor])];
});

test("visible text comes as sentences, alone and to a group, and is cut as in Python", async () => {
  const wanted = new Set<string>();
  const said = (id: string, sentences: Sentence[]): string => sentences.filter(({ run }) => run === id).map(({ text }) => text).join("");
  const heard: Sentence[] = [];
  let whole = "";
  let speech = await bus.sentences({ language: "en", least: 4, runs: wanted });
  for (const id of ["spoken-first", "spoken-then"]) {
    wanted.add(id);
    whole = (await bus.result(await bus.publish(ask("greeter", { id })))).text;
    for await (const sentence of speech) {
      heard.push(sentence);
      if (said(id, heard) === whole) break;
    }
    speech = await bus.sentences({ language: "en", least: 4, runs: wanted, from: speech.cursor ?? "" });
  }
  await speech.close();
  assert.equal(heard.length, 6, "each once, over two subscriptions");
  const spoken: Sentence[] = [];
  for await (const sentence of await bus.sentences({ group: "speakers", from: "start", runs: wanted })) {
    spoken.push(sentence);
    if ([...wanted].every((id) => said(id, spoken) === whole)) break;
  }
  await assert.rejects(bus.sentences({ least: 9, most: 8 }), { code: "invalid_argument" });
  const corpus = JSON.parse(readFileSync(process.env["TOKENBUS_TEST_CORPUS"] ?? "", "utf8")) as Corpus;
  found["cut"] = corpus.texts.map(([pieces, rules]) => {
    const cutter = new SentenceCutter(rules);
    return [...pieces.flatMap((piece) => cutter.feed(piece)), ...cutter.end()];
  });
});

test("elements of a JSON answer come as soon as they are complete, and are those of Python", async () => {
  const run = await bus.publish(ask("lists"));
  const elements = [];
  for await (const element of bus.elements(run, "items.*")) elements.push(element);
  assert.deepEqual(elements.map(({ path, value, number }) => [path, value, number]), [[["items", 0], { a: 1 }, 0], [["items", 1], "b]", 1], [["items", 2], 2.5, 2]]);
  const last = [];
  for await (const { number } of bus.elements(run, "items.*", { after: 1 })) last.push(number);
  assert.deepEqual(last, [2]);
  const open = await bus.publish(ask("stalled-list"));
  const early = bus.elements(open, "items.*");
  assert.deepEqual((await early.next()).value?.value, { a: 1 }, "while the run is open");
  await bus.cancel(open);
  await assert.rejects(early.next(), { code: "run_cancelled" });
  await assert.rejects(bus.elements(await bus.publish(ask("greeter")), "*").next(), { code: "malformed" });
  await assert.rejects(bus.elements(await bus.publish(ask("broken")), "*").next(), RunFailed);
  const corpus = JSON.parse(readFileSync(process.env["TOKENBUS_TEST_CORPUS"] ?? "", "utf8")) as Corpus;
  found["elements"] = corpus.jsons.map(([pieces, path]) => {
    const reader = new JsonElements(path, { mostCharacters: 40, mostDepth: 5 });
    const given: unknown[] = [];
    try {
      for (const piece of pieces) given.push(...reader.feed(piece).map((one) => [one.path, one.value]));
      given.push(...reader.end().map((one) => [one.path, one.value]));
    } catch (error) {
      given.push((error as { code: string }).code);
    }
    return given;
  });
});

test("blobs are stored, streamed, leased and checked", async () => {
  const client = new Client(url, { blobs: process.env["TOKENBUS_TEST_BLOBS"] ?? "" });
  const bytes = Buffer.from("x".repeat(300_000));
  async function* pieces(): AsyncGenerator<Uint8Array> {
    yield bytes.subarray(0, 1_000);
    yield bytes.subarray(1_000);
  }
  const ref = await client.blobs.put(pieces(), "text/plain");
  assert.deepEqual(await client.blobs.put(bytes, "text/plain"), ref);
  assert.deepEqual([ref.size, ref.media_type], [bytes.length, "text/plain"]);
  assert.deepEqual(await client.blobs.head(ref.blob_id), ref);
  assert.ok(bytes.equals(await client.blobs.get(ref.blob_id)));
  await client.blobs.lease(ref.blob_id);
  await client.blobs.check(ref.blob_id);
  const none = `sha256:${"0".repeat(64)}`;
  for (const call of ["get", "head", "lease"] as const) await assert.rejects(client.blobs[call](none), { code: "blob_not_found" });
  await assert.rejects(client.blobs.get("../x"), { code: "blob_refused" });
  const nowhere = new Client(url, { blobs: "http://127.0.0.1:1" });
  await assert.rejects(nowhere.blobs.put("x"), { code: "blob_unavailable", retryable: true });
  assert.throws(() => new Client(url, { blobs: "ftp://x" }).blobs, { code: "invalid_argument" });
  found["blob"] = ref;
});

test("messages and the list of runs are those of Python's client", async () => {
  const messages: Record<string, Message[]> = {};
  const said = async (run: string): Promise<void> => {
    messages[run] = await bus.messages(run);
  };
  await said(await bus.publish(ask("greeter")));
  await said(await bus.publish(ask("calls", { tools: [{ name: "weather", description: "", parameters: { type: "object" } }] })));
  const stalled = await bus.publish(ask("stalled"));
  let heard = false;
  for await (const event of bus.follow(stalled)) {
    if (event.type !== "chunk" || !event.visible || heard) continue;
    heard = true;
    await bus.cancel(stalled, "left", { heardThrough: event.seq, heardCharacters: 3 });
  }
  await said(stalled);
  found["messages"] = messages;
  const text = await bus.publish(ask("greeter"));
  found["heard"] = [text, await bus.messages(text, { heardThrough: 5, heardCharacters: 2 })];
  const runs = await bus.runs({ limit: 1000 });
  found["runs"] = runs.map(({ run, state, acceptedMs }) => [run, state, acceptedMs]);
  assert.deepEqual(await bus.describe([...runs.map(({ run }) => run), "nobody"]), new Map(runs.map((info) => [info.run, info])));
  assert.ok((await bus.runs({ state: "failed" })).every(({ state }) => state === "failed"));
  assert.equal((await bus.runs({ limit: 2 })).length, 2);
  await assert.rejects(bus.runs({ limit: 0 }), { code: "invalid_argument" });
});

test("a client says when its connections come and go, and drains before it closes", async () => {
  const told: Status[] = [];
  const client = new Client(url, { onStatus: (status) => told.push(status) });
  const run = await client.publish(ask("paced"));
  let killed = false;
  for await (const event of client.follow(run)) {
    if (event.type !== "chunk" || killed) continue;
    killed = true;
    const clients = (await redis.sendCommand(["CLIENT", "LIST"])) as string;
    for (const line of clients.split("\n").filter((one) => one.includes("name=tokenbus-ts") && one.includes("cmd=xread"))) {
      await redis.sendCommand(["CLIENT", "KILL", "ID", /id=(\d+)/.exec(line)?.[1] ?? ""]);
    }
  }
  const states = told.map(({ state, connection }) => `${connection} ${state}`);
  for (const one of ["commands connected", "reader connected", "reader lost"]) assert.ok(states.includes(one), `${one}: ${states}`);
  assert.ok(states.lastIndexOf("reader connected") > states.indexOf("reader lost"));
  const sent = client.publish(ask("greeter", { id: "drained" }));
  await Promise.all([client.drain(), sent]);
  await assert.rejects(client.publish(ask("greeter")), { code: "closed" });
  assert.equal((await bus.result("drained")).status, "completed");
});

test("what a run waits for is listed, answered, approved and returned, once each", async () => {
  const where = { name: "where", kind: "client" as const, description: "Where the user is.", parameters: { type: "object" }, timeout_s: 600 };
  const run = await bus.publish(ask("asks", { id: "asks", tools: [{ name: "book" }, { name: "pay" }, where] }));
  await until(async () => (await bus.waiting({ run })).length === 3);
  const open = Object.fromEntries((await bus.waiting({ run })).map((info) => [info.what, info]));
  assert.ok(open["answer"] && open["approval"] && open["tool_result"]);
  assert.deepEqual([open["answer"].text, open["answer"].tool_name, open["approval"].arguments], ["Which seat?", "book", '{"amount":500}']);
  assert.deepEqual((await bus.waiting()).filter((info) => info.run === run).length, 3);
  const seat = open["answer"].wait;
  await assert.rejects(bus.answer(run, seat, { seat: 12 }), { code: "request_invalid" });
  await assert.rejects(bus.approve(run, seat), { code: "request_invalid" });
  await assert.rejects(bus.answer(run, "99.0", { seat: "12A" }), { code: "wait_not_found" });
  const fate = await bus.answer(run, seat, { seat: "12A" }, { by: "ann", decisionId: "d1" });
  assert.deepEqual([fate.wait, fate.id, fate.decision, fate.by], [seat, "d1", "accept", "ann"]);
  assert.deepEqual(await bus.answer(run, seat, { seat: "12A" }, { by: "ann", decisionId: "d1" }), fate);
  await assert.rejects(bus.answer(run, seat, undefined, { decision: "decline" }), { code: "already_decided" });
  assert.equal((await bus.approve(run, open["approval"].wait, { arguments: { amount: 90 } })).decision, "allow");
  assert.equal((await bus.tool_result(run, open["tool_result"].wait, "Bonn")).decision, "result");
  const results: string[] = [];
  for await (const event of bus.follow(run)) {
    if (event.type === "block_complete" && event.kind === "tool_result") results.push(event.content ?? "");
  }
  assert.deepEqual(results, ["accept {'seat': '12A'} by ann", "paid 90", "Bonn"]);
  assert.deepEqual(await bus.waiting({ run }), []);
});

test("TLS shows its certificate, and trusts no other authority", async () => {
  const [cert, key, ca] = (JSON.parse(process.env["TOKENBUS_TEST_SERVER_TLS"] ?? "[]") as string[]).map((file) => readFileSync(file));
  const sockets: Socket[] = [];
  const front = createServer({ cert, key, ca, requestCert: true, rejectUnauthorized: true }, (socket) => {
    const back = connect(Number(new URL(url).port), "127.0.0.1");
    sockets.push(back);
    for (const one of [socket, back]) one.on("error", () => {});
    socket.pipe(back).pipe(socket);
  }).listen(0, "127.0.0.1");
  front.on("tlsClientError", () => {});
  await once(front, "listening");
  const address = `rediss://127.0.0.1:${(front.address() as AddressInfo).port}`;
  after(() => {
    for (const socket of sockets) socket.destroy();
    front.close();
  });
  const client = new Client(`${address}?${process.env["TOKENBUS_TEST_TLS"]}`);
  assert.equal((await client.result(await client.publish(ask("greeter")))).status, "completed");
  client.close();
  const strange = new Client(`${address}?${process.env["TOKENBUS_TEST_STRANGE_TLS"]}`);
  await assert.rejects(strange.publish(ask("any")), ServerUnavailable);
  strange.close();
  assert.throws(() => new Client("rediss://a?x=1"), { code: "invalid_argument" });
});

test("Sentinels name the master, also after a fail-over", async (t) => {
  const address = process.env["TOKENBUS_TEST_SENTINEL"] ?? "";
  const client = new Client(address);
  t.after(() => client.close());
  await client.publish(ask("any", { id: "before" }));
  const sentinel = createClient({ url: address.replace("+sentinel", "").replace(/\/main$/, "") });
  await sentinel.connect();
  t.after(() => sentinel.destroy()); // an open connection keeps the process, which then says nothing of a failure
  const master = async (): Promise<string> => String(await sentinel.sendCommand(["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main"]));
  const [host, port] = (await master()).split(",");
  const old = createClient({ url: `redis://${host}:${port}`, socket: { reconnectStrategy: false } });
  old.on("error", () => {});
  await old.connect();
  t.after(() => old.isOpen && old.destroy());
  await old.sendCommand(["SET", "waited-for", "1"]); // WAIT is about what this connection has written
  await old.sendCommand(["WAIT", "1", "0"]);
  old.sendCommand(["SHUTDOWN", "NOSAVE"]).catch(() => {});
  await until(() => client.publish(ask("any", { id: "after" })).then(() => true, (error: unknown) => {
    assert.ok(error instanceof ServerUnavailable, String(error));
    return false;
  }));
  assert.throws(() => new Client("redis+sentinel://a"), { code: "invalid_argument" });
});
