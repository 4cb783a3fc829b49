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
import { Client, RunFailed, RunNotRepeatable, RunOpen, ServerUnavailable, type GenerateRequest, type Message, type Status } from "../src/index.js";

const url = process.env["TOKENBUS_REDIS_URL"] ?? "";
const bus = new Client(url);
const redis = createClient({ url });
const found: Record<string, unknown> = {};

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
  await old.sendCommand(["WAIT", "1", "0"]);
  old.sendCommand(["SHUTDOWN", "NOSAVE"]).catch(() => {});
  await until(() => client.publish(ask("any", { id: "after" })).then(() => true, (error: unknown) => {
    assert.ok(error instanceof ServerUnavailable, String(error));
    return false;
  }));
  assert.throws(() => new Client("redis+sentinel://a"), { code: "invalid_argument" });
});
