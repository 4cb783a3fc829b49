/** A topic over all partitions: the events of all runs, each once, those of one run in order. */

import { BLOCK_MS, Connection, newest, oldest, Outage, type Entry, type Redis } from "./connection.js";
import { eventIn, type Deployment } from "./deployment.js";
import { CursorAhead, CursorTrimmed, InvalidArgument, Malformed, TokenbusError } from "./errors.js";
import { isAfter, TOPICS, type Keys, type Topic } from "./keys.js";
import type { BlockTopicEvent, ChunkTopicEvent, DecisionTopicEvent, RunTopicEvent } from "./types.js";

export interface TopicEvents {
  visible: ChunkTopicEvent;
  chunks: ChunkTopicEvent;
  blocks: BlockTopicEvent;
  runs: RunTopicEvent;
  decisions: DecisionTopicEvent;
}

export interface SubscribeOptions {
  /** `"now"` (default): what comes from now on; `"start"`: all that is kept; or a `cursor` of a subscription. */
  from?: string;
  /** Called once for each partition whose unread entries were trimmed; then reading goes on. Without it that is thrown. */
  onTrimmed?: (gap: CursorTrimmed) => void;
  /** Called for an entry that is no event; it is passed over. */
  onMalformed?: (error: Malformed) => void;
  /** Ends the iteration with the signal's reason. */
  signal?: AbortSignal;
}

/** In place of an entry id: before the oldest entry that is kept. */
const OLDEST = "-";
const EMPTY = "0-0";
const COUNT = 256;
const LATE_MS = 1_000;

interface Found {
  partition: number;
  messages: Entry[];
}

/** Iterate it once, with `for await`. Leaving the loop closes it. */
export class Subscription<T extends Topic> implements AsyncIterable<TopicEvents[T]> {
  readonly #connection: Connection;
  readonly #outage: Outage;
  readonly #signal: AbortSignal;
  #positions: string[] = [];
  /** Partitions where entries after the position may have been trimmed. */
  #doubtful = new Set<number>();
  #readAt = 0;
  #keys: Keys | undefined;

  private constructor(readonly deployment: Deployment, readonly topic: T, readonly options: SubscribeOptions) {
    this.#connection = new Connection(deployment.url, true);
    this.#outage = new Outage(deployment.reconnectMs);
    this.#signal = deployment.until(options.signal);
  }

  /** Take up the positions: nothing that comes after this returns is missed. */
  static async open<T extends Topic>(deployment: Deployment, topic: T, options: SubscribeOptions): Promise<Subscription<T>> {
    if (!TOPICS.includes(topic)) throw new InvalidArgument(`topic: ${topic} is none of ${TOPICS.join(", ")}`);
    const subscription = new Subscription(deployment, topic, options);
    try {
      await subscription.#begin(options.from ?? "now");
    } catch (error) {
      subscription.close();
      throw error;
    }
    return subscription;
  }

  /** Where this subscription stands, after the event that it gave last: a `from` of the next one, also of Python's. */
  get cursor(): string {
    return `${this.topic}:${this.#positions.join(",")}`;
  }

  close(): void {
    this.#connection.close();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<TopicEvents[T], void, undefined> {
    try {
      for (;;) {
        for (const { partition, messages } of await this.#next()) {
          for (const { id, message } of messages) {
            const event = this.#event(partition, id, message);
            this.#positions[partition] = id;
            if (event) yield event;
          }
        }
      }
    } finally {
      this.close();
    }
  }

  async #begin(from: string): Promise<void> {
    this.#keys = await this.deployment.keys(this.#connection, this.#signal);
    const partitions = [...Array(this.#keys.partitions).keys()];
    this.#doubtful = new Set(partitions);
    if (from === "start") {
      this.#positions = partitions.map(() => OLDEST);
      return;
    }
    const last = await this.#use((redis) => Promise.all(partitions.map((n) => newest(redis, this.#stream(n)))));
    const ends = last.map((entry) => entry?.id ?? EMPTY);
    this.#positions = from === "now" ? ends : positionsIn(from, this.topic, this.#keys);
    for (const n of partitions) {
      const [position, end] = [this.#positions[n] ?? OLDEST, ends[n] ?? EMPTY];
      if (position !== OLDEST && isAfter(position, end)) throw new CursorAhead(this.#stream(n), position, end);
    }
  }

  #stream(partition: number): string {
    if (!this.#keys) throw new TokenbusError("closed", "the subscription has not begun");
    return this.#keys.topic(partition, this.topic);
  }

  #event(partition: number, id: string, message: Record<string, string>): TopicEvents[T] | undefined {
    const count = this.topic === "decisions" ? "n" : "seq";
    try {
      return eventIn(this.#stream(partition), id, message, count) as TopicEvents[T];
    } catch (error) {
      if (!(error instanceof Malformed)) throw error;
      this.options.onMalformed?.(error);
      return undefined;
    }
  }

  #use<T>(commands: (redis: Redis) => Promise<T>): Promise<T> {
    return this.#connection.use(commands, { signal: this.#signal });
  }

  async #next(): Promise<Found[]> {
    try {
      const found = await this.#read();
      this.#outage.over();
      return found;
    } catch (error) {
      await this.#outage.wait(error, this.#signal);
      return [];
    }
  }

  async #read(): Promise<Found[]> {
    this.#keys = await this.deployment.keys(this.#connection, this.#signal);
    while (this.#positions.length < this.#keys.partitions) {
      this.#doubtful.add(this.#positions.length);
      this.#positions.push(EMPTY); // a partition that was added had no entries before
    }
    const partitionOf = new Map(this.#positions.map((_, n) => [this.#stream(n), n]));
    const streams = this.#positions.map((at, n) => ({ key: this.#stream(n), id: at === OLDEST ? EMPTY : at }));
    if (Date.now() - this.#readAt > LATE_MS) this.#doubtful = new Set(partitionOf.values());
    const reply = (await this.#use((redis) => redis.xRead(streams, { COUNT, BLOCK: BLOCK_MS }))) ?? [];
    const found = reply.map(({ name, messages }) => ({ partition: partitionOf.get(name) ?? 0, messages }));
    const sure: Found[] = [];
    for (const one of found) {
      if (!this.#doubtful.has(one.partition) || !(await this.#isTrimmed(one.partition))) sure.push(one);
    }
    for (const { partition, messages } of sure) {
      // A read that gave less than it may is proof: a topic keeps many more entries than that.
      if (messages.length < COUNT) this.#doubtful.delete(partition);
      else this.#doubtful.add(partition);
    }
    this.#readAt = Date.now();
    return sure;
  }

  /** Whether entries after the position may be gone: while any entry up to it is kept, all after it are. */
  async #isTrimmed(partition: number): Promise<boolean> {
    const [stream, position] = [this.#stream(partition), this.#positions[partition] ?? OLDEST];
    if (position === OLDEST) return false;
    if (position === EMPTY) {
      const about = await this.#use((redis) => redis.xInfoStream(stream));
      const added = about["entries-added"] as number | undefined; // Redis 6.2 does not say
      if (added === undefined || added === about.length) return false;
    } else if (await this.#use((redis) => oldest(redis, stream, "-", position))) {
      return false;
    }
    const first = await this.#use((redis) => oldest(redis, stream));
    const gap = new CursorTrimmed(stream, position, first?.id ?? "none");
    this.#positions[partition] = OLDEST;
    if (!this.options.onTrimmed) throw gap;
    this.options.onTrimmed(gap);
    return true;
  }
}

function positionsIn(cursor: string, topic: Topic, { partitions, fewest }: Keys): string[] {
  const [of, ...rest] = cursor.split(":");
  const positions = rest.join(":").split(",");
  const valid = positions.every((at) => at === OLDEST || /^\d{1,20}-\d{1,20}$/.test(at));
  if (of !== topic || positions.length < fewest || positions.length > partitions || !valid) {
    throw new InvalidArgument(`from: ${JSON.stringify(cursor.slice(0, 80))} is no cursor of ${topic} with ${partitions} partitions`);
  }
  // Partitions that were added after the cursor was made had no entries then.
  return [...positions, ...Array<string>(partitions - positions.length).fill(EMPTY)];
}
