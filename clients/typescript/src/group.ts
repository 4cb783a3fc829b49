/**
 * A topic shared by the workers of a group, of this client and of Python's: every event at least once, in order within a
 * run. A lease gives each partition to one worker; its offset moves as events are done.
 */

import { createHash, randomBytes } from "node:crypto";
import { hostname } from "node:os";
import { Outage, type Entry, type Redis } from "./connection.js";
import type { Deployment } from "./deployment.js";
import { each } from "./each.js";
import { InvalidArgument } from "./errors.js";
import { SCRIPTS } from "./generated.js";
import type { Topic } from "./keys.js";
import { Offsets, type Delivered } from "./offsets.js";
import { Poison } from "./poison.js";
import { decoder, tell, type ReadOptions, type TopicEvents } from "./subscribe.js";
import { OLDEST, TopicReader } from "./topic_reader.js";

const LEASE_MS = 3_000;
const TICK_MS = 500;
const COMMIT_MS = 1_000;
/** How often to look for dead letters that were given back. */
const RETURNED_MS = 2_000;
/** How many events `each` holds. */
const IN_HAND = 256;

export interface GroupOptions extends ReadOptions {
  group: string;
  /** Where a new group begins: `"now"` (default) or `"start"`. An existing one continues. */
  from?: "now" | "start";
}

export interface EachOptions {
  /** Runs whose events are handled at once. Default 1. */
  concurrency?: number;
  /** An event that failed so often is a dead letter, and its run goes on. Left out: what the handler throws ends it all. */
  tries?: number;
}

/** An event of a group, and where it is from. */
interface GroupEvent<E> extends Delivered<E> {
  part: Owned;
  id: string;
}

class Owned extends Offsets {
  /** The position is the end of a gap, not an entry. */
  inGap = false;
  renewedAt = Date.now();

  constructor(readonly partition: number, readonly token: string, public committed: string) {
    super(committed);
  }

  override done(id: string): void {
    super.done(id);
    this.inGap = false;
  }
}

type Script = keyof typeof SCRIPTS;
const shas = new Map<Script, string>();

/** Run a script by its hash; the server gets the text if it does not have it. */
async function run<T>(redis: Redis, name: Script, keys: string[], args: (string | number)[]): Promise<T> {
  const sha = shas.get(name) ?? createHash("sha1").update(SCRIPTS[name]).digest("hex");
  shas.set(name, sha);
  const given = { keys, arguments: args.map(String) };
  try {
    return (await redis.evalSha(sha, given)) as T;
  } catch (error) {
    if (!(error instanceof Error && error.message.startsWith("NOSCRIPT"))) throw error;
    return (await redis.eval(SCRIPTS[name], given)) as T;
  }
}

/** Iterate it once, with `for await`: taking the next event acknowledges the one before. Leaving the loop closes it. */
export class GroupSubscription<T extends Topic> implements AsyncIterable<TopicEvents[T]> {
  readonly #group: string;
  readonly #worker = `${hostname()}-${process.pid}-${randomBytes(4).toString("hex")}`;
  readonly #reader: TopicReader;
  readonly #outage: Outage;
  readonly #decode: ReturnType<typeof decoder<T>>;
  readonly #owned = new Map<number, Owned>();
  #pending: [Owned, Entry][] = [];
  #version = "7";
  #poison: { leave(part: Owned): Promise<void> } | undefined;
  /** Entries of dead letters that were given back and are in hand, with their streams. */
  readonly #returned = new Map<string, string>();
  #returnedAt = 0;
  #committedAt = Date.now();
  #committing: Promise<void> = Promise.resolve();
  #ticking: Promise<void> | undefined;
  #closed = false;

  constructor(readonly deployment: Deployment, readonly topic: T, readonly options: GroupOptions) {
    if (!/^[A-Za-z0-9._-]{1,64}$/.test(options.group)) throw new InvalidArgument("group: must be 1 to 64 letters, digits, dots, dashes or underscores");
    this.#group = `${topic}:${options.group}`;
    this.#decode = decoder(topic, options);
    this.#reader = TopicReader.of(deployment, topic, deployment.until(options.signal));
    this.#outage = new Outage(deployment.reconnectMs);
  }

  /** The partitions that this worker owns now. */
  get partitions(): number[] {
    return [...this.#owned.keys()].sort((a, b) => a - b);
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<TopicEvents[T], void, undefined> {
    // An event whose loop was left is not done.
    for await (const { event, done } of this.entries()) {
      yield event;
      done();
    }
  }

  /**
   * Call the handler with each event, in order within a run; one is done when its handler has returned. Ends when the
   * group is closed. With `tries` an event whose handler throws is handled again after 0.5 s, then twice as long each time
   * up to 30 s, and only its run waits. The group's processes count the tries together, on the server. `tokenbus dead
   * retry` gives dead letters back to the group. Throws InvalidArgument; without `tries` what the handler throws.
   */
  async each(handler: (event: TopicEvents[T]) => unknown, { concurrency = 1, tries }: EachOptions = {}): Promise<void> {
    for (const [name, number] of Object.entries({ concurrency, tries: tries ?? 1 })) {
      if (!Number.isSafeInteger(number) || number < 1) throw new InvalidArgument(`${name}: ${number} is not a whole number from 1`);
    }
    const poison = tries === undefined ? undefined : new Poison<TopicEvents[T]>(this.deployment, this.#group, handler, tries, IN_HAND, this.#reader.signal);
    this.#poison = poison;
    const handle = async ({ event, part, id }: GroupEvent<TopicEvents[T]>): Promise<number | "left" | undefined> => {
      if (this.#owned.get(part.partition) !== part) return "left"; // its partition is another worker's now
      if (!poison) return void (await handler(event));
      const { partition, token } = part;
      return poison.handle({ event, partition, token, stream: this.#reader.stream(partition), entry: id });
    };
    await each(this.entries(), handle, { concurrency, most: IN_HAND, stop: () => this.close() });
  }

  /** @internal */
  async *entries(): AsyncGenerator<GroupEvent<TopicEvents[T]>, void, undefined> {
    const leave = this.deployment.drains(() => this.close());
    const timer = setInterval(() => void this.#tick().catch(() => {}), TICK_MS);
    try {
      while (!this.#closed) {
        const next = this.#take() ?? (await this.#refill());
        if (next) yield next;
      }
    } finally {
      clearInterval(timer);
      leave();
      await this.close();
    }
  }

  /** Acknowledge what is done, and give the partitions to the group's other workers. */
  async close(): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    await this.#ticking?.catch(() => {});
    const owned = [...this.#owned.values()];
    this.#owned.clear();
    this.#reader.close();
    try {
      await this.#commit(owned);
      await this.#leave(owned);
      await this.#use((redis) => redis.zRem(this.#members, this.#worker));
      await this.#release(owned);
    } catch {
      // the leases run out
    }
  }

  #take(): GroupEvent<TopicEvents[T]> | undefined {
    for (let next = this.#pending.shift(); next; next = this.#pending.shift()) {
      const [part, { id, message }] = next;
      if (this.#owned.get(part.partition) !== part) continue;
      const event = this.#decode(this.#reader.stream(part.partition), id, message);
      part.give(id);
      const done = (): void => part.done(id);
      if (event) return { event, done, part, id };
      done();
    }
    return undefined;
  }

  async #refill(): Promise<GroupEvent<TopicEvents[T]> | undefined> {
    try {
      if (this.#owned.size === 0) await this.#tick();
      await this.#commit([...this.#owned.values()]);
      if (this.#owned.size === 0) {
        await new Promise((resolve) => setTimeout(resolve, TICK_MS / 2));
        this.#reader.signal.throwIfAborted();
        return undefined;
      }
      const again = await this.#givenBack();
      if (again) return again;
      const { found, gaps } = await this.#reader.read(TICK_MS); // partitions come and go meanwhile
      // A gap is told once, to one worker: what comes next is acknowledged with it.
      for (const { partition } of gaps) {
        const part = this.#owned.get(partition);
        if (part) part.inGap = true;
      }
      for (const { partition, messages } of found) {
        const part = this.#owned.get(partition);
        const last = messages.at(-1);
        if (!part || !last) continue;
        this.#reader.positions.set(partition, last.id);
        this.#pending.push(...messages.map((entry): [Owned, Entry] => [part, entry]));
      }
      this.#outage.over();
      tell(gaps.map(({ gap }) => gap), this.options);
      return this.#take();
    } catch (error) {
      if (this.#closed) return undefined;
      await this.#outage.wait(error, this.#reader.signal);
      return undefined;
    }
  }

  /** A dead letter of the group that was given back to one of the worker's partitions. */
  async #givenBack(): Promise<GroupEvent<TopicEvents[T]> | undefined> {
    if (!this.#poison || Date.now() - this.#returnedAt < RETURNED_MS) return undefined;
    for (const part of this.#owned.values()) {
      const stream = `${this.#lease(part.partition)}:returned`;
      for (const { id, message } of (await this.#use((redis) => redis.xRange(stream, "-", "+", { COUNT: 32 }))) ?? []) {
        if (this.#returned.get(id) === stream) continue;
        this.#returned.set(id, stream);
        const done = (): void => {
          void this.#use((redis) => redis.xDel(stream, id)).then(() => this.#returned.delete(id), () => {});
        };
        const event = this.#decode(stream, id, message);
        if (event) return { event, done, part, id };
        done();
      }
    }
    this.#returnedAt = Date.now();
    return undefined;
  }

  // --- leases ------------------------------------------------------------------------------------------------------

  get #members(): string {
    return `${this.deployment.prefix}:members:${this.#group}`;
  }

  #lease(partition: number): string {
    return `${this.deployment.prefix}:{${partition}}:lease:${this.#group}`;
  }

  #use<R>(commands: (redis: Redis) => Promise<R>): Promise<R> {
    return this.deployment.commands.use(commands);
  }

  #tick(): Promise<void> {
    this.#ticking ??= this.#balance().finally(() => (this.#ticking = undefined));
    return this.#ticking;
  }

  /** Sign on, renew what is owned, and take or give partitions until the worker has its share. */
  async #balance(): Promise<void> {
    if (this.#closed) return;
    const { partitions } = await this.deployment.keys(this.#reader.signal);
    const workers = await this.#use((redis) => run<string[]>(redis, "leases.present", [this.#members], [this.#worker, LEASE_MS]));
    await this.#renew();
    if (Date.now() - this.#committedAt > COMMIT_MS) await this.#commit([...this.#owned.values()]); // also while handlers are slow
    const ranked = [...workers].sort();
    const rank = ranked.indexOf(this.#worker);
    const share = rank < 0 ? 0 : Math.floor(partitions / ranked.length) + (rank < partitions % ranked.length ? 1 : 0);
    // First those with least in hand: that comes again at another worker.
    const surplus = [...this.#owned.values()].sort((a, b) => a.open - b.open).slice(0, Math.max(0, this.#owned.size - share));
    if (surplus.length > 0) {
      for (const part of surplus) this.#drop(part);
      await this.#leave(surplus);
      await this.#commit(surplus);
      await this.#release(surplus);
    }
    const free = [...Array(partitions).keys()].filter((n) => !this.#owned.has(n)).sort(() => Math.random() - 0.5);
    for (const n of this.#owned.size < share ? free : []) {
      if (this.#owned.size >= share || this.#closed) break;
      await this.#acquire(n);
    }
  }

  async #renew(): Promise<void> {
    for (const part of [...this.#owned.values()]) {
      try {
        const keys = [this.#lease(part.partition), this.#reader.stream(part.partition)];
        const offset = await this.#use((redis) => run<string>(redis, "leases.renew", keys, [part.token, LEASE_MS]));
        if (offset) part.renewedAt = Date.now();
        else this.#drop(part);
      } catch (error) {
        if (Date.now() - part.renewedAt > LEASE_MS) this.#drop(part); // another worker may have it
        throw error;
      }
    }
  }

  async #acquire(partition: number): Promise<void> {
    const [lease, stream] = [this.#lease(partition), this.#reader.stream(partition)];
    const start = this.options.from === "start" ? "0-0" : "$";
    const args = [this.#worker, LEASE_MS, start, this.#group];
    const [token = "", offset = "0-0"] = await this.#use((redis) => run<string[]>(redis, "leases.acquire", [lease, stream], args));
    if (!token) return;
    const version = /redis_version:(\d+)/.exec(await this.#use((redis) => redis.info("server")))?.[1] ?? "7";
    this.#version = Number(version) >= 7 ? "7" : "6";
    const part = new Owned(partition, token, offset);
    for (let [after, counted]: [string, number] = [offset, 0]; after; ) {
      const more = [this.#group, offset, after, counted];
      [after, counted] = await this.#use((redis) => run<[string, number]>(redis, "topics.mirror_offset", [lease, stream], more));
    }
    this.#owned.set(partition, part);
    this.#reader.take(partition, offset === "0-0" && start === "0-0" ? OLDEST : offset);
  }

  #drop(part: Owned): void {
    if (this.#owned.get(part.partition) !== part) return;
    this.#owned.delete(part.partition);
    this.#reader.positions.delete(part.partition);
  }

  /** Move the offsets up to what is done, one call at a time. A partition that is another worker's by now is dropped. */
  #commit(parts: Owned[]): Promise<void> {
    const turn = this.#committing.then(() => this.#commitNow(parts));
    this.#committing = turn.catch(() => {});
    return turn;
  }

  async #commitNow(parts: Owned[]): Promise<void> {
    this.#committedAt = Date.now();
    for (const part of parts) {
      if (part.position === part.committed) continue;
      const [till, count] = [part.position, part.count];
      const args = [part.token, LEASE_MS, part.committed, till, "0-0", count, 0, this.#version + (part.inGap ? "" : this.#group), 0, "hs", "", ""];
      const keys = [this.#lease(part.partition), this.#reader.stream(part.partition)];
      const [outcome = ""] = await this.#use((redis) => run<string[]>(redis, "commit", keys, args));
      if (outcome === "ok" || outcome === "already") {
        part.committed = till;
        part.count -= count;
      } else this.#drop(part);
    }
  }

  async #leave(parts: Owned[]): Promise<void> {
    for (const part of parts) await this.#poison?.leave(part);
  }

  async #release(parts: Owned[]): Promise<void> {
    for (const part of parts) await this.#use((redis) => run(redis, "leases.release", [this.#lease(part.partition)], [part.token]));
  }
}
