/**
 * Reads a run with all child runs below it in the one order that the tree has for every reader.
 *
 * The parser's commits write that order, from the one on that begins the tree's first child. Until then a reader reads
 * the root's own log, and from there on what the entries of the order name, each from its run's log.
 */

import { BLOCK_MS, oldest, Outage, type Entry, type Redis } from "./connection.js";
import { eventIn, type Deployment } from "./deployment.js";
import { CursorAhead, CursorTrimmed, InvalidArgument, Malformed, RunLost, RunNotFound } from "./errors.js";
import { isEnd, LogReader, OPEN } from "./follow.js";
import { idParts, rootOf } from "./keys.js";
import type { PublicEvent } from "./types.js";

const COUNT = 256;
const START = "0-0";

/** One event of a run of the tree, the runs from the top down to it, and the cursor behind it. */
export interface TreeStep {
  event: PublicEvent;
  /** Each run is the parent of the next one; the last one is the event's. */
  path: string[];
  /** An `after` of the next `followTree`. */
  cursor: string;
}

export interface FollowTreeOptions {
  /** The cursor of the last step that is known already; left out: all of the tree. */
  after?: string;
  /** How long the run may be unknown, in ms. Default 60,000. */
  waitMs?: number;
  /** Ends the iteration with the signal's reason. */
  signal?: AbortSignal;
}

/** What one commit added: the run's events from the entry `first` of its log to the seq `last`, and children that it begins. */
interface TreeEntry {
  id: string;
  run: string;
  first: string;
  last: number;
  begins: string[];
}

interface Cursor {
  entry: string;
  seq: number;
  below: string;
}

export async function* followTree(deployment: Deployment, run: string, options: FollowTreeOptions): AsyncGenerator<TreeStep, void, undefined> {
  const reader = new TreeReader(deployment, run, cursorIn(options.after), options.waitMs ?? 60_000, deployment.until(options.signal));
  try {
    while (!reader.ended) yield* await reader.read();
  } finally {
    reader.close();
  }
}

class TreeReader {
  ended = false;
  readonly #root: string;
  readonly #outage: Outage;
  /** Reads the root's log until the order begins. */
  #own: LogReader | undefined;
  /** What was read there, and is not passed on yet. */
  #ofRoot: PublicEvent[] = [];
  /** Of each run, the last event that was passed on here: a fail-over may let its place come again. */
  readonly #seqs = new Map<string, number>();
  /** The last entry of the order that was read; undefined: it must be found. */
  #position: string | undefined;
  #unread: TreeEntry[] = [];
  /** The runs that were begun, and the top; undefined: not known. */
  #begun: Set<string> | undefined;
  #partition: number | undefined;
  #known = false;
  #waitedMs = 0;
  /** Whether the end may be near: the top has ended, or nothing came for a while. */
  #asksForEnd: boolean;

  constructor(
    readonly deployment: Deployment,
    readonly top: string,
    readonly after: Cursor | undefined,
    readonly waitMs: number,
    readonly signal: AbortSignal,
  ) {
    this.#root = rootOf(top);
    this.#outage = new Outage(deployment.reconnectMs);
    this.#asksForEnd = after !== undefined;
    if (!after) {
      this.#position = START;
      this.#begun = new Set([top]);
    }
    if (top === this.#root && (!after || after.entry === START)) {
      this.#seqs.set(top, after?.seq ?? -1);
      this.#own = new LogReader(deployment, top, after?.seq ?? -1, waitMs, signal);
    }
  }

  close(): void {
    this.#own?.close();
  }

  /** The next events, some hundred at most; none if none came for a while. */
  async read(): Promise<TreeStep[]> {
    try {
      this.#partition = await this.#found();
      const steps = this.#own ? await this.#beforeTheOrder(this.#own) : await this.#inTheOrder();
      this.#outage.over();
      return steps;
    } catch (error) {
      await this.#outage.wait(error, this.signal);
      return [];
    }
  }

  #use<T>(commands: (redis: Redis) => Promise<T>): Promise<T> {
    return this.deployment.commands.use(commands, { signal: this.signal });
  }

  /** Where the tree is. It stays there once it is known. */
  async #found(): Promise<number> {
    if (this.#known && this.#partition !== undefined) return this.#partition;
    return this.deployment.partitionOf(this.#root, this.signal);
  }

  #key(kind: "run" | "log", name: string): string {
    return `${this.deployment.prefix}:{${this.#partition}}:${kind}:${name}`;
  }

  get #tree(): string {
    return this.#key("log", `tree/${this.#root}`);
  }

  async #beforeTheOrder(own: LogReader): Promise<TreeStep[]> {
    let begin = await this.#first();
    const seq = (): number => this.#seqs.get(this.top) ?? -1;
    if (begin && this.after && this.after.seq > begin.last) {
      this.#endOwn(undefined); // a fail-over gave the event another place
      return [];
    }
    if (this.#ofRoot.length === 0 && (!begin || seq() < begin.last)) this.#ofRoot = await own.read();
    begin ??= await this.#first(); // after the root was read, before its events are passed on
    const events = this.#ofRoot.splice(0);
    const last = begin?.last ?? Infinity;
    const steps = events.filter((event) => event.seq <= last).map((event) => this.#step(event, START));
    if (!begin) this.ended = own.ended;
    else if (seq() >= begin.last) {
      this.#endOwn(begin.id);
      this.#beginChildren(begin);
    }
    return steps;
  }

  #endOwn(position: string | undefined): void {
    this.#own?.close();
    this.#own = undefined;
    this.#position = position;
    this.#known = true;
  }

  async #first(): Promise<TreeEntry | undefined> {
    const entry = await this.#use((redis) => oldest(redis, this.#tree));
    return entry && this.#decoded(entry);
  }

  async #inTheOrder(): Promise<TreeStep[]> {
    if (this.#position === undefined && this.after) await this.#locate(this.after);
    for (;;) {
      const steps = await this.#ofEntries();
      if (steps.length > 0) {
        this.#known = true;
        return steps;
      }
      if (await this.#more()) continue;
      if (this.#asksForEnd && (await this.#isOver())) {
        // What was written before that look is in the order by now.
        if (await this.#more()) continue;
        this.ended = true;
        return [];
      }
      if (!(await this.#news())) {
        this.#asksForEnd = true;
        return [];
      }
    }
  }

  /** The events of the entries that were read. */
  async #ofEntries(): Promise<TreeStep[]> {
    const steps: TreeStep[] = [];
    for (let entry = this.#unread[0]; entry && steps.length < COUNT; entry = this.#unread[0]) {
      if (this.#isBelow(entry.run)) {
        // What is passed on is behind the reader: it is given before another read may fail.
        if (steps.length > 0 && (this.#seqs.get(entry.run) ?? -1) < entry.last) return steps;
        const events = await this.#events(entry);
        steps.push(...events.map((event) => this.#step(event, entry.id)));
        if (events.length > 0 && (this.#seqs.get(entry.run) ?? -1) < entry.last) continue;
        this.#beginChildren(entry);
      }
      this.#unread.shift();
    }
    return steps;
  }

  /** The next events of an entry; none if all are passed on, or the run's log has expired. */
  async #events(entry: TreeEntry): Promise<PublicEvent[]> {
    let known = this.#seqs.get(entry.run) ?? -1;
    const first = Number(idParts(entry.first)[1]);
    if (known >= entry.last || first > entry.last) return [];
    const log = this.#key("log", entry.run);
    const events: PublicEvent[] = [];
    for (let begin = entry.first; ; ) {
      const entries: Entry[] = (await this.#use((redis) => redis.xRange(log, begin, "+", { COUNT }))) ?? [];
      for (const { id, message } of entries) {
        const event = eventIn(log, id, message, "seq") as PublicEvent;
        if (event.seq > entry.last) return events;
        if (event.seq <= known) continue;
        const expected = Math.max(known + 1, first);
        if (event.seq !== expected) throw new CursorTrimmed(log, String(expected - 1), String(event.seq));
        known = event.seq;
        events.push(event);
      }
      if (events.length > 0 || entries.length === 0) return events;
      begin = `(${entries.at(-1)?.id}`;
    }
  }

  /** Read stored entries of the order; whether there are any. */
  async #more(): Promise<boolean> {
    const entries = (await this.#use((redis) => redis.xRange(this.#tree, `(${this.#position}`, "+", { COUNT }))) ?? [];
    this.#take(entries);
    return entries.length > 0;
  }

  async #news(): Promise<boolean> {
    const tail = this.deployment.tail(this.#partition ?? 0);
    const asked = Date.now();
    try {
      const entries = await tail.wait(this.#tree, this.#position ?? START, BLOCK_MS, this.signal);
      this.#take(entries);
      if (entries.length > 0) return true;
    } finally {
      tail.readers--;
    }
    this.#waitedMs += Date.now() - asked;
    return false;
  }

  #take(entries: Entry[]): void {
    this.#unread.push(...entries.map((entry) => this.#decoded(entry)));
    this.#position = entries.at(-1)?.id ?? this.#position;
  }

  #decoded({ id, message }: Entry): TreeEntry {
    const [run, value] = Object.entries(message)[0] ?? [];
    const [first, last, ...begins] = (value ?? "").split(" ");
    if (run === undefined || !first || !/^-?\d+$/.test(last ?? "")) throw new Malformed(`${this.#tree} ${id}`, "no entry of a tree");
    return { id, run, first, last: Number(last), begins: begins.map((block) => `${run}~${block}`) };
  }

  #isBelow(run: string): boolean {
    return run === this.top || run.startsWith(`${this.top}~`);
  }

  #step(event: PublicEvent, place: string): TreeStep {
    this.#seqs.set(event.run, event.seq);
    if (event.run === this.top && isEnd(event)) this.#asksForEnd = true;
    const below = event.run.slice(this.top.length);
    const path = [this.top];
    for (const part of below.split("~").slice(1)) path.push(`${path.at(-1)}~${part}`);
    return { event, path, cursor: `${place}.${event.seq}${below}` };
  }

  #beginChildren(entry: TreeEntry): void {
    for (const child of entry.begins) this.#begun?.add(child);
  }

  /** Find the entry that names the cursor's event. After a fail-over it may be another one than the cursor says. */
  async #locate({ entry, seq, below }: Cursor): Promise<void> {
    const run = this.top + below;
    const names = (one: Entry): boolean => {
      const found = this.#decoded(one);
      return found.run === run && idParts(found.first)[1] <= BigInt(seq) && seq <= found.last;
    };
    const page = async (from: string): Promise<Entry[]> => (await this.#use((redis) => redis.xRange(this.#tree, from, "+", { COUNT }))) ?? [];
    let entries = await page(entry);
    if (entries[0] && !names(entries[0])) entries = [];
    for (let begin = "-"; entries.length === 0; ) {
      const some = await page(begin);
      if (some.length === 0) {
        if (!(await this.#use((redis) => redis.exists(this.#key("log", this.#root))))) throw new RunNotFound(this.top);
        throw new CursorAhead(this.#tree, `${entry}.${seq}${below}`, "none");
      }
      const at = some.findIndex(names);
      if (at >= 0) entries = some.slice(at);
      begin = `(${some.at(-1)?.id}`;
    }
    this.#seqs.set(run, seq);
    this.#known = true;
    this.#take(entries);
  }

  /** Whether the top and all runs that were begun below it have ended, or will never begin. */
  async #isOver(): Promise<boolean> {
    this.#begun ??= await this.#allBegun();
    const runs = [...this.#begun];
    const [log, ...statuses] = await this.#use((redis) =>
      Promise.all([redis.exists(this.#key("log", this.top)), ...runs.map((run) => redis.hGet(this.#key("run", run), "status"))]),
    );
    const open = statuses.some((status) => typeof status === "string" && status !== "awaited" && OPEN.has(status));
    if (open) this.#known = true;
    if (open || log) return !open;
    if (this.#known) throw new RunLost(this.top);
    if (this.#waitedMs >= this.waitMs) throw new RunNotFound(this.top);
    return false;
  }

  async #allBegun(): Promise<Set<string>> {
    const begun = new Set([this.top]);
    for (let begin = "-"; ; ) {
      const entries: Entry[] = (await this.#use((redis) => redis.xRange(this.#tree, begin, "+", { COUNT }))) ?? [];
      for (const entry of entries.map((one) => this.#decoded(one))) {
        if (this.#isBelow(entry.run)) for (const child of entry.begins) begun.add(child);
      }
      if (entries.length < COUNT) return begun;
      begin = `(${entries.at(-1)?.id}`;
    }
  }
}

function cursorIn(after: string | undefined): Cursor | undefined {
  if (after === undefined) return undefined;
  const [, entry, seq, below] = /^(\d{1,15}-\d{1,9})\.(\d{1,15})((?:~\d{1,9})*)$/.exec(after) ?? [];
  if (!entry || !seq) throw new InvalidArgument(`after: ${JSON.stringify(after.slice(0, 80))} is no cursor of a tree`);
  return { entry, seq: Number(seq), below: below ?? "" };
}
