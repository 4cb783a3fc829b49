/**
 * Reads partitions of a topic, each after its own position, and finds entries that were trimmed. One connection reads all
 * of them, in a Cluster one each.
 */

import { BLOCK_MS, closed, Connection, oldest, type Entry, type Redis } from "./connection.js";
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

interface Reply extends Found {
  /** The position that it was read after. */
  asked: string;
}

interface Batch {
  connection: Connection;
  reading: Promise<void> | undefined;
  ended: { replies: Reply[]; error?: unknown } | undefined;
}

export class TopicReader {
  readonly positions = new Map<number, string>();
  /** Partitions where entries after the position may have been trimmed. */
  #doubtful = new Set<number>();
  #readAt = 0;
  readonly #batches = new Map<number, Batch>();
  #closed = false;

  constructor(readonly deployment: Deployment, readonly stream: (partition: number) => string, readonly signal: AbortSignal) {
  }

  close(): void {
    this.#closed = true;
    for (const { connection } of this.#batches.values()) connection.close();
  }

  static of(deployment: Deployment, topic: Topic, signal: AbortSignal): TopicReader {
    return new TopicReader(deployment, (partition) => `${deployment.prefix}:{${partition}}:${topic}`, signal);
  }

  take(partition: number, position: string): void {
    this.positions.set(partition, position);
    this.#doubtful.add(partition);
  }

  use<T>(commands: (redis: Redis) => Promise<T>): Promise<T> {
    return this.deployment.commands.use(commands, { signal: this.signal });
  }

  /**
   * New entries, and the gaps that were found; nothing if none came within `blockMs`. The caller moves `positions`, but
   * behind a gap, where reading goes on at the oldest entry.
   */
  async read(blockMs = BLOCK_MS): Promise<{ found: Found[]; gaps: { partition: number; gap: CursorTrimmed }[] }> {
    if (Date.now() - this.#readAt > LATE_MS) this.#doubtful = new Set(this.positions.keys());
    const found: Found[] = [];
    const gaps: { partition: number; gap: CursorTrimmed }[] = [];
    for (const { partition, asked, messages } of await this.#replies(blockMs)) {
      if (this.positions.get(partition) !== asked) continue; // another worker took it meanwhile
      const gap = this.#doubtful.has(partition) ? await this.#gap(partition) : undefined;
      if (gap) {
        gaps.push({ partition, gap });
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

  /** What reads gave that have ended: each connection reads on while others wait. */
  async #replies(blockMs: number): Promise<Reply[]> {
    if (this.#closed) throw closed();
    const { server } = this.deployment;
    for (const [number, partitions] of server.cluster ? [...this.positions.keys()].map((n): [number, number[]] => [n, [n]]) : [[0, [...this.positions.keys()]] as const]) {
      let batch = this.#batches.get(number);
      if (!batch) this.#batches.set(number, (batch = { connection: new Connection(server, true, this.stream(number)), reading: undefined, ended: undefined }));
      batch.reading ??= this.#batch(batch, partitions, blockMs);
    }
    await Promise.race([...this.#batches.values()].map(({ reading }) => reading).filter((reading) => reading !== undefined));
    const replies: Reply[] = [];
    for (const batch of this.#batches.values()) {
      const { ended } = batch;
      if (!ended) continue;
      batch.reading = batch.ended = undefined;
      if (ended.error !== undefined) throw ended.error;
      replies.push(...ended.replies);
    }
    return replies;
  }

  async #batch(batch: Batch, partitions: readonly number[], blockMs: number): Promise<void> {
    const asked = new Map(partitions.map((n) => [this.stream(n), { partition: n, asked: this.positions.get(n) ?? OLDEST }]));
    const streams = [...asked].map(([key, { asked: at }]) => ({ key, id: at === OLDEST ? EMPTY : at }));
    try {
      const reply = (await batch.connection.use((redis) => redis.xRead(streams, { COUNT, BLOCK: blockMs }), { signal: this.signal })) ?? [];
      batch.ended = { replies: reply.flatMap(({ name, messages }) => ({ ...(asked.get(name) ?? { partition: 0, asked: "" }), messages })) };
    } catch (error) {
      batch.ended = { error, replies: [] };
    }
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
