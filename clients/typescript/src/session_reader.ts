/**
 * Reads a session in the one order that it has for every reader: its own events, and each run's at the run's place.
 *
 * An event of the session says behind which of the open run's events its place is, and the script that wrote it saw that
 * one as the newest. So what came later in the run is read only after the session was looked at again.
 */

import { createHash } from "node:crypto";

import { BLOCK_MS, newest, oldest, Outage, type Entry, type Redis } from "./connection.js";
import { eventIn, type Deployment } from "./deployment.js";
import { CursorAhead, CursorTrimmed, InvalidArgument, SessionNotFound, SessionReplaced } from "./errors.js";
import type { PublicEvent, SessionEvent } from "./types.js";

const COUNT = 256;

/** One event of a session or of one of its runs, and the cursor behind it: an `after` of the next `follow`. */
export interface SessionStep {
  event: SessionEvent | PublicEvent;
  cursor: string;
}

interface RunTail {
  run: string;
  log: string;
  /** The last event that was passed on. */
  seq: number;
  /** The last entry that was read. */
  position: string;
  unread: PublicEvent[];
}

/** An event of the session that was read. */
interface Read {
  seq: number;
  atMs: number;
  /** Open after it. */
  run: string | undefined;
  digest: string;
}

export class SessionReader {
  readonly #outage: Outage;
  #at: [session: number, run: number];
  /** Which session of the name: one may be deleted and made again. */
  #made: string | undefined;
  #partition: number | undefined;
  #run: RunTail | undefined;
  /** Events of the session that were read, and have not been passed on. */
  #known: SessionEvent[] = [];
  #readUpTo: number;
  /** The newest events of the session that were read: a fail-over may lose some of them. */
  #newest: Read[] = [];
  /** Of the newest runs before the present one, the last event that was passed on. */
  readonly #told = new Map<string, number>();
  #looking = new AbortController();

  constructor(readonly deployment: Deployment, readonly ref: string, readonly name: string, after: string | undefined, readonly signal: AbortSignal) {
    const found = after === undefined ? ["", "-1", "-1"] : /^(-1|\d{1,15})\.(-1|\d{1,15})\.([0-9a-f]{8})$/.exec(after);
    if (!found) throw new InvalidArgument(`after: ${JSON.stringify(after?.slice(0, 80))} is no cursor of a session`);
    this.#at = [Number(found[1]), Number(found[2])];
    this.#made = found[3];
    this.#readUpTo = this.#at[0];
    this.#outage = new Outage(deployment.reconnectMs);
  }

  close(): void {
    this.#looking.abort();
  }

  /**
   * The next events, some hundred at most; none if none is stored and, if `live`, none came for a while; undefined after
   * an outage.
   */
  async read(live: boolean): Promise<SessionStep[] | undefined> {
    try {
      this.#partition ??= await this.#begin();
      const steps = await this.#read(live);
      this.#outage.over();
      return steps;
    } catch (error) {
      await this.#outage.wait(error, this.signal);
      return undefined;
    }
  }

  get #log(): string {
    return this.#logOf(this.ref);
  }

  #logOf(name: string): string {
    return `${this.deployment.prefix}:{${this.#partition}}:log:${name}`;
  }

  #use<T>(commands: (redis: Redis) => Promise<T>): Promise<T> {
    return this.deployment.commands.use(commands, { signal: this.signal });
  }

  async #read(live: boolean): Promise<SessionStep[]> {
    for (;;) {
      if (this.#known.length === 0) await this.#look();
      const steps = await this.#ofSession();
      if (steps.length > 0) return steps;
      if (this.#run && (await this.#more(this.#run))) {
        await this.#look(); // after the run was read, before its events are passed on
        if (this.#known.length === 0) return this.#ofRun(this.#run);
      } else if (!live || !(await this.#news())) {
        return [];
      }
    }
  }

  /** Find the session, and which run was open at the cursor. */
  async #begin(): Promise<number> {
    const partition = await this.deployment.partitionOf(this.ref, this.signal);
    const log = `${this.deployment.prefix}:{${partition}}:log:${this.ref}`;
    const last = await this.#use((redis) => newest(redis, log));
    const made = await this.#use((redis) => redis.hGet(this.#hash(partition), "made"));
    if (!last || !made) throw new SessionNotFound(this.name);
    if (this.#made !== undefined && this.#made !== made) throw new SessionReplaced(this.name);
    this.#made = made;
    const [session, run] = this.#at;
    const newestSeq = sessionEvent(log, last).session_seq;
    if (session > newestSeq) throw new CursorAhead(log, this.#cursor, String(newestSeq));
    const found = session < 0 ? undefined : await this.#use((redis) => oldest(redis, log, `1-${session}`, `1-${session}`));
    if (session >= 0 && !found) throw new CursorTrimmed(log, this.#cursor, (await this.#use((redis) => oldest(redis, log)))?.id ?? "none");
    const event = found && this.#remember(log, found);
    this.#partition = partition;
    if (event?.run !== undefined && event.type !== "run_ended") this.#run = this.#tailOf(event.run, run);
    return partition;
  }

  /** When the newest event of the session was written. Throws SessionNotFound, SessionReplaced. */
  async #newestMs(): Promise<string> {
    const [made, newestMs] = await this.#use((redis) => redis.hmGet(this.#hash(this.#partition ?? 0), ["made", "newest_ms"]));
    if (!made) throw new SessionNotFound(this.name);
    if (made !== this.#made) throw new SessionReplaced(this.name);
    return newestMs ?? "";
  }

  #hash(partition: number): string {
    return `${this.deployment.prefix}:{${partition}}:session:${this.ref}`;
  }

  get #cursor(): string {
    return `${this.#at.join(".")}.${this.#made}`;
  }

  #tailOf(run: string, seq: number): RunTail {
    return { run, log: this.#logOf(run), seq, position: "0-0", unread: [] };
  }

  /** Read stored events of the session. */
  async #look(): Promise<void> {
    const log = this.#log;
    const stored = async (): Promise<Entry[]> =>
      (await this.#use((redis) => redis.xRange(log, this.#readUpTo < 0 ? "-" : `(1-${this.#readUpTo}`, "+", { COUNT }))) ?? [];
    let entries = await stored();
    // After the events: if it is the same session, they are of it.
    while (!(await this.#isAsRead(log, await this.#newestMs(), entries.length > 0))) {
      await this.#goBack(log);
      entries = await stored();
    }
    for (const entry of entries) {
      const event = this.#remember(log, entry);
      if (this.#readUpTo >= 0 && event.session_seq !== this.#readUpTo + 1) throw new CursorTrimmed(log, `1-${this.#readUpTo}`, entry.id);
      this.#known.push(event);
      this.#readUpTo = event.session_seq;
    }
  }

  #remember(log: string, entry: Entry): SessionEvent {
    const event = sessionEvent(log, entry);
    const run = event.type === "run_ended" ? undefined : event.run;
    this.#newest.push({ seq: event.session_seq, atMs: event.at_ms, run, digest: digestOf(entry) });
    if (this.#newest.length > COUNT) this.#newest.shift();
    return event;
  }

  /**
   * Whether the newest event that was read is still there: a fail-over may have lost it, and another one may have its number
   * now. `newestMs`: when the session's newest event was written. `hasMore`: it was not read yet.
   */
  async #isAsRead(log: string, newestMs: string, hasMore: boolean): Promise<boolean> {
    const last = this.#newest.at(-1);
    if (!last || (!hasMore && newestMs === String(last.atMs))) return true;
    const found = await this.#use((redis) => oldest(redis, log, `1-${last.seq}`, `1-${last.seq}`));
    return found ? digestOf(found) === last.digest : hasMore; // or it was trimmed
  }

  /** To the newest event that the server has as it was read. What it has after that is passed on next. */
  async #goBack(log: string): Promise<void> {
    const first = this.#newest[0]?.seq ?? 0;
    const found = (await this.#use((redis) => redis.xRange(log, `1-${first}`, "+", { COUNT }))) ?? [];
    const there = new Map(found.map((entry) => [entry.id, digestOf(entry)]));
    let last = this.#newest.at(-1);
    for (; last && there.get(`1-${last.seq}`) !== last.digest; last = this.#newest.at(-1)) this.#newest.pop();
    this.#readUpTo = last?.seq ?? first - 1;
    this.#known = this.#known.filter(({ session_seq }) => session_seq <= this.#readUpTo);
    if (this.#at[0] <= this.#readUpTo) return;
    if (last?.run === undefined) this.#run = undefined;
    else if (this.#run?.run !== last.run) this.#run = this.#tailOf(last.run, this.#told.get(last.run) ?? -1);
    this.#at = [this.#readUpTo, this.#run?.seq ?? -1];
  }

  #leaveRun(): void {
    if (!this.#run) return;
    this.#told.set(this.#run.run, this.#run.seq);
    for (const run of this.#told.keys()) if (this.#told.size > 16) this.#told.delete(run);
    this.#run = undefined;
  }

  /** Read stored events of a run; whether there is something to pass on. */
  async #more(tail: RunTail): Promise<boolean> {
    while (tail.unread.length === 0) {
      const entries = (await this.#use((redis) => redis.xRange(tail.log, `(${tail.position}`, "+", { COUNT }))) ?? [];
      if (entries.length === 0) return false;
      tail.position = entries.at(-1)?.id ?? tail.position;
      tail.unread.push(...entries.map(({ id, message }) => eventIn(tail.log, id, message, "seq") as PublicEvent).filter(({ seq }) => seq > tail.seq));
    }
    return true;
  }

  /** The session's events that were read, each behind the run's events that precede it. */
  async #ofSession(): Promise<SessionStep[]> {
    const steps: SessionStep[] = [];
    for (let event = this.#known[0]; event && steps.length < COUNT; event = this.#known[0]) {
      if (event.run !== undefined) {
        if (this.#run?.run !== event.run) {
          this.#leaveRun();
          this.#run = this.#tailOf(event.run, -1);
          this.#at = [this.#at[0], -1];
        }
        const place = event.run_seq ?? -1;
        // What is passed on is behind the reader: it is given before another read may fail.
        if (this.#run.seq < place && this.#run.unread.length === 0 && steps.length > 0) return steps;
        if (this.#run.seq < place && (await this.#more(this.#run))) {
          const ofRun = this.#ofRun(this.#run, place);
          steps.push(...ofRun);
          if (ofRun.length > 0 && this.#run.seq < place) continue;
        }
        // If the run has nothing more up to there, its log has expired.
      }
      this.#known.shift();
      this.#at = [event.session_seq, event.type === "run_ended" ? -1 : this.#at[1]];
      if (event.type === "run_ended") this.#leaveRun();
      steps.push({ event, cursor: this.#cursor });
    }
    return steps;
  }

  #ofRun(tail: RunTail, upTo = Infinity): SessionStep[] {
    const end = tail.unread.findIndex(({ seq }) => seq > upTo);
    return tail.unread.splice(0, end < 0 ? tail.unread.length : end).map((event) => {
      tail.seq = event.seq;
      this.#at = [this.#at[0], event.seq];
      return { event, cursor: this.#cursor };
    });
  }

  /** Wait until the session or its open run has something new; false after a while without. */
  async #news(): Promise<boolean> {
    const waits: [string, string][] = [[this.#log, this.#readUpTo < 0 ? "0-0" : `1-${this.#readUpTo}`]];
    if (this.#run) waits.push([this.#run.log, this.#run.position]);
    const tail = this.deployment.tail(this.#partition ?? 0);
    this.#looking = new AbortController();
    const signal = AbortSignal.any([this.signal, this.#looking.signal]);
    try {
      const waiting = waits.map(([log, after]) => tail.wait(log, after, BLOCK_MS, signal));
      for (const one of waiting) one.catch(() => {}); // the one that is left is aborted
      if ((await Promise.race(waiting)).length > 0) return true;
    } finally {
      this.#looking.abort();
      tail.readers--;
    }
    await this.#newestMs();
    return false;
  }
}

function digestOf({ message }: Entry): string {
  return createHash("sha1").update(message["__data__"] ?? "").digest("hex");
}

function sessionEvent(log: string, { id, message }: Entry): SessionEvent {
  return eventIn(log, id, message, "session_seq") as unknown as SessionEvent;
}
