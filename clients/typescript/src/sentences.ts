/** Visible text as sentences, for speech: a view of the topic `visible`, alone or with a group. */

import { ServerUnavailable } from "./errors.js";
import { eventIn, type Deployment } from "./deployment.js";
import { isEnd } from "./follow.js";
import { GroupSubscription } from "./group.js";
import type { Delivered } from "./offsets.js";
import { SentenceCutter, type SentenceRules } from "./sentence_cutter.js";
import { Subscription, type SubscribeOptions } from "./subscribe.js";
import type { ChunkTopicEvent, PublicEvent } from "./types.js";

/** A run's log is looked at when its text has not grown for so long; then after twice as long each time. */
const LOOK_MS = 50;
const LONGEST_LOOK_MS = 2_000;
const LOOK_AHEAD = 64;

/** A sentence of a block's visible text. */
export interface Sentence {
  run: string;
  turn: number;
  attempt: number;
  block: number;
  /** With the whitespace behind it: a block's sentences concatenate to its visible text. */
  text: string;
  /** Seqs of the chunks with its first and its last character; the last is a `heardThrough` once it was spoken. */
  first: number;
  last: number;
}

export interface SentencesOptions extends SentenceRules, Omit<SubscribeOptions, "kinds"> {
  /** Share the runs with the workers of a group, also of Python's; `from` is then `"now"` or `"start"`. */
  group?: string;
  /** After so many ms an incomplete sentence is given. Default 1,500. */
  holdMs?: number;
}

type Chunk = Delivered<ChunkTopicEvent>;
type Ready = [Sentence, Chunk[]];

/** The undelivered text of one block, and the chunks that it came in. */
class Voice {
  attempt = 0;
  seq = -1;
  /** When the oldest held text came. */
  since = 0;
  lookAt = 0;
  readonly #cutter: SentenceCutter;
  #pauseMs = LOOK_MS;
  /** Chunks that are not wholly delivered, each with its end in the block. */
  #pieces: [number, Chunk][] = [];
  #received = 0;
  #delivered = 0;

  constructor(rules: SentenceRules, readonly run: string, readonly block: number) {
    this.#cutter = new SentenceCutter(rules);
  }

  add(chunk: Chunk, now: number): Ready[] {
    const { event } = chunk;
    [this.attempt, this.seq] = [event.attempt, event.seq];
    this.#pauseMs = LOOK_MS;
    this.lookAt = now + LOOK_MS;
    if (!this.#cutter.holds) this.since = now;
    this.#received += event.text.length;
    this.#pieces.push([this.#received, chunk]);
    const made = this.#made(this.#cutter.feed(event.text));
    if (made.length > 0) this.since = now;
    return made;
  }

  /** Nothing new yet. */
  wait(now: number): void {
    this.#pauseMs = Math.min(2 * this.#pauseMs, LONGEST_LOOK_MS);
    this.lookAt = now + this.#pauseMs;
  }

  release(now: number): Ready[] {
    this.since = now;
    return this.#made(this.#cutter.release());
  }

  end(): Ready[] {
    return this.#made(this.#cutter.end());
  }

  /** Chunks that no sentence needs. */
  rest(): Chunk[] {
    return this.#pieces.map(([, chunk]) => chunk);
  }

  #made(texts: string[]): Ready[] {
    const made: Ready[] = [];
    for (const text of texts) {
      this.#delivered += text.length;
      const first = this.#pieces[0]?.[1].event;
      const done: Chunk[] = [];
      let [last, ended] = [first, 0];
      for (let head = this.#pieces[0]; head && head[0] <= this.#delivered; head = this.#pieces[0]) {
        this.#pieces.shift();
        done.push(head[1]);
        [last, ended] = [head[1].event, head[0]];
      }
      const next = this.#pieces[0];
      if (next && ended < this.#delivered) last = next[1].event;
      if (!first || !last) continue;
      if (!text.trim()) {
        // Blank: its chunks are done with the sentence before or after it.
        const before = made.at(-1);
        if (before) before[1].push(...done);
        else this.#pieces.unshift(...done.map((chunk): [number, Chunk] => [this.#delivered, chunk]));
        continue;
      }
      const { run, block } = this;
      made.push([{ run, turn: first.turn, attempt: last.attempt, block, text, first: first.seq, last: last.seq }, done]);
    }
    return made;
  }
}

/** Iterate it once, with `for await`; leaving the loop closes it. With a group, taking the next acknowledges the one before. */
export class SentenceSubscription implements AsyncIterable<Sentence> {
  readonly #voices = new Map<string, Voice>();
  #ready: Ready[] = [];
  #lookAt = 0;

  private constructor(
    readonly deployment: Deployment,
    readonly options: SentencesOptions,
    readonly source: Subscription<"visible"> | GroupSubscription<"visible">,
  ) {}

  static async open(deployment: Deployment, options: SentencesOptions): Promise<SentenceSubscription> {
    const { group, from, language: _, least: __, most: ___, holdMs: ____, ...reading } = options;
    new SentenceCutter(options); // its rules are wrong now, not at the first chunk
    const source =
      group === undefined
        ? await Subscription.open(deployment, "visible", { ...reading, ...(from === undefined ? {} : { from }) })
        : new GroupSubscription(deployment, "visible", { ...reading, group, from: from === "start" ? "start" : "now" });
    return new SentenceSubscription(deployment, options, source);
  }

  /** A `from` of the next one: behind the sentences that were given. Undefined with a group, which keeps its own. */
  get cursor(): string | undefined {
    return this.source instanceof Subscription ? this.source.cursor : undefined;
  }

  async close(): Promise<void> {
    await this.source.close();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Sentence, void, undefined> {
    const chunks = this.source.entries();
    const alone = this.source instanceof Subscription;
    let next: Promise<IteratorResult<Chunk>> | undefined;
    try {
      for (;;) {
        for (let ready = this.#ready.shift(); ready; ready = this.#ready.shift()) {
          if (alone) done(ready[1]);
          yield ready[0];
          if (!alone) done(ready[1]);
        }
        next ??= chunks.next();
        const got = await this.#within(next);
        if (got) {
          next = undefined;
          if (got.done) return;
          this.#add(got.value);
        }
        if (this.#voices.size > 0 && Date.now() >= this.#lookAt) {
          await this.#look();
          this.#lookAt = Date.now() + LOOK_MS;
        }
      }
    } finally {
      next?.catch(() => {}); // it ends because its source is closed
      await this.close();
    }
  }

  /** What comes before the next look; undefined if nothing does. */
  async #within(next: Promise<IteratorResult<Chunk>>): Promise<IteratorResult<Chunk> | undefined> {
    if (this.#voices.size === 0) return next;
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<undefined>((resolve) => {
      timer = setTimeout(() => resolve(undefined), Math.max(0, this.#lookAt - Date.now()));
    });
    return Promise.race([next, late]).finally(() => clearTimeout(timer));
  }

  #add(chunk: Chunk): void {
    const { event } = chunk;
    const now = Date.now();
    const key = `${event.run} ${event.block}`;
    let voice = this.#voices.get(key);
    if (!voice) {
      if (this.#voices.size === 0) this.#lookAt = now + LOOK_MS;
      this.#voices.set(key, (voice = new Voice(this.options, event.run, event.block)));
    }
    if (event.seq <= voice.seq) chunk.done(); // it came again after it was done
    else this.#ready.push(...voice.add(chunk, now));
  }

  /** Ask the logs of texts that have stopped growing whether they are complete: the topic does not say. */
  async #look(): Promise<void> {
    const now = Date.now();
    await Promise.all(
      [...this.#voices].map(async ([key, voice]) => {
        if (now < voice.lookAt) return;
        const fate = await this.#fate(voice);
        if (fate === "open") {
          voice.wait(now);
          if (now - voice.since >= (this.options.holdMs ?? 1_500)) this.#ready.push(...voice.release(now));
          return;
        }
        if (fate === "complete") this.#ready.push(...voice.end());
        done(voice.rest());
        this.#voices.delete(key);
      }),
    );
  }

  /** What the run's log says of the block after its last chunk. `void`: the attempt was discarded. */
  async #fate({ run, block, attempt, seq }: Voice): Promise<"open" | "complete" | "void"> {
    const signal = this.deployment.until(this.options.signal);
    try {
      const partition = await this.deployment.partitionOf(run, signal);
      if (this.source instanceof GroupSubscription && !this.source.partitions.includes(partition)) return "void"; // it is another worker's
      const log = `${this.deployment.prefix}:{${partition}}:log:${run}`;
      const entries = (await this.deployment.commands.use((redis) => redis.xRange(log, `(${attempt}-${seq}`, "+", { COUNT: LOOK_AHEAD }), { signal })) ?? [];
      if (entries.length === 0) return (await this.deployment.commands.use((redis) => redis.exists(log), { signal })) ? "open" : "complete";
      for (const { id, message } of entries) {
        const event = eventIn(log, id, message, "seq") as PublicEvent;
        if (event.type === "chunk" && event.block === block) return "open";
        if ((event.type === "block_complete" && event.block === block) || isEnd(event)) return "complete";
        if ((event.type === "retrying" || event.type === "restarted") && event.drop_from <= block) return "void";
      }
    } catch (error) {
      if (!(error instanceof ServerUnavailable)) throw error;
    }
    return "open";
  }
}

function done(chunks: Chunk[]): void {
  for (const chunk of chunks) chunk.done();
}
