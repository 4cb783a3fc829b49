/**
 * A topic shared by the workers of a group, of this client and of Python's: every event at least once, in order within a
 * run. A lease gives each partition to one worker; its offset moves as events are done.
 */

import { createHash, randomBytes } from "node:crypto";
import { hostname } from "node:os";
import { Outage, type Entry, type Redis } from "./connection.js";
import type { Deployment } from "./deployment.js";
import { InvalidArgument } from "./errors.js";
import { SCRIPTS } from "./generated.js";
import type { Topic } from "./keys.js";
import { decoder, tell, type ReadOptions, type TopicEvents } from "./subscribe.js";
import { OLDEST, TopicReader } from "./topic_reader.js";

const LEASE_MS = 3_000;
const TICK_MS = 500;
const COMMIT_MS = 1_000;

export interface GroupOptions extends ReadOptions {
  group: string;
  /** Where a new group begins: `"now"` (default) or `"start"`. An existing one continues. */
  from?: "now" | "start";
}

interface Owned {
  partition: number;
  token: string;
  committed: string;
  /** The last entry that is done, and how many are since the last commit. */
  position: string;
  done: number;
  /** The position is the end of a gap, not an entry. */
  inGap: boolean;
  renewedAt: number;
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
  /** The partition and entry of the event in the caller's hands. */
  #inHand: Owned | undefined;
  #at = "";
  #version = "7";
  #committedAt = Date.now();
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
    const leave = this.deployment.drains(() => this.close());
    const timer = setInterval(() => void this.#tick().catch(() => {}), TICK_MS);
    try {
      while (!this.#closed) {
        const event = this.#take() ?? (await this.#refill());
        if (event) {
          yield event;
          this.#done();
        }
        if (Date.now() - this.#committedAt > COMMIT_MS) await this.#commit([...this.#owned.values()]).catch(() => {});
      }
    } finally {
      this.#inHand = undefined; // an event whose loop was left is not done
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
    this.#reader.connection.close();
    try {
      await this.#commit(owned);
      await this.#use((redis) => redis.zRem(this.#members, this.#worker));
      await this.#release(owned);
    } catch {
      // the leases run out
    }
  }

  #done(): void {
    if (this.#inHand) {
      this.#inHand.position = this.#at;
      this.#inHand.done++;
      this.#inHand.inGap = false;
    }
    this.#inHand = undefined;
  }

  #take(): TopicEvents[T] | undefined {
    for (let next = this.#pending.shift(); next; next = this.#pending.shift()) {
      const [part, { id, message }] = next;
      if (this.#owned.get(part.partition) !== part) continue;
      const event = this.#decode(this.#reader.stream(part.partition), id, message);
      this.#inHand = part;
      this.#at = id;
      if (event) return event;
      this.#done();
    }
    return undefined;
  }

  async #refill(): Promise<TopicEvents[T] | undefined> {
    try {
      if (this.#owned.size === 0) await this.#tick();
      await this.#commit([...this.#owned.values()]);
      if (this.#owned.size === 0) {
        await new Promise((resolve) => setTimeout(resolve, TICK_MS / 2));
        this.#reader.signal.throwIfAborted();
        return undefined;
      }
      const { found, gaps } = await this.#reader.read(TICK_MS); // partitions come and go meanwhile
      for (const gap of gaps) this.#skip(gap.key);
      for (const { partition, messages } of found) {
        const part = this.#owned.get(partition);
        const last = messages.at(-1);
        if (!part || !last) continue;
        this.#reader.positions.set(partition, last.id);
        this.#pending.push(...messages.map((entry): [Owned, Entry] => [part, entry]));
      }
      this.#outage.over();
      tell(gaps, this.options);
      return this.#take();
    } catch (error) {
      if (this.#closed) return undefined;
      await this.#outage.wait(error, this.#reader.signal);
      return undefined;
    }
  }

  /** A gap is told once, to one worker: what comes next is acknowledged with it. */
  #skip(stream: string): void {
    for (const part of this.#owned.values()) if (this.#reader.stream(part.partition) === stream) part.inGap = true;
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
    const { partitions } = await this.deployment.keys(this.deployment.commands, this.#reader.signal);
    const workers = await this.#use((redis) => run<string[]>(redis, "leases.present", [this.#members], [this.#worker, LEASE_MS]));
    await this.#renew();
    const ranked = [...workers].sort();
    const rank = ranked.indexOf(this.#worker);
    const share = rank < 0 ? 0 : Math.floor(partitions / ranked.length) + (rank < partitions % ranked.length ? 1 : 0);
    const surplus = [...this.#owned.values()].filter((part) => part !== this.#inHand).slice(0, Math.max(0, this.#owned.size - share));
    if (surplus.length > 0) {
      for (const part of surplus) this.#drop(part);
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
    const part: Owned = { partition, token, committed: offset, position: offset, done: 0, inGap: false, renewedAt: Date.now() };
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

  /** Move the offsets up to what is done. A partition that is another worker's by now is dropped. */
  async #commit(parts: Owned[]): Promise<void> {
    this.#committedAt = Date.now();
    for (const part of parts) {
      if (part.position === part.committed) continue;
      const [till, count] = [part.position, part.done];
      const args = [part.token, LEASE_MS, part.committed, till, "0-0", count, 0, this.#version + (part.inGap ? "" : this.#group), 0, "hs", "", ""];
      const keys = [this.#lease(part.partition), this.#reader.stream(part.partition)];
      const [outcome = ""] = await this.#use((redis) => run<string[]>(redis, "commit", keys, args));
      if (outcome === "ok" || outcome === "already") {
        part.committed = till;
        part.done -= count;
      } else this.#drop(part);
    }
  }

  async #release(parts: Owned[]): Promise<void> {
    for (const part of parts) await this.#use((redis) => run(redis, "leases.release", [this.#lease(part.partition)], [part.token]));
  }
}
