/** The runs of a deployment as its index lists them, and the request of one that is asked again. */

import { createHash } from "node:crypto";
import type { Redis } from "./connection.js";
import type { Deployment } from "./deployment.js";
import { InvalidArgument, RunNotFound, RunNotRepeatable, RunOpen } from "./errors.js";
import { follow, isEnd } from "./follow.js";
import { MessageBuilder } from "./messages.js";
import type { Generate, Message, TerminalEvent, TextPart } from "./types.js";

export type RunState = "queued" | "running" | "waiting" | "completed" | "incomplete" | "failed" | "cancelled";
const OPEN = ["open", "cancelling", "expiring"];
const ENDED = ["completed", "incomplete", "failed", "cancelled"];
const FIELDS = ["status", "accepted", "provider", "model", "tenant", "turn", "attempt", "seq", "raw", "deadline", "ended", "finish", "error", "waits"];
const MOST = 1_000;

export interface RunInfo {
  run: string;
  /** `queued` until a provider answers, then `running`, `waiting` while it waits for a person or a client, then how it ended. */
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
  /** A state, or `open` (queued, running and waiting) or `ended` (the others). Left out: all. */
  state?: "open" | "ended" | RunState;
  tenant?: string;
  /** At most so many, 1 to 1,000. Default 100. */
  limit?: number;
  signal?: AbortSignal;
}

type Use = <R>(commands: (redis: Redis) => Promise<R>) => Promise<R>;

/** Which sorted sets to list, and what each of their members is. */
interface Listing<T> {
  sets: (base: string) => string[];
  read: (use: Use, base: string, page: { value: string; score: number }[]) => Promise<(T | undefined)[]>;
  wants: (one: T) => boolean;
  at: (one: T) => number;
}

/** The newest of all sets. What is filtered out makes room for an older one. Throws InvalidArgument. */
export async function newestOf<T>(deployment: Deployment, { limit = 100, signal }: { limit?: number; signal?: AbortSignal }, listing: Listing<T>): Promise<T[]> {
  if (!Number.isSafeInteger(limit) || limit < 1 || limit > MOST) throw new InvalidArgument(`limit: ${limit} is not a whole number from 1 to ${MOST}`);
  const until = deployment.until(signal);
  const use: Use = (commands) => deployment.commands.use(commands, { signal: until });
  const { partitions } = await deployment.keys(until);
  const bases = [...Array(partitions).keys()].map((n) => `${deployment.prefix}:{${n}}`);
  const found: [T, string][] = [];
  await Promise.all(
    bases.flatMap((base) =>
      listing.sets(base).map(async (key) => {
        for (let at = 0, taken = 0; taken < limit; at += limit) {
          const page = await use((redis) => redis.zRangeWithScores(key, "+inf", "-inf", { BY: "SCORE", REV: true, LIMIT: { offset: at, count: limit } }));
          for (const [i, one] of (await listing.read(use, base, page)).entries()) {
            if (one === undefined || !listing.wants(one)) continue;
            taken++;
            found.push([one, page[i]?.value ?? ""]);
          }
          if (page.length < limit) return;
        }
      }),
    ),
  );
  return found.sort(([a, nameA], [b, nameB]) => listing.at(b) - listing.at(a) || (nameA < nameB ? 1 : -1)).slice(0, limit).map(([one]) => one);
}

/** The newest runs first: by the time of the end, or of the acceptance of an open run. Throws InvalidArgument. */
export function listRuns(deployment: Deployment, options: RunsOptions): Promise<RunInfo[]> {
  const { state, tenant } = options;
  const halves = state === "queued" || state === "running" || state === "waiting" ? ["open"] : state === undefined ? ["open", "ended"] : ENDED.includes(state) ? ["ended"] : [state];
  return newestOf<RunInfo>(deployment, options, {
    sets: (base) => halves.map((half) => `${base}:index:${half}${tenant ? `:${tenant}` : ""}`),
    read: async (use, base, page) => {
      const hashes = await use((redis) => Promise.all(page.map(({ value }) => redis.hmGet(`${base}:run:${value}`, FIELDS))));
      return page.map(({ value }, i) => infoOf(value, hashes[i] ?? []));
    },
    wants: (info) => state === undefined || [info.state, ENDED.includes(info.state) ? "ended" : "open"].includes(state),
    at: ({ endedMs, acceptedMs }) => endedMs ?? acceptedMs,
  });
}

/** What is known of these runs; those that are unknown or have expired are left out. */
export async function describeRuns(deployment: Deployment, runs: readonly string[], signal: AbortSignal): Promise<Map<string, RunInfo>> {
  const found = await Promise.all(
    runs.map(async (run) => {
      const key = (await deployment.keys(signal)).run(run, await deployment.partitionOf(run, signal));
      return infoOf(run, await deployment.commands.use((redis) => redis.hmGet(key, FIELDS), { signal }));
    }),
  );
  return new Map(found.flatMap((info) => (info ? [[info.run, info]] : [])));
}

function infoOf(run: string, values: (string | null)[]): RunInfo | undefined {
  const [status, accepted, provider, model, tenant, turn, attempt, seq, raw, deadline, ended, finish, error, waits] = values;
  const since = accepted ?? ended;
  if (!status || !since || ![...OPEN, ...ENDED].includes(status)) return undefined;
  const state = (!OPEN.includes(status) ? status : waits ? "waiting" : attempt === "1" && raw === "0" ? "queued" : "running") as RunState;
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
  const { request } = await endedRun(deployment, run, again, signal);
  return linked(request, run, "retry", again, request.messages);
}

/** The request that continues the last turn's text. */
export async function requestToResume(deployment: Deployment, run: string, again: number, signal: AbortSignal): Promise<Generate> {
  const { request, turn, continues, choice } = await endedRun(deployment, run, again, signal);
  const last = requestOf(request, choice);
  if (!continues) throw new RunNotRepeatable(run, `${last.model} at ${last.provider} cannot continue a partial answer to this request`);
  if (request.mode === "prefill" && turn > 0) throw new RunNotRepeatable(run, "in mode prefill a run cannot be resumed after its tools ran");
  const builder = new MessageBuilder();
  let end: TerminalEvent | undefined;
  for await (const event of follow(deployment, run, { signal })) {
    builder.add(event);
    if (isEnd(event)) end = event;
  }
  const { texts, calls } = builder.turn(turn, end);
  if (calls) throw new RunNotRepeatable(run, "it ended among its tool calls");
  while (texts.length > 0 && !texts.at(-1)?.trim()) texts.pop();
  if (texts.length === 0) throw new RunNotRepeatable(run, "it has no text to continue");
  // What a provider gets never ends in whitespace: they reject that.
  const parts = texts.map((text, n): TextPart => ({ type: "text", text: n === texts.length - 1 ? text.trimEnd() : text }));
  const messages = [...request.messages, ...(turn > 0 ? builder.messages(undefined, {}, [], turn) : [])];
  const before = messages.at(-1);
  if (before?.role === "assistant") messages.splice(-1, 1, { ...before, content: [...partsOf(before.content), ...parts] });
  else messages.push({ role: "assistant", content: parts, ...(request.mode === "prefill" && request.participant !== undefined ? { participant: request.participant } : {}) });
  return linked(last, run, "resume", again, messages);
}

function partsOf(content: Message["content"]): Exclude<Message["content"], string> {
  return typeof content === "string" ? [{ type: "text", text: content }] : content;
}

/** The request as it was sent last: the choice is 0 for its own provider and model, n for its n-th fallback. */
function requestOf(request: Generate, choice: number): Generate {
  const fallback = request.fallback?.[choice - 1];
  if (!fallback) return request;
  const { extra: own, ...rest } = request;
  const extra = fallback.extra ?? (fallback.provider === request.provider ? own : undefined);
  return { ...rest, provider: fallback.provider, model: fallback.model, ...(extra === undefined ? {} : { extra }), fallback: request.fallback?.slice(choice) ?? [] };
}

function linked(request: Generate, run: string, how: "retry" | "resume", again: number, messages: Message[]): Generate {
  const id = `${how}-${createHash("sha256").update(`${how} ${again} ${run}`).digest("hex").slice(0, 32)}`;
  return { ...request, id, messages, metadata: { ...request.metadata, [`${how}_of`]: run } };
}

interface EndedRun {
  request: Generate;
  turn: number;
  /** Whether the provider that was called last can continue a partial answer. */
  continues: boolean;
  choice: number;
}

async function endedRun(deployment: Deployment, run: string, again: number, signal: AbortSignal): Promise<EndedRun> {
  if (!Number.isSafeInteger(again) || again < 1 || again > 1000) throw new InvalidArgument(`again: ${again} is not a whole number from 1 to 1000`);
  const key = (await deployment.keys(signal)).run(run, await deployment.partitionOf(run, signal));
  const fields = ["status", "request", "turn", "continues", "choice"];
  const [status, request, turn, continues, choice] = await deployment.commands.use((redis) => redis.hmGet(key, fields), { signal });
  if (!status || status === "awaited") throw new RunNotFound(run);
  if (OPEN.includes(status)) throw new RunOpen(run);
  if (status === "completed" || !request) throw new RunNotRepeatable(run, request ? "it completed" : "its request was refused, so it is not kept");
  const chosen = Number(choice ?? 0);
  return { request: JSON.parse(request) as Generate, turn: Number(turn ?? 0), continues: continues?.[chosen] !== "0", choice: chosen };
}
