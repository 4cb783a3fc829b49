/** What runs wait for: the list of it, and the decisions. */

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import type { CallOptions } from "./connection.js";
import type { Deployment } from "./deployment.js";
import { AlreadyDecided, DecisionPending, RequestInvalid, WaitNotFound } from "./errors.js";
import { newestOf } from "./runs.js";
import type { Answer, Approval, ToolResult, Waiting } from "./types.js";

const FIRST_LOOK_MS = 2;
const LONGEST_LOOK_MS = 100;

export type WaitDecision = Approval | Answer | ToolResult;

/** What a run waits for. Times are Unix times in ms of the server's clock; the fields are named as on the bus. */
export type WaitInfo = Pick<Waiting, "run" | "wait" | "what" | "tool_id" | "tool_name" | "deadline_ms" | "on_deadline" | "arguments" | "schema" | "text" | "url" | "tenant"> & { since_ms: number; /** The call waits in its worker, so the wait ends with the call. */ held?: boolean };

/** How a wait ended, by whom and over which door. */
export interface WaitFate {
  wait: string;
  /** Of the decision. */
  id: string;
  decision: "allow" | "deny" | "accept" | "decline" | "cancel" | "result";
  by?: string;
  door?: string;
  at_ms: number;
}

export interface WaitingOptions {
  /** Only what this run waits for. */
  run?: string;
  tenant?: string;
  /** At most so many, 1 to 1,000. Default 100. */
  limit?: number;
  signal?: AbortSignal;
}

export interface DecideOptions extends CallOptions {
  /** Who decides, for the log. */
  by?: string;
  /** The same id again is the same decision. Left out: a new one. */
  decisionId?: string;
  /** How long to wait until it is applied, in ms. Default 60,000. */
  waitMs?: number;
}

/** What runs wait for, the newest first. */
export async function listWaits(deployment: Deployment, options: WaitingOptions): Promise<WaitInfo[]> {
  const { run, tenant } = options;
  if (run !== undefined) return (await waitsOf(deployment, run, deployment.until(options.signal))).filter((info) => tenant === undefined || info.tenant === tenant);
  return newestOf<WaitInfo>(deployment, options, {
    sets: (base) => [`${base}:index:waiting${tenant ? `:${tenant}` : ""}`],
    read: (use, base, page) =>
      use((redis) =>
        Promise.all(
          page.map(async ({ value }) => {
            const at = value.lastIndexOf("/");
            const [status, found] = await redis.hmGet(`${base}:run:${value.slice(0, at)}`, ["status", `wait:${value.slice(at + 1)}`]);
            return status === "open" && found ? (JSON.parse(found) as WaitInfo) : undefined;
          }),
        ),
      ),
    wants: () => true,
    at: ({ since_ms }) => since_ms,
  });
}

async function waitsOf(deployment: Deployment, run: string, signal: AbortSignal): Promise<WaitInfo[]> {
  const key = (await deployment.keys(signal)).run(run, await deployment.partitionOf(run, signal));
  const found = await deployment.commands.use(
    async (redis) => {
      const [status, names] = await redis.hmGet(key, ["status", "waits"]);
      return status === "open" && names ? redis.hmGet(key, names.trim().split(" ").map((name) => `wait:${name}`)) : [];
    },
    { signal },
  );
  return found.flatMap((value) => (value ? [JSON.parse(value) as WaitInfo] : [])).sort((a, b) => b.since_ms - a.since_ms);
}

/** What the methods that decide have in common. */
export function decisionOf(run: string, wait: string, { by, decisionId }: DecideOptions): { run: string; wait: string; decision_id: string; by?: string } {
  return { run, wait, decision_id: decisionId ?? randomUUID(), ...(by === undefined ? {} : { by }) };
}

/** Wait until a decision that was sent is applied. Throws as `Client.approve` does. */
export async function decided(deployment: Deployment, sent: WaitDecision, { waitMs = 60_000, signal }: DecideOptions): Promise<WaitFate> {
  const until = deployment.until(signal);
  const key = `${deployment.prefix}:{${await deployment.partitionOf(sent.run, until)}}:decision:${sent.run}:${sent.decision_id}`;
  const end = Date.now() + waitMs;
  for (let pause = FIRST_LOOK_MS; ; pause = Math.min(2 * pause, LONGEST_LOOK_MS)) {
    const found = await deployment.commands.use((redis) => redis.get(key), { signal: until });
    if (found) return counted(sent, JSON.parse(found) as { fate?: WaitFate; problem?: string });
    if (Date.now() >= end) throw new DecisionPending(sent.run, sent.wait, sent.decision_id, waitMs);
    await sleep(pause, undefined, { signal: until }).catch(() => until.throwIfAborted());
  }
}

function counted(sent: WaitDecision, { fate, problem }: { fate?: WaitFate; problem?: string }): WaitFate {
  if (problem !== undefined) throw new RequestInvalid(problem);
  if (!fate) throw new WaitNotFound(sent.run, sent.wait);
  if (fate.id !== sent.decision_id) throw new AlreadyDecided(sent.run, fate);
  return fate;
}
