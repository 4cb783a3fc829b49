/** On a Cluster: tests/clients/test_typescript_cluster.py starts it, writes what this reads, and lets a node fail. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { Client, ServerUnavailable, type GenerateRequest } from "../src/index.js";

const url = process.env["TOKENBUS_TEST_CLUSTER"] ?? "";
const prefix = process.env["TOKENBUS_TEST_PREFIX"] ?? "";
const request: GenerateRequest = { provider: "anthropic", model: "any", messages: [{ role: "user", content: "Go on." }] };

/** A busy machine, like a fail-over, is a server that is away for a while. */
async function patiently<T>(call: () => Promise<T>): Promise<T> {
  for (;;) {
    try {
      return await call();
    } catch (error) {
      assert.ok(error instanceof ServerUnavailable, String(error));
      await sleep(50);
    }
  }
}

test("each call works on the nodes of a Cluster, and followers outlive the failure of one", { timeout: 100_000 }, async (t) => {
  const bus = new Client(url, { prefix });
  t.after(() => bus.close()); // an open connection keeps the process, which then says nothing of a failure
  const runs = Array.from({ length: 12 }, (_, n) => `run-${n}`);
  const topic = await patiently(() => bus.subscribe("visible"));
  const groups = [1, 2].map(() => bus.group("visible", { group: "shared", from: "start" }));
  const shared = groups.map(() => new Set<string>());
  const working = groups.map(async (group, n) => {
    for await (const event of group) shared[n]?.add(`${event.run} ${event.seq}`);
  });
  while (!groups.every(({ partitions }) => partitions.length === 2)) await sleep(20);
  for (const id of runs) await patiently(() => bus.publish({ ...request, id }));
  const results = await Promise.all(runs.map((run) => bus.result(run)));
  for (const [n, { text }] of results.entries()) assert.equal(text, `Hello ${n}.`);
  const seen = new Set<string>();
  for await (const event of topic) if (seen.add(`${event.run} ${event.seq}`).size === runs.length) break;
  while ((shared[0]?.size ?? 0) + (shared[1]?.size ?? 0) < runs.length) await sleep(20);
  assert.deepEqual([...shared.flatMap((one) => [...one])].sort(), [...seen].sort());
  assert.ok(shared.every((one) => one.size > 0));

  const seqs = runs.map((run) => [run, [] as number[]] as const);
  await patiently(() => bus.publish({ ...request, id: "open" })); // then these are written, the last of them by the node that takes over
  await Promise.all(
    seqs.map(async ([run, of]) => {
      for await (const { seq } of bus.follow(`open-${run}`)) of.push(seq);
    }),
  );
  for (const [, of] of seqs) assert.deepEqual(of, [0, 1, 2, 3, 4]);
  assert.equal(await patiently(() => bus.publish({ ...request, id: "after" })), "after");
  assert.equal((await bus.messages("after")).length, 1);
  await Promise.all(groups.map((group) => group.close()));
  await Promise.all(working);
});

test("an address of a Cluster has no database", () => {
  assert.throws(() => new Client("redis+cluster://a/1"), { code: "invalid_argument" });
  assert.throws(() => new Client("redis+cluster://a", { prefix: "a" }).group("runs", { group: "a b" }), { code: "invalid_argument" });
});
