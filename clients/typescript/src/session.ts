/** A session as its clients use it: append to it, follow it, read its history. As Python's `Client.session`. */

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import type { CallOptions, Entry, Redis } from "./connection.js";
import { eventIn, type Deployment } from "./deployment.js";
import { AppendPending, InvalidArgument, RequestInvalid, SessionNotFound } from "./errors.js";
import { isEnd } from "./follow.js";
import { sessionRef } from "./keys.js";
import { MessageBuilder, type Heard } from "./messages.js";
import { SessionReader, type SessionStep } from "./session_reader.js";
import type { Append, Configure, Generate, HistoryBound, Message, PublicEvent, SessionMessage, TerminalEvent } from "./types.js";

const FIRST_LOOK_MS = 2;
const LONGEST_LOOK_MS = 100;
const COUNT = 256;
/** Runs whose pieces are read with one command. */
const AT_ONCE = 32;

/** What became of an append. */
export interface Fate {
  /** `appended`: it waits. `returned`: it had no effect and never will, see `reason`. */
  state: "appended" | "delivered" | "returned";
  /** The run that it started, or that it ended. */
  run?: string;
  turn?: number;
  reason?: string;
  problem?: string;
}

/** An append that was accepted: its id, and its fate so far. */
export interface Receipt {
  append: string;
  fate: Fate;
}

export interface AppendOptions extends CallOptions {
  /** The append's id, a new one if left out: appending it twice is appending it once. */
  append?: string;
  /** How long it may wait until it is taken in, in ms. Default 60,000. */
  waitMs?: number;
}

export interface SendOptions extends AppendOptions, Heard {
  participant?: string;
  /** What becomes of it while a run is open. Left out: as the session's configuration says. */
  whenBusy?: NonNullable<SessionMessage["when_busy"]>;
  /** Of a message that steers: end the present call for it. */
  now?: boolean;
  /** Fields that the run of this message has in place of the configured ones. */
  request?: Partial<SessionRequest>;
  /** False: it starts no run, and is history at once, behind the open run if there is one. */
  run?: boolean;
  /** Added to the metadata of the run that it starts. */
  metadata?: Record<string, unknown>;
}

export interface ConfigureOptions extends AppendOptions {
  whenBusy?: NonNullable<Configure["when_busy"]>;
  /** Messages that wait start one run together. */
  together?: boolean;
  /** Send at most about so many tokens of the history, the newest. Left out: all of it. */
  historyTokens?: number;
  /** The same with what happens to the rest. */
  history?: HistoryBound;
  /** The history that a new session begins with. */
  messages?: Message[];
}

export interface FollowSessionOptions {
  /** The `cursor` of the last step that is known already; left out: all steps. */
  after?: string;
  /** False: what is stored now, and then the end. */
  live?: boolean;
  signal?: AbortSignal;
}

/** What a message says. */
export type Said = NonNullable<SessionMessage["content"]>;

/** What a session's runs are: a request without an id and messages of its own. */
export type SessionRequest = Omit<Generate, "type" | "id" | "messages">;

/**
 * A conversation that any number of clients append to and follow; `Client.session` gives it.
 *
 * Every method that appends resolves once the append is accepted. They throw RequestInvalid with the problem that was
 * found; AppendPending if nothing took it in meanwhile: repeat it with the same `append`; ServerUnavailable, ServerFull.
 */
export class Session {
  readonly #ref: string;

  /** @internal */
  constructor(
    readonly deployment: Deployment,
    readonly name: string,
    readonly tenant: string,
    readonly put: (append: Append, options: CallOptions) => Promise<void>,
  ) {
    if (!/^[A-Za-z0-9._:@~+=-]{1,128}$/.test(name)) throw new InvalidArgument(`session: ${JSON.stringify(name.slice(0, 80))} is no name`);
    this.#ref = sessionRef(tenant, name);
  }

  /** Set what each run is from the next append on; makes the session if there is none. */
  configure(request: SessionRequest, options: ConfigureOptions = {}): Promise<Receipt> {
    const { whenBusy, together, historyTokens, history, messages } = options;
    const item: Configure = { type: "configure", request: { ...request } };
    if (whenBusy !== undefined) item.when_busy = whenBusy;
    if (together !== undefined) item.together = together;
    if (historyTokens !== undefined) item.history = { tokens: historyTokens };
    if (history !== undefined) item.history = history;
    if (messages !== undefined) item.messages = messages;
    return this.append(item, options);
  }

  /**
   * Append a message to the model. It starts a run, at once if none is open. `content` may be several messages.
   * `heardThrough`: of one that interrupts.
   */
  send(content: Said | Message[], options: SendOptions = {}): Promise<Receipt> {
    const { participant, whenBusy, now, request, run } = options;
    const said = isMessages(content) ? { messages: content } : { content };
    const item: SessionMessage = { type: "message", ...said, ...heardIn(options) };
    if (now !== undefined) item.now = now;
    if (request !== undefined) item.request = request;
    if (run !== undefined) item.run = run;
    if (participant !== undefined) item.participant = participant;
    if (whenBusy !== undefined) item.when_busy = whenBusy;
    return this.append(item, options);
  }

  /** `send` a message that goes into the open run's next call; if there is none, it starts the next run. */
  steer(content: Said, options: Omit<SendOptions, "whenBusy"> = {}): Promise<Receipt> {
    return this.send(content, { ...options, whenBusy: "steer" });
  }

  /** Append an item as it is on the bus; the other methods make one. */
  async append(item: Append["item"], options: AppendOptions & { metadata?: Record<string, unknown> }): Promise<Receipt> {
    const { append = randomUUID(), metadata } = options;
    const request: Append = { type: "append", session: this.name, item, id: append };
    if (metadata || this.tenant) request.metadata = { ...metadata, ...(this.tenant ? { tenant: this.tenant } : {}) };
    await this.put(request, options);
    const fate = await this.#settled(append, options, () => true);
    if (fate.reason === "refused") throw new RequestInvalid(`append: ${fate.problem ?? ""}`);
    return { append, fate };
  }

  /**
   * End the open run as `cancelled`; what waits starts the next one. If none is open, what was heard cuts the last one.
   * `run`: the one that is meant; if there is a newer one, the append is returned as `newer_run`.
   */
  interrupt(options: AppendOptions & Heard & { run?: string } = {}): Promise<Receipt> {
    const { run } = options;
    return this.append({ type: "interrupt", ...heardIn(options), ...(run === undefined ? {} : { run }) }, options);
  }

  /** Take back the append `waiting`, if it still waits: it is then returned as `withdrawn`. */
  withdraw(waiting: string, options: AppendOptions = {}): Promise<Receipt> {
    return this.append({ type: "withdraw", append: waiting }, options);
  }

  /**
   * Replace the history by other messages: that through a run, or all of it. It is returned as `busy` if the session has
   * events newer than `asOf`, or while a run is open that it would replace.
   */
  rewrite(messages: Message[], options: AppendOptions & { through?: string; asOf?: number } = {}): Promise<Receipt> {
    const item: Append["item"] = { type: "rewrite", messages };
    if (options.through !== undefined) item.through = options.through;
    if (options.asOf !== undefined) item.as_of = options.asOf;
    return this.append(item, options);
  }

  /** Delete the session with its events, runs and history; resolves once all is gone. An open run is cancelled first. */
  async delete(options: AppendOptions = {}): Promise<void> {
    const { append } = await this.append({ type: "delete" }, options);
    await this.#settled(append, options, (fate) => fate.state !== "appended");
  }

  /**
   * Begin a new session of the tenant with this one's configuration and history. `through`: the last run whose messages
   * it has; left out: the last one that has ended. Throws SessionNotFound.
   */
  async fork(name: string, options: AppendOptions & { through?: string } = {}): Promise<Session> {
    const { through } = options;
    const { made, runs, run, config } = await this.#state(options.signal);
    let number = runs - (run ? 1 : 0);
    if (through !== undefined) {
      const last = Number(/\.([0-9]{1,9})$/.exec(through)?.[1] ?? number);
      if (through !== `${this.#ref}.${made}.${last}` || last >= number) throw new RequestInvalid(`through: ${through} is no run of this session that has ended`);
      number = last + 1;
    }
    const forked = new Session(this.deployment, name, this.tenant, this.put);
    const item = JSON.parse(config) as Configure;
    await forked.append({ ...item, type: "configure", messages: await this.#history(made, number, options.signal) }, options);
    return forked;
  }

  /** What became of an append; undefined if it is not known, or not any more. */
  async fate(append: string, options: CallOptions = {}): Promise<Fate | undefined> {
    const key = `${await this.#key(options.signal)}:appends`;
    const found = await this.#use((redis) => redis.hGet(key, append), options.signal);
    return found ? (JSON.parse(found) as Fate) : undefined;
  }

  /**
   * The session's events and those of its runs, each with the cursor behind it: first the stored ones, then live,
   * without end. The order is the same for every reader. Throws SessionNotFound, also once it is deleted; SessionReplaced
   * for a cursor of a deleted one; CursorTrimmed, as some thousand of its own events are kept; CursorAhead.
   */
  async *follow(options: FollowSessionOptions = {}): AsyncGenerator<SessionStep, void, undefined> {
    const reader = new SessionReader(this.deployment, this.#ref, this.name, options.after, this.deployment.until(options.signal));
    try {
      for (;;) {
        const steps = await reader.read(options.live ?? true);
        yield* steps ?? [];
        if (steps?.length === 0 && options.live === false) return;
      }
    } finally {
      reader.close();
    }
  }

  /** The history as the next run gets it, without a bound and without what the open run has given so far. */
  async messages(options: CallOptions = {}): Promise<Message[]> {
    const { made, runs, run } = await this.#state(options.signal);
    const number = runs - (run ? 1 : 0);
    const before = await this.#history(made, number, options.signal);
    if (!run) return before;
    const key = `${await this.#key(options.signal)}:history`;
    const own = await this.#use((redis) => redis.hmGet(key, [`in:${number}`, `add:${number + 1}`]), options.signal);
    return [...before, ...own.flatMap(messagesIn)];
  }

  /** What the session is configured as, without the history that it began with. Throws SessionNotFound. */
  async configuration(options: CallOptions = {}): Promise<Configure> {
    return JSON.parse((await this.#state(options.signal)).config) as Configure;
  }

  // --- appends -----------------------------------------------------------------------------------------------------

  async #settled(append: string, options: AppendOptions, is: (fate: Fate) => boolean): Promise<Fate> {
    const { waitMs = 60_000 } = options;
    const signal = this.deployment.until(options.signal);
    const until = Date.now() + waitMs;
    for (let pause = FIRST_LOOK_MS; ; pause = Math.min(2 * pause, LONGEST_LOOK_MS)) {
      const fate = await this.fate(append, { signal });
      if (fate && is(fate)) return fate;
      if (Date.now() >= until) throw new AppendPending(this.name, append, waitMs);
      await sleep(pause, undefined, { signal }).catch(() => signal.throwIfAborted());
    }
  }

  // --- state and history -------------------------------------------------------------------------------------------

  #use<T>(commands: (redis: Redis) => Promise<T>, signal: AbortSignal | undefined): Promise<T> {
    return this.deployment.commands.use(commands, { signal: this.deployment.until(signal) });
  }

  async #key(signal: AbortSignal | undefined): Promise<string> {
    const partition = await this.deployment.partitionOf(this.#ref, this.deployment.until(signal));
    return `${this.deployment.prefix}:{${partition}}:session:${this.#ref}`;
  }

  async #state(signal: AbortSignal | undefined) {
    const key = await this.#key(signal);
    const [made, runs, run, config, deleting] = await this.#use((redis) => redis.hmGet(key, ["made", "runs", "run", "config", "deleting"]), signal);
    if (!made || !config || deleting) throw new SessionNotFound(this.name);
    return { made, runs: Number(runs ?? 0), run, config };
  }

  /** The messages before this run: those of the runs before it, and those that the history begins with. */
  async #history(made: string, number: number, signal: AbortSignal | undefined): Promise<Message[]> {
    const key = `${await this.#key(signal)}:history`;
    const [before, beginsAt, added] = await this.#use((redis) => redis.hmGet(key, ["before", "begins_at", `add:${number}`]), signal);
    const messages = Number(beginsAt ?? 0) <= number ? messagesIn(before) : [];
    for (let first = Number(beginsAt ?? 0); first < number; first += AT_ONCE) {
      const runs = [...Array(Math.min(AT_ONCE, number - first)).keys()].map((n) => first + n);
      const names = runs.flatMap((n) => ["add", "in", "out", "heard", "steer"].map((what) => `${what}:${n}`));
      const found = await this.#use((redis) => redis.hmGet(key, names), signal);
      for (const [i, n] of runs.entries()) {
        const [put, sent, out, heard, steers] = found.slice(5 * i, 5 * i + 5);
        messages.push(...messagesIn(put), ...messagesIn(sent), ...(out ? messagesIn(out) : await this.#fromLog(`${this.#ref}.${made}.${n}`, heard, steers, signal)));
      }
    }
    return [...messages, ...messagesIn(added)];
  }

  /** What an ended run added, with the messages that steered it; those alone if its log is gone. */
  async #fromLog(run: string, heard: string | null | undefined, steers: string | null | undefined, signal: AbortSignal | undefined): Promise<Message[]> {
    const log = `${this.deployment.prefix}:{${await this.deployment.partitionOf(this.#ref, this.deployment.until(signal))}}:log:${run}`;
    const builder = new MessageBuilder();
    let end: TerminalEvent | undefined;
    for (let after = "-"; !end; ) {
      const entries: Entry[] = (await this.#use((redis) => redis.xRange(log, after, "+", { COUNT }), signal)) ?? [];
      for (const { id, message } of entries) {
        const event = eventIn(log, id, message, "seq") as PublicEvent;
        builder.add(event);
        if (isEnd(event)) end = event;
        after = `(${id}`;
      }
      if (entries.length === 0) break;
    }
    const [through, characters] = heard ? heard.split(" ") : [];
    const told: Heard = through ? { heardThrough: Number(through), ...(characters ? { heardCharacters: Number(characters) } : {}) } : {};
    return builder.messages(end, told, steers ? (JSON.parse(steers) as [number, Message[]][]) : []);
  }
}

function isMessages(content: Said | Message[]): content is Message[] {
  return Array.isArray(content) && content.some((one) => "role" in one);
}

function heardIn({ heardThrough, heardCharacters }: Heard): { heard_through?: number; heard_characters?: number } {
  return {
    ...(heardThrough === undefined ? {} : { heard_through: heardThrough }),
    ...(heardCharacters === undefined ? {} : { heard_characters: heardCharacters }),
  };
}

function messagesIn(piece: string | null | undefined): Message[] {
  return piece ? (JSON.parse(piece) as Message[]) : [];
}
