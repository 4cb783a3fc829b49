/**
 * One run's log from a cursor on: every event once, in order, none left out.
 *
 * The log's entry ids are `<attempt>-<seq>`. A cursor is a `seq` alone; its entry is looked for among the attempts once,
 * and from then on the entry ids are the position. So a connection may break between any two reads.
 */

import { BLOCK_MS, newest, oldest, Outage, type Entry, type Redis } from "./connection.js";
import { eventIn, type Deployment } from "./deployment.js";
import { CursorAhead, CursorTrimmed, InvalidArgument, RunLost, RunNotFound } from "./errors.js";
import { idParts } from "./keys.js";
import type { Tail } from "./tail.js";
import type { PublicEvent, TerminalEvent } from "./types.js";

const LAST = "18446744073709551615";
export const OPEN = new Set(["open", "cancelling", "expiring", "awaited"]);
const ENDS = new Set<string>(["completed", "incomplete", "failed", "cancelled"] satisfies TerminalEvent["type"][]);

export interface FollowOptions {
  /** The seq of the last event that is known already; left out: all events. */
  after?: number;
  /** How long the run may be unknown, in ms: a published request waits until it is taken in. Default 60,000. */
  waitMs?: number;
  /** Ends the iteration with the signal's reason. */
  signal?: AbortSignal;
}

export function isEnd(event: PublicEvent): event is TerminalEvent {
  return ENDS.has(event.type);
}

export async function* follow(deployment: Deployment, run: string, options: FollowOptions): AsyncGenerator<PublicEvent, void, undefined> {
  const { after = -1 } = options;
  if (!Number.isSafeInteger(after) || after < -1) throw new InvalidArgument(`after: ${after} is no seq: a whole number from 0, or -1`);
  const signal = deployment.until(options.signal);
  const reader = new LogReader(deployment, run, after, options.waitMs ?? 60_000, signal);
  try {
    while (!reader.ended) yield* await reader.read();
  } finally {
    reader.close();
  }
}

export class LogReader {
  ended = false;
  #tail: Tail | undefined;
  readonly #outage: Outage;
  #position: string | undefined;
  #gap: CursorTrimmed | undefined;
  #known = false;
  /** Where the run was found. It stays there, whatever becomes of the number of partitions. */
  #partition: number | undefined;
  #waitedMs = 0;

  constructor(
    readonly deployment: Deployment,
    readonly run: string,
    public seq: number,
    readonly waitMs: number,
    readonly signal: AbortSignal,
  ) {
    this.#outage = new Outage(deployment.reconnectMs);
  }

  close(): void {
    if (this.#tail) this.#tail.readers--;
    this.#tail = undefined;
  }

  #use<T>(commands: (redis: Redis) => Promise<T>): Promise<T> {
    return this.deployment.commands.use(commands, { signal: this.signal });
  }

  /** The next events; empty when none came for a while. */
  async read(): Promise<PublicEvent[]> {
    if (this.#gap) throw this.#gap;
    try {
      const events = await this.#read();
      this.#outage.over();
      return events;
    } catch (error) {
      await this.#outage.wait(error, this.signal);
      return [];
    }
  }

  async #read(): Promise<PublicEvent[]> {
    const keys = await this.deployment.keys(this.signal);
    const partition = this.#partition ?? (await this.deployment.partitionOf(this.run, this.signal));
    const [log, run] = [keys.log(this.run, partition), keys.run(this.run, partition)];
    this.#position ??= await this.#locate(run, log);
    if (this.ended) return [];
    const asked = Date.now();
    const patience = this.#known ? BLOCK_MS : Math.min(BLOCK_MS, Math.max(1, this.waitMs - this.#waitedMs));
    this.#tail ??= this.deployment.tail(partition);
    const entries = await this.#tail.wait(log, this.#position, patience, this.signal);
    if (entries.length > 0) {
      this.#known = true;
      this.#partition = partition;
      return this.#inOrder(log, entries);
    }
    this.#waitedMs += Date.now() - asked;
    if (!this.#known) this.close(); // it may come in another partition
    await this.#lookForRun(run, log);
    return [];
  }

  #inOrder(log: string, entries: Entry[]): PublicEvent[] {
    const events: PublicEvent[] = [];
    for (const { id, message } of entries) {
      const event = eventIn(log, id, message, "seq") as PublicEvent;
      if (event.seq > this.seq) {
        if (event.seq !== this.seq + 1) {
          this.#gap = new CursorTrimmed(log, String(this.seq), String(event.seq));
          break; // what came before the gap is given first
        }
        events.push(event);
        this.seq = event.seq;
        this.ended = isEnd(event);
      }
      this.#position = id;
    }
    return events;
  }

  /** The id after which to read: of the entry with the cursor's seq, or close before it. */
  async #locate(run: string, log: string): Promise<string> {
    if (this.seq < 0) return "0-0";
    const last = await this.#use((redis) => newest(redis, log));
    if (!last) {
      // It was seen once, so there is nothing to wait for.
      if (!(await this.#use((redis) => redis.exists(run)))) throw new RunNotFound(this.run);
      throw new CursorAhead(log, String(this.seq), "none");
    }
    const [lastAttempt, lastSeq] = idParts(last.id);
    if (lastSeq < this.seq) throw new CursorAhead(log, String(this.seq), String(lastSeq));
    if (lastSeq === BigInt(this.seq)) {
      this.ended = isEnd(eventIn(log, last.id, last.message, "seq") as PublicEvent);
      return last.id;
    }
    // An attempt's events follow those of the one before it, so the first that has later events has the next one.
    const first = await this.#use((redis) => oldest(redis, log));
    for (let n = idParts((first ?? last).id)[0]; n <= lastAttempt; n++) {
      const from = `${n}-${this.seq + 1}`;
      const next = await this.#use((redis) => oldest(redis, log, from, `${n}-${LAST}`));
      if (next) return `${n}-${idParts(next.id)[1] - 1n}`;
    }
    throw new RunNotFound(this.run); // its log expired meanwhile
  }

  /** Nothing came: is there a run at all, and may anything still come of it? */
  async #lookForRun(run: string, log: string): Promise<void> {
    const [status, logs] = await this.#use((redis) =>
      Promise.all([redis.hGet(run, "status"), redis.exists(log)]),
    );
    if ((status && OPEN.has(status)) || logs) this.#known = true;
    else if (this.#known) throw new RunLost(this.run);
    else if (status || this.#waitedMs >= this.waitMs) throw new RunNotFound(this.run);
  }
}
