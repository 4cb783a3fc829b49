/** Against a running bus: tests/clients/test_typescript.py starts it, scripts its models and runs this file. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { once } from "node:events";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { createServer, type AddressInfo, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { promisify } from "node:util";
import { crc32 } from "node:zlib";
import { createClient } from "@redis/client";
import {
  Client,
  CursorAhead,
  CursorTrimmed,
  RunCancelled,
  RunFailed,
  RunNotFound,
  ServerUnavailable,
  TimedOut,
  type GenerateRequest,
  type PublicEvent,
} from "../src/index.js";
import { Keys } from "../src/keys.js";

const url = process.env["TOKENBUS_REDIS_URL"] ?? "";
const partitionOf = JSON.parse(process.env["TOKENBUS_TEST_PARTITIONS"] ?? "{}") as Record<string, number>;
const text = process.env["TOKENBUS_TEST_TEXT"] ?? "";
const bus = new Client(url);
const redis = createClient({ url });

before(() => redis.connect());
after(() => {
  bus.close();
  redis.destroy();
});

const ask = (model: string, more: Partial<GenerateRequest> = {}): GenerateRequest => ({
  provider: "anthropic",
  model,
  messages: [{ role: "user", content: "Go on." }],
  ...more,
});

async function all(events: AsyncIterable<PublicEvent>): Promise<PublicEvent[]> {
  const found: PublicEvent[] = [];
  for await (const event of events) found.push(event);
  return found;
}

const visible = (events: PublicEvent[]): string =>
  events.map((event) => (event.type === "chunk" && event.visible ? event.text : "")).join("");

test("the partition of a run is the one of shared/tokenbus/bus/keys.py", () => {
  const keys = new Keys("tokenbus", [8]);
  assert.ok(Object.keys(partitionOf).length > 8);
  for (const [run, partition] of Object.entries(partitionOf)) assert.equal(keys.partitionOf(run), partition, run);
});

test("a request is answered, and its result is whole", async () => {
  const events = await all(bus.stream(ask("greeter")));
  assert.deepEqual(events.map((event) => event.seq), [...events.keys()]);
  assert.equal(visible(events), text);
  const result = await bus.result(events[0]?.run ?? "");
  assert.equal(result.text, text);
  assert.equal(result.thinking, "Hm.");
  assert.equal(result.status, "completed");
  assert.ok((result.usage?.output ?? 0) > 0);
});

test("after any seq the rest follows, over a failed attempt too: no gap, no double", async () => {
  const run = await bus.publish(ask("busy"));
  const events = await all(bus.follow(run));
  assert.ok(events.some((event) => event.attempt === 2));
  for (const { seq } of events) assert.deepEqual(await all(bus.follow(run, { after: seq })), events.slice(seq + 1));
});

test("a follower whose connection is killed again and again misses and doubles nothing", async () => {
  const seqs: number[] = [];
  let heard = "";
  for await (const event of bus.stream(ask("paced"))) {
    seqs.push(event.seq);
    heard += visible([event]);
    if (event.type === "chunk") await killReaders();
  }
  assert.deepEqual(seqs, [...seqs.keys()]);
  assert.equal(heard, text);
});

/** Close the connections of this client's iterations, as an outage does. */
async function killReaders(): Promise<void> {
  const clients = (await redis.sendCommand(["CLIENT", "LIST"])) as string;
  for (const line of clients.split("\n").filter((one) => one.includes("name=tokenbus-ts"))) {
    const id = /id=(\d+)/.exec(line)?.[1] ?? "";
    await redis.sendCommand(["CLIENT", "KILL", "ID", id]);
  }
}

test("a subscription has every run of every partition once, in order, and its cursor goes on behind the last", async () => {
  const runs = Object.keys(partitionOf);
  assert.equal(new Set(runs.map((run) => partitionOf[run])).size, 8);
  const seen = new Map<string, { seq: number; heard: string }>(runs.map((run) => [run, { seq: -1, heard: "" }]));
  let subscription = await bus.subscribe("visible");
  await Promise.all(runs.map((id) => bus.publish(ask("greeter", { id }))));
  let taken = 0;
  while ([...seen.values()].some(({ heard }) => heard !== text)) {
    for await (const event of subscription) {
      const run = seen.get(event.run);
      if (run) {
        assert.ok(event.seq > run.seq, `${event.run}: ${event.seq} after ${run.seq}`);
        run.seq = event.seq;
        run.heard += event.text;
      }
      if (++taken % 7 === 0 || [...seen.values()].every(({ heard }) => heard === text)) break;
    }
    subscription = await bus.subscribe("visible", { from: subscription.cursor });
  }
  subscription.close();
});

test("a cancelled run ends as cancelled, with what was heard of it", async () => {
  const run = await bus.publish(ask("stalled"));
  for await (const event of bus.follow(run)) {
    if (event.type === "chunk" && event.visible) await bus.cancel(run, "the user left", { heardThrough: event.seq });
    if (event.type === "cancelled") assert.equal(event.reason, "the user left");
  }
  await assert.rejects(bus.result(run), (error: unknown) => {
    assert.ok(error instanceof RunCancelled);
    assert.ok(text.startsWith(error.response.text) && error.response.text !== "");
    return true;
  });
});

test("a run that failed says so with its error", async () => {
  const run = await bus.publish(ask("broken"));
  await assert.rejects(bus.result(run), (error: unknown) => {
    assert.ok(error instanceof RunFailed);
    assert.equal(error.error.class, "invalid_request");
    assert.equal(error.retryable, false);
    return true;
  });
});

test("a request that cannot be taken ends its run", async () => {
  const run = await bus.publish({ ...ask("greeter"), temperature: -1 });
  await assert.rejects(bus.result(run), RunFailed);
});

test("the same id is the same run", async () => {
  const id = `twice-${Date.now()}`;
  await bus.publish(ask("greeter", { id }));
  await bus.publish(ask("greeter", { id }));
  assert.equal((await bus.result(id)).text, text);
  const started = (await all(bus.follow(id))).filter((event) => event.type === "started");
  assert.equal(started.length, 1);
});

test("a cursor or a run that cannot be is an error at once", async () => {
  const run = await bus.publish(ask("greeter"));
  const last = (await all(bus.follow(run))).length - 1;
  assert.deepEqual(await all(bus.follow(run, { after: last })), []);
  await assert.rejects(all(bus.follow(run, { after: last + 1 })), CursorAhead);
  await assert.rejects(all(bus.follow(run, { after: -2 })), RangeError);
  await assert.rejects(all(bus.follow("nobody", { waitMs: 10 })), RunNotFound);
  await assert.rejects(all(bus.follow("nobody", { after: 3 })), RunNotFound);
  await assert.rejects(bus.subscribe("visable" as "visible"), RangeError);
  await assert.rejects(bus.subscribe("visible", { from: "runs:0-1" }), RangeError);
  await assert.rejects(bus.subscribe("runs", { from: `runs:${Array(8).fill("9999999999999-0").join(",")}` }), CursorAhead);
  assert.throws(() => new Client("redis://a,b"), RangeError);
});

test("the users of deploy/acl may do all that this client does for them", async () => {
  const publisher = new Client(process.env["TOKENBUS_TEST_PUBLISHER"]);
  const subscriber = new Client(process.env["TOKENBUS_TEST_SUBSCRIBER"]);
  const subscription = await subscriber.subscribe("runs");
  const run = await publisher.publish(ask("greeter"));
  for await (const event of subscription) if (event.run === run && event.type === "completed") break;
  for await (const event of await subscriber.subscribe("runs", { from: "start" })) if (event.run === run) break;
  assert.equal((await subscriber.result(run)).text, text);
  assert.equal((await all(publisher.follow(run, { after: 1 })))[0]?.seq, 2);
  await publisher.cancel(run);
  await assert.rejects(subscriber.publish(ask("greeter")), /NOPERM/);
  await assert.rejects(publisher.subscribe("runs"), /NOPERM/);
  publisher.close();
  subscriber.close();
});

test("an iteration ends with its signal, also while it waits", async () => {
  const run = await bus.publish(ask("stalled"));
  const leaving = new AbortController();
  await assert.rejects(async () => {
    for await (const event of bus.follow(run, { signal: leaving.signal })) {
      if (event.type === "chunk") setImmediate(() => leaving.abort(new Error("left")));
    }
  }, /left/);
  await bus.cancel(run);
  await assert.rejects(bus.result(run), RunCancelled);
});

test("a server that is not there is an error that names the request", async () => {
  const nowhere = new Client("redis://127.0.0.1:1", { reconnectMs: 10 });
  await assert.rejects(nowhere.publish(ask("greeter")), (error: unknown) => {
    assert.ok(error instanceof ServerUnavailable && error.retryable);
    assert.ok(error.request?.id);
    return true;
  });
  await assert.rejects(nowhere.result("some-run"), ServerUnavailable);
});

test("no call hangs on a server that accepts connections and answers nothing", async () => {
  const sockets: Socket[] = [];
  const standing = createServer((socket) => sockets.push(socket)).listen(0, "127.0.0.1");
  await once(standing, "listening");
  const client = new Client(`redis://127.0.0.1:${(standing.address() as AddressInfo).port}`);
  const silent = (error: unknown): boolean => error instanceof ServerUnavailable && /did not answer within 50 ms/.test(error.message);
  await assert.rejects(client.publish(ask("greeter"), { timeoutMs: 50 }), silent);
  await assert.rejects(client.cancel("some-run", undefined, { timeoutMs: 50 }), silent);

  const leaving = new AbortController();
  const calls = [
    client.publish(ask("greeter"), { signal: leaving.signal }),
    client.cancel("some-run", "left", { signal: leaving.signal }),
    client.result("some-run", { signal: leaving.signal }),
    client.subscribe("visible", { signal: leaving.signal }),
  ];
  setImmediate(() => leaving.abort(new Error("left")));
  for (const call of calls) await assert.rejects(call, /left/);
  await assert.rejects(client.result("some-run", { timeoutMs: 50 }), TimedOut);

  const waiting = [client.publish(ask("greeter")), client.result("some-run"), client.subscribe("visible")];
  setImmediate(() => client.close());
  for (const call of waiting) await assert.rejects(call, { code: "closed" });
  await assert.rejects(client.publish(ask("greeter")), { code: "closed" });
  for (const socket of sockets) socket.destroy();
  standing.close();
});

test("an outage holds neither an abort nor a close", async () => {
  const away = new Client("redis://127.0.0.1:1", { reconnectMs: 600_000 });
  const leaving = new AbortController();
  const result = away.result("some-run", { signal: leaving.signal });
  const other = away.result("some-run");
  setImmediate(() => leaving.abort(new Error("left")));
  await assert.rejects(result, /left/);
  setImmediate(() => away.close());
  await assert.rejects(other, { code: "closed" });
});

test("three hundred followers share two connections, and each has every event of its run once", async () => {
  const client = new Client(url);
  const connections = async (): Promise<number> =>
    ((await redis.sendCommand(["CLIENT", "LIST"])) as string).split("\n").filter((one) => one.includes("name=tokenbus-ts")).length;
  const before = await connections();
  const stalled = await client.publish(ask("stalled"));
  const seqs: number[] = [];
  const slow = client.follow(stalled);
  await slow.next(); // it does not ask for more: nobody waits for it
  const results = Array.from({ length: 300 }, async (_, n) => {
    const run = await client.publish(ask("paced", { id: `shared-${n}` }));
    const events = await all(client.follow(run));
    assert.deepEqual(events.map((event) => event.seq), [...events.keys()]);
    if (n === 150) seqs.push(await connections());
    return visible(events);
  });
  for (const heard of await Promise.all(results)) assert.equal(heard, text);
  assert.ok((seqs[0] ?? Infinity) - before <= 2, `${seqs[0]} connections, ${before} before`);
  await client.cancel(stalled);
  const rest = await all(slow);
  assert.deepEqual(rest.map((event) => event.seq), [...rest.keys()].map((n) => n + 1));
  client.close();
});

test("a client that is closed ends what iterates, and a run that goes on is no result in time", async () => {
  const client = new Client(url);
  const run = await client.publish(ask("stalled"));
  await assert.rejects(client.result(run, { timeoutMs: 50 }), { code: "timeout", retryable: true });
  const subscription = await client.subscribe("visible");
  await assert.rejects(async () => {
    for await (const event of client.follow(run)) if (event.type === "chunk") setImmediate(() => client.close());
  }, { code: "closed" });
  await assert.rejects(async () => {
    for await (const event of subscription) assert.ok(event.run);
  }, { code: "closed" });
  await bus.cancel(run);
});

test("a wrong password and a wrong argument have a code too", async () => {
  const stranger = new Client(url.replace("//", "//nobody:wrong@"));
  await assert.rejects(stranger.publish(ask("greeter")), { code: "server_unavailable" });
  await assert.rejects(bus.subscribe("visable" as "visible"), { code: "invalid_argument", retryable: false });
  stranger.close();
});

test("without an address the `tokenbus up` of this directory is found, if it runs", async () => {
  const data = await mkdtemp(join(tmpdir(), "tokenbus-"));
  delete process.env["TOKENBUS_REDIS_URL"];
  process.env["TOKENBUS_DATA"] = data;
  try {
    assert.throws(() => new Client(), { code: "invalid_argument" });
    await writeFile(join(data, "up.json"), JSON.stringify({ pid: process.pid, redis_url: url }));
    const found = new Client();
    assert.equal((await found.result(await found.publish(ask("greeter")))).text, text);
    found.close();
    await writeFile(join(data, "up.json"), JSON.stringify({ pid: 2 ** 30, redis_url: url }));
    assert.throws(() => new Client(), { code: "invalid_argument" });
  } finally {
    process.env["TOKENBUS_REDIS_URL"] = url;
    delete process.env["TOKENBUS_DATA"];
    await rm(data, { recursive: true });
  }
});

test("a subscription that fell behind is told once, and goes on at the oldest entry that is kept", async () => {
  const run = await bus.publish(ask("greeter"));
  await bus.result(run);
  let cursor = "";
  const before = await bus.subscribe("runs", { from: "start" });
  for await (const event of before) {
    cursor = before.cursor;
    if (event.run === run) break; // its end lies behind this in the same partition
  }
  const topics = Array.from({ length: 8 }, (_, n) => `tokenbus:{${n}}:runs`);
  await Promise.all(topics.map((topic) => redis.xTrim(topic, "MAXLEN", 1)));
  const kept = (await Promise.all(topics.map((topic) => redis.xLen(topic)))).reduce((a, b) => a + b);

  const behind = await bus.subscribe("runs", { from: cursor });
  await assert.rejects(async () => {
    for await (const event of behind) assert.ok(event.run);
  }, CursorTrimmed);
  for await (const event of await bus.subscribe("runs", { from: behind.cursor })) {
    assert.ok(event.run);
    break;
  }
  const gaps: CursorTrimmed[] = [];
  const runs: string[] = [];
  for await (const event of await bus.subscribe("runs", { from: cursor, onTrimmed: (gap) => gaps.push(gap) })) {
    runs.push(event.run);
    if (runs.includes(run)) break;
  }
  assert.ok(gaps.some((gap) => gap.key === `tokenbus:{${crc32(run) % 8}}:runs`));
  assert.equal(new Set(gaps.map((gap) => gap.key)).size, gaps.length);
  assert.ok(runs.length <= kept);
});

// The last test: those above know eight partitions.
test("readers that are open follow a change of the number of partitions, and runs from before it are found", async () => {
  const subscription = await bus.subscribe("runs");
  const oldCursor = subscription.cursor;
  const open = await bus.publish(ask("stalled"));
  const following = bus.follow(open);
  await following.next();
  const ended = await bus.publish(ask("greeter"));
  await bus.result(ended);

  const [python = "", ...repartition] = JSON.parse(process.env["TOKENBUS_TEST_REPARTITION"] ?? "[]") as string[];
  await promisify(execFile)(python, [...repartition, "11"]);

  const fresh = new Client(url);
  for (const client of [bus, fresh]) assert.equal((await client.result(ended)).text, text);
  // Workers hear of the new number within a second; until then new runs have their old places.
  let id = "";
  for (let n = 0, placed = false; !placed; n++) {
    id = `added-${n}`;
    const partition = crc32(id) % 11;
    if (partition < 8) continue;
    assert.equal((await fresh.result(await bus.publish(ask("greeter", { id })))).text, text);
    placed = Number(await redis.sendCommand(["EXISTS", `tokenbus:{${partition}}:log:${id}`])) === 1;
  }
  for await (const event of subscription) if (event.run === id && event.type === "completed") break;
  assert.equal(subscription.cursor.split(",").length, 11);
  for await (const event of await fresh.subscribe("runs", { from: oldCursor })) if (event.run === id) break;
  await bus.cancel(open);
  let last: PublicEvent | undefined;
  for await (const event of following) last = event;
  assert.equal(last?.type, "cancelled");
  fresh.close();
});
