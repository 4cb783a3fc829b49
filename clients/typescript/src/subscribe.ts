/** A topic over all partitions: the events of all runs, each once, those of one run in order. */

import { newest, Outage } from "./connection.js";
import { eventIn, type Deployment } from "./deployment.js";
import { CursorAhead, CursorTrimmed, InvalidArgument, Malformed } from "./errors.js";
import { wants, type Filter } from "./filter.js";
import { Offsets, type Delivered } from "./offsets.js";
import { isAfter, TOPICS, type Keys, type Topic } from "./keys.js";
import { EMPTY, OLDEST, TopicReader } from "./topic_reader.js";
import type { BlockTopicEvent, ChunkTopicEvent, DecisionTopicEvent, RunTopicEvent, SessionTopicEvent } from "./types.js";

export interface TopicEvents {
  visible: ChunkTopicEvent;
  chunks: ChunkTopicEvent;
  blocks: BlockTopicEvent;
  runs: RunTopicEvent;
  decisions: DecisionTopicEvent;
  sessions: SessionTopicEvent;
}

export interface ReadOptions extends Filter {
  /** Called once for each partition whose unread entries were trimmed; then reading goes on. Without it that is thrown. */
  onTrimmed?: (gap: CursorTrimmed) => void;
  /** Called for an entry that is no event; it is passed over. */
  onMalformed?: (error: Malformed) => void;
  /** Ends the iteration with the signal's reason. */
  signal?: AbortSignal;
}

export interface SubscribeOptions extends ReadOptions {
  /** `"now"` (default): what comes from now on; `"start"`: all that is kept; or a `cursor` of a subscription. */
  from?: string;
}

/** The event of an entry, if it is one and is wanted. Throws InvalidArgument at once for a topic or kind that is none. */
export function decoder<T extends Topic>(topic: T, options: ReadOptions): (stream: string, id: string, message: Record<string, string>) => TopicEvents[T] | undefined {
  if (!TOPICS.includes(topic)) throw new InvalidArgument(`topic: ${topic} is none of ${TOPICS.join(", ")}`);
  const wanted = wants(topic, options);
  return (stream, id, message) => {
    try {
      const event = eventIn(stream, id, message, topic === "decisions" ? "n" : topic === "sessions" ? "session_seq" : "seq");
      return wanted(event) ? (event as TopicEvents[T]) : undefined;
    } catch (error) {
      if (!(error instanceof Malformed)) throw error;
      options.onMalformed?.(error);
      return undefined;
    }
  };
}

export function tell(gaps: CursorTrimmed[], options: ReadOptions): void {
  for (const gap of gaps) {
    if (!options.onTrimmed) throw gap;
    options.onTrimmed(gap);
  }
}

/** Iterate it once, with `for await`. Leaving the loop closes it. */
export class Subscription<T extends Topic> implements AsyncIterable<TopicEvents[T]> {
  readonly #reader: TopicReader;
  readonly #outage: Outage;
  readonly #decode: ReturnType<typeof decoder<T>>;
  readonly #offsets = new Map<number, Offsets>();

  private constructor(readonly deployment: Deployment, readonly topic: T, readonly options: SubscribeOptions) {
    this.#decode = decoder(topic, options);
    this.#reader = TopicReader.of(deployment, topic, deployment.until(options.signal));
    this.#outage = new Outage(deployment.reconnectMs);
  }

  /** Take up the positions: nothing that comes after this returns is missed. */
  static async open<T extends Topic>(deployment: Deployment, topic: T, options: SubscribeOptions): Promise<Subscription<T>> {
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
    return `${this.topic}:${[...this.#offsets.values()].map(({ position }) => position).join(",")}`;
  }

  close(): void {
    this.#reader.close();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<TopicEvents[T], void, undefined> {
    for await (const { event, done } of this.entries()) {
      done();
      yield event;
    }
  }

  /** @internal */
  async *entries(): AsyncGenerator<Delivered<TopicEvents[T]>, void, undefined> {
    try {
      for (;;) {
        for (const { partition, messages } of await this.#next()) {
          const offsets = this.#offsets.get(partition) ?? this.#take(partition, EMPTY);
          this.#reader.positions.set(partition, messages.at(-1)?.id ?? EMPTY);
          for (const { id, message } of messages) {
            const event = this.#decode(this.#reader.stream(partition), id, message);
            offsets.give(id);
            const done = (): void => offsets.done(id);
            if (event) yield { event, done };
            else done();
          }
        }
      }
    } finally {
      this.close();
    }
  }

  #take(partition: number, position: string): Offsets {
    const offsets = new Offsets(position);
    this.#offsets.set(partition, offsets);
    this.#reader.take(partition, position);
    return offsets;
  }

  #keys(): Promise<Keys> {
    return this.deployment.keys(this.#reader.signal);
  }

  async #begin(from: string): Promise<void> {
    const keys = await this.#keys();
    const partitions = [...Array(keys.partitions).keys()];
    if (from === "start") return partitions.forEach((n) => this.#take(n, OLDEST));
    const last = await this.#reader.use((redis) => Promise.all(partitions.map((n) => newest(redis, this.#reader.stream(n)))));
    const ends = last.map((entry) => entry?.id ?? EMPTY);
    const positions = from === "now" ? ends : positionsIn(from, this.topic, keys);
    for (const n of partitions) {
      const [position, end] = [positions[n] ?? OLDEST, ends[n] ?? EMPTY];
      if (position !== OLDEST && isAfter(position, end)) throw new CursorAhead(this.#reader.stream(n), position, end);
      this.#take(n, position);
    }
  }

  async #next(): ReturnType<typeof this.read> {
    try {
      const found = await this.read();
      this.#outage.over();
      return found;
    } catch (error) {
      await this.#outage.wait(error, this.#reader.signal);
      return [];
    }
  }

  /** @internal */
  async read() {
    const { partitions } = await this.#keys();
    const { positions } = this.#reader;
    while (positions.size < partitions) this.#take(positions.size, EMPTY); // one that was added had no entries before
    const { found, gaps } = await this.#reader.read();
    for (const { partition } of gaps) this.#offsets.get(partition)?.pass(OLDEST);
    tell(gaps.map(({ gap }) => gap), this.options);
    return found;
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
