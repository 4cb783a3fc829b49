/** The runs of a deployment as its index lists them, and the request of one that is asked again. */

import { createHash } from "node:crypto";
import type { Redis } from "./connection.js";
import type { Deployment } from "./deployment.js";
import { InvalidArgument, RunNotFound, RunNotRepeatable, RunOpen } from "./errors.js";
import type { Generate } from "./types.js";

export type RunState = "queued" | "running" | "completed" | "incomplete" | "failed" | "cancelled";
const OPEN = ["open", "cancelling", "expiring"];
const ENDED = ["completed", "incomplete", "failed", "cancelled"];
const FIELDS = ["status", "accepted", "provider", "model", "tenant", "turn", "attempt", "seq", "raw", "deadline", "ended", "finish", "error"];
const MOST = 1_000;

export interface RunInfo {
  run: string;
  /** `queued` until a provider answers, then `running`, then how it ended. */
  state: RunState;
  /** Unix times in ms of the server's clock. */
  acceptedMs: number;
  endedMs?: number;
  deadlineMs?: number;
  provider?: string;
  model?: string;
  tenant?: string;
  turn: number;
  attempt: number;
  /** Number of its public events so far. */
  events: number;
  finish?: string;
  error?: string;
}

export interface RunsOptions {
  /** A state, or `open` (queued and running) or `ended` (the others). Left out: all. */
  state?: "open" | "ended" | RunState;
  tenant?: string;
  /** At most so many, 1 to 1,000. Default 100. */
  limit?: number;
  signal?: AbortSignal;
}

/** The newest runs first: by the time of the end, or of the acceptance of an open run. Throws InvalidArgument. */
export async function listRuns(deployment: Deployment, options: RunsOptions): Promise<RunInfo[]> {
  const { state, tenant, limit = 100 } = options;
  if (!Number.isSafeInteger(limit) || limit < 1 || limit > MOST) throw new InvalidArgument(`limit: ${limit} is not a whole number from 1 to ${MOST}`);
  const halves = state === "queued" || state === "running" ? ["open"] : state === undefined ? ["open", "ended"] : ENDED.includes(state) ? ["ended"] : [state];
  const signal = deployment.until(options.signal);
  const use = <T>(commands: (redis: Redis) => Promise<T>): Promise<T> => deployment.commands.use(commands, { signal });
  const { partitions } = await deployment.keys(deployment.commands, signal);
  const sets = [...Array(partitions).keys()].flatMap((n) => halves.map((half) => ({ n, key: `${deployment.prefix}:{${n}}:index:${half}${tenant ? `:${tenant}` : ""}` })));
  const found: RunInfo[] = [];
  // A run that is filtered out makes room for an older one: read on, set by set, until there are enough.
  await Promise.all(
    sets.map(async ({ n, key }) => {
      for (let at = 0, taken = 0; taken < limit; at += limit) {
        const page = await use((redis) => redis.zRange(key, "+inf", "-inf", { BY: "SCORE", REV: true, LIMIT: { offset: at, count: limit } }));
        const hashes = await use((redis) => Promise.all(page.map((run) => redis.hmGet(`${deployment.prefix}:{${n}}:run:${run}`, FIELDS))));
        for (const [i, run] of page.entries()) {
          const info = infoOf(run, hashes[i] ?? []);
          if (!info || (state !== undefined && ![info.state, ENDED.includes(info.state) ? "ended" : "open"].includes(state))) continue;
          taken++;
          found.push(info);
        }
        if (page.length < limit) return;
      }
    }),
  );
  const at = ({ endedMs, acceptedMs }: RunInfo): number => endedMs ?? acceptedMs;
  return found.sort((a, b) => at(b) - at(a) || (a.run < b.run ? 1 : -1)).slice(0, limit);
}

function infoOf(run: string, values: (string | null)[]): RunInfo | undefined {
  const [status, accepted, provider, model, tenant, turn, attempt, seq, raw, deadline, ended, finish, error] = values;
  const since = accepted ?? ended;
  if (!status || !since || ![...OPEN, ...ENDED].includes(status)) return undefined;
  const state = (OPEN.includes(status) ? (attempt === "1" && raw === "0" ? "queued" : "running") : status) as RunState;
  const texts = { provider, model, tenant, finish, error };
  const numbers = { deadlineMs: deadline, endedMs: ended };
  return {
    run,
    state,
    acceptedMs: Number(since),
    turn: Number(turn ?? 0),
    attempt: Number(attempt ?? 1),
    events: Number(seq ?? 0),
    ...Object.fromEntries(Object.entries(texts).filter(([, value]) => value)),
    ...Object.fromEntries(Object.entries(numbers).flatMap(([name, value]) => (value ? [[name, Number(value)]] : []))),
  };
}

/** The request of a run that did not complete, as a new run whose id follows from the old one's, as in Python. */
export async function requestAgain(deployment: Deployment, run: string, again: number, signal: AbortSignal): Promise<Generate> {
  if (!Number.isSafeInteger(again) || again < 1 || again > 1000) throw new InvalidArgument(`again: ${again} is not a whole number from 1 to 1000`);
  const keys = await deployment.keys(deployment.commands, signal);
  for (const partition of keys.places(run)) {
    const [status, request] = await deployment.commands.use((redis) => redis.hmGet(keys.run(run, partition), ["status", "request"]), { signal });
    if (!status || status === "awaited") continue;
    if (OPEN.includes(status)) throw new RunOpen(run);
    if (status === "completed" || !request) throw new RunNotRepeatable(run, request ? "it completed" : "its request was refused, so it is not kept");
    const generate = JSON.parse(request) as Generate;
    const id = `retry-${createHash("sha256").update(`retry ${again} ${run}`).digest("hex").slice(0, 32)}`;
    return { ...generate, id, metadata: { ...generate.metadata, retry_of: run } };
  }
  throw new RunNotFound(run);
}
