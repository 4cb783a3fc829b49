/** Reads partitions of a topic on one connection, each after its own position, and finds entries that were trimmed. */

import { BLOCK_MS, Connection, oldest, type Entry, type Redis } from "./connection.js";
import type { Deployment } from "./deployment.js";
import { CursorTrimmed } from "./errors.js";
import type { Topic } from "./keys.js";

/** In place of an entry id: before the oldest entry that is kept. */
export const OLDEST = "-";
export const EMPTY = "0-0";
const COUNT = 256;
const LATE_MS = 1_000;

export interface Found {
  partition: number;
  messages: Entry[];
}

export class TopicReader {
  readonly positions = new Map<number, string>();
  readonly connection: Connection;
  /** Partitions where entries after the position may have been trimmed. */
  #doubtful = new Set<number>();
  #readAt = 0;

  constructor(readonly deployment: Deployment, readonly stream: (partition: number) => string, readonly signal: AbortSignal) {
    this.connection = deployment.connection(true);
  }

  static of(deployment: Deployment, topic: Topic, signal: AbortSignal): TopicReader {
    return new TopicReader(deployment, (partition) => `${deployment.prefix}:{${partition}}:${topic}`, signal);
  }

  take(partition: number, position: string): void {
    this.positions.set(partition, position);
    this.#doubtful.add(partition);
  }

  use<T>(commands: (redis: Redis) => Promise<T>): Promise<T> {
    return this.connection.use(commands, { signal: this.signal });
  }

  /**
   * New entries, and the gaps that were found; nothing if none came within `blockMs`. The caller moves `positions`, but
   * behind a gap, where reading goes on at the oldest entry.
   */
  async read(blockMs = BLOCK_MS): Promise<{ found: Found[]; gaps: CursorTrimmed[] }> {
    const asked = new Map(this.positions);
    const partitionOf = new Map([...asked.keys()].map((n) => [this.stream(n), n]));
    const streams = [...asked].map(([n, at]) => ({ key: this.stream(n), id: at === OLDEST ? EMPTY : at }));
    if (Date.now() - this.#readAt > LATE_MS) this.#doubtful = new Set(asked.keys());
    const reply = (await this.use((redis) => redis.xRead(streams, { COUNT, BLOCK: blockMs }))) ?? [];
    const found: Found[] = [];
    const gaps: CursorTrimmed[] = [];
    for (const { name, messages } of reply) {
      const partition = partitionOf.get(name) ?? 0;
      if (this.positions.get(partition) !== asked.get(partition)) continue; // another worker took it meanwhile
      const gap = this.#doubtful.has(partition) ? await this.#gap(partition) : undefined;
      if (gap) {
        gaps.push(gap);
        continue;
      }
      found.push({ partition, messages });
      // A read that gave less than it may is proof: a topic keeps many more entries than that.
      if (messages.length < COUNT) this.#doubtful.delete(partition);
      else this.#doubtful.add(partition);
    }
    this.#readAt = Date.now();
    return { found, gaps };
  }

  /** What tells that entries after the position are gone: while any entry up to it is kept, all after it are. */
  async #gap(partition: number): Promise<CursorTrimmed | undefined> {
    const [stream, position] = [this.stream(partition), this.positions.get(partition) ?? OLDEST];
    if (position === OLDEST) return undefined;
    if (position === EMPTY) {
      const about = await this.use((redis) => redis.xInfoStream(stream));
      const added = about["entries-added"] as number | undefined; // Redis 6.2 does not say
      if (added === undefined || added === about.length) return undefined;
    } else if (await this.use((redis) => oldest(redis, stream, "-", position))) {
      return undefined;
    }
    const first = await this.use((redis) => oldest(redis, stream));
    this.positions.set(partition, OLDEST);
    return new CursorTrimmed(stream, position, first?.id ?? "none");
  }
}
