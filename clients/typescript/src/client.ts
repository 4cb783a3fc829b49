/** The client: publish requests, follow runs, subscribe to topics, cancel, take results. */

import { randomUUID } from "node:crypto";
import { Blobs } from "./blobs.js";
import type { CallOptions } from "./connection.js";
import { Deployment } from "./deployment.js";
import { InvalidArgument, ServerFull, ServerUnavailable, TimedOut } from "./errors.js";
import { follow, isEnd, type FollowOptions } from "./follow.js";
import { GroupSubscription, type GroupOptions } from "./group.js";
import { DATA_FIELD, type Topic } from "./keys.js";
import { RunElements, type ElementBounds, type RunElement } from "./elements.js";
import { localUp } from "./local_up.js";
import { MessageBuilder, type Heard } from "./messages.js";
import { orThrow, responseOf, type Response } from "./response.js";
import { describeRuns, listRuns, requestAgain, requestToResume, type RunInfo, type RunsOptions } from "./runs.js";
import { SentenceSubscription, type SentencesOptions } from "./sentences.js";
import { Server, type Status } from "./server.js";
import { Subscription, type SubscribeOptions } from "./subscribe.js";
import { Session } from "./session.js";
import { listSessions, type SessionInfo, type SessionsOptions } from "./sessions.js";
import { followTree, type FollowTreeOptions, type TreeStep } from "./tree_reader.js";
import type { Append, Cancel, Generate, Message, PublicEvent } from "./types.js";
import { decided, decisionOf, listWaits, type DecideOptions, type WaitDecision, type WaitFate, type WaitInfo, type WaitingOptions } from "./waits.js";

const MAX_WAITING = 100_000;
/** A full inbound stream still takes so many cancels and decisions. */
const MORE_FOR_CANCELS = 1_000;

export interface ClientOptions {
  /** Of all keys. Default `tokenbus`. */
  prefix?: string;
  /** How long readers put up with a server that is away, in ms. Default 30,000. */
  reconnectMs?: number;
  /** The address of the blob service. Left out: `TOKENBUS_BLOBS_URL`, the `tokenbus up` of this directory, or the usual port. */
  blobs?: string;
  /** Left out: `TOKENBUS_BLOB_TOKEN`, or the content of the file that `TOKENBUS_BLOB_TOKEN_FILE` names. */
  blobToken?: string;
  /** Called when a connection to the server is made or lost. */
  onStatus?: (status: Status) => void;
}

export interface ResultOptions extends FollowOptions {
  /** How long the call may take in all, in ms; left out: until the run ends. */
  timeoutMs?: number;
}

export type GenerateRequest = Omit<Generate, "type">;

/** A connection to a tokenbus deployment. Connects when it is first used. */
export class Client {
  readonly #deployment: Deployment;
  #blobs: Blobs | undefined;
  readonly #blobService: [url: string | undefined, token: string | undefined];

  /**
   * `url` as `redis://…`, `redis+sentinel://…` or `redis+cluster://…`, or `rediss…` with TLS; left out: `TOKENBUS_REDIS_URL`, or else the server of the `tokenbus up` that
   * runs in this directory. Does not connect yet. Throws InvalidArgument.
   */
  constructor(url: string | undefined = process.env["TOKENBUS_REDIS_URL"] || localUp()?.redis_url, options: ClientOptions = {}) {
    this.#blobService = [options.blobs, options.blobToken];
    if (!url) throw new InvalidArgument("no url was given, TOKENBUS_REDIS_URL is not set, and no `tokenbus up` runs in this directory");
    const server = new Server(url, options.onStatus ?? (() => {}));
    this.#deployment = new Deployment(server, options.prefix ?? "tokenbus", options.reconnectMs ?? 30_000);
  }

  /**
   * Put a request on the bus; returns its run's id, a new one if it has none. The server has it when this resolves.
   *
   * What is wrong with a request is told by its run, which then ends `failed`. Throws ServerFull; ServerUnavailable,
   * whose `request` may be published again: it is the same run, even if it did arrive. A call that its signal ended
   * may have arrived too: publish with an `id` of your own if you want to know.
   */
  async publish(request: GenerateRequest, options: CallOptions = {}): Promise<string> {
    const sent = { ...request, type: "generate" as const, id: request.id ?? randomUUID() };
    try {
      await this.#put(sent, MAX_WAITING, options);
    } catch (error) {
      if (error instanceof ServerUnavailable) error.request = sent;
      throw error;
    }
    return sent.id;
  }

  /**
   * Ask for the run to be stopped, at the provider too. `heardThrough`: the last seq that a listener heard;
   * `heardCharacters`: how many Unicode characters of that event's text, if not all.
   */
  async cancel(
    run: string,
    reason?: string,
    options: CallOptions & { heardThrough?: number; heardCharacters?: number } = {},
  ): Promise<void> {
    const request: Cancel = { type: "cancel", run };
    if (reason !== undefined) request.reason = reason;
    if (options.heardThrough !== undefined) request.heard_through = options.heardThrough;
    if (options.heardCharacters !== undefined) request.heard_characters = options.heardCharacters;
    await this.#put(request, MAX_WAITING + MORE_FOR_CANCELS, options);
  }

  /**
   * All events of a run after the one with seq `after`, stored and then live: no gap, no double. Ends after the
   * terminal event, whatever it is. Up to a thousand share a connection, and outlast one that breaks.
   *
   * Throws RunNotFound, RunLost, CursorTrimmed, CursorAhead, Malformed, ServerUnavailable.
   */
  follow(run: string, options: FollowOptions = {}): AsyncGenerator<PublicEvent, void, undefined> {
    return follow(this.#deployment, run, options);
  }

  /**
   * The events of a run and of all child runs below it after a cursor, stored and then live, in an order that is the
   * same for every reader. Ends when all of these runs have ended. Throws as `follow`.
   */
  followTree(run: string, options: FollowTreeOptions = {}): AsyncGenerator<TreeStep, void, undefined> {
    return followTree(this.#deployment, run, options);
  }

  /** Publish a request and give all its events. A loop that is left does not stop the run: `cancel` does. */
  async *stream(request: GenerateRequest, options: FollowOptions = {}): AsyncGenerator<PublicEvent, void, undefined> {
    yield* this.follow(await this.publish(request, { signal: options.signal }), options);
  }

  /**
   * Wait for the run's end. Throws RunFailed, RunIncomplete, RunCancelled, with what there is; TimedOut; and as `follow`.
   */
  async result(run: string, options: ResultOptions = {}): Promise<Response> {
    const { timeoutMs, signal } = options;
    if (timeoutMs === undefined) return orThrow(await responseOf(this.follow(run, options)));
    const late = new AbortController();
    const timer = setTimeout(() => late.abort(new TimedOut(`run ${run} had not ended after ${timeoutMs} ms`)), timeoutMs);
    try {
      const either = AbortSignal.any(signal ? [signal, late.signal] : [late.signal]);
      return orThrow(await responseOf(this.follow(run, { ...options, signal: either })));
    } finally {
      clearTimeout(timer);
    }
  }

  /**
   * The events of a topic, of all runs: iterate what this resolves to. Has every event once, those of a run in order.
   *
   * Iterating throws CursorTrimmed unless `onTrimmed` is given; this throws CursorAhead, InvalidArgument for a topic or
   * cursor that is none, ServerUnavailable.
   */
  subscribe<T extends Topic>(topic: T, options: SubscribeOptions = {}): Promise<Subscription<T>> {
    return Subscription.open(this.#deployment, topic, options);
  }

  /**
   * A topic shared by the workers of a group, also of Python's: each event goes to one of them, at least once, and those
   * of a run to one at a time, in order. Iterate it: taking the next event acknowledges the one before. A handler that
   * throws ends the loop, and its event comes again. Throws InvalidArgument.
   */
  group<T extends Topic>(topic: T, options: GroupOptions): GroupSubscription<T> {
    return new GroupSubscription(this.#deployment, topic, options);
  }

  /**
   * The topic `visible` as sentences, for speech: iterate what this resolves to. In order within a block, each once, or
   * with a group at least once. Throws as `subscribe`, and InvalidArgument for impossible lengths.
   */
  sentences(options: SentencesOptions = {}): Promise<SentenceSubscription> {
    return SentenceSubscription.open(this.#deployment, options);
  }

  /**
   * Wait for the run's end, however it ends, and give its output as messages for the next request. `heardThrough`: how
   * far a listener heard a run that was not cancelled. Throws as `follow`.
   */
  async messages(run: string, options: ResultOptions & Heard = {}): Promise<Message[]> {
    const builder = new MessageBuilder();
    for await (const event of this.follow(run, options)) {
      builder.add(event);
      if (isEnd(event)) return builder.messages(event, options);
    }
    throw new InvalidArgument("after: the run had ended there already");
  }

  /**
   * Publish the request of a run that is incomplete, failed or cancelled as a new run; gives its id, which follows from
   * the old one: twice is the same run, `again` from 2 on another. Throws RunOpen, RunNotFound, RunNotRepeatable.
   */
  async retry(run: string, options: CallOptions & { again?: number } = {}): Promise<string> {
    const request = await requestAgain(this.#deployment, run, options.again ?? 1, this.#deployment.until(options.signal));
    return this.publish(request, options);
  }

  /**
   * Continue from the visible text of the last turn of a run that is incomplete, failed or cancelled, as a new run: the
   * text goes to the model as the beginning of its answer. Id and errors as of `retry`; RunNotRepeatable also if there
   * is no text to continue, or the provider that was called last cannot continue one.
   */
  async resume(run: string, options: CallOptions & { again?: number } = {}): Promise<string> {
    const until = this.#deployment.until(options.signal);
    return this.publish(await requestToResume(this.#deployment, run, options.again ?? 1, until), options);
  }

  /** What runs wait for: decisions on tool calls, answers, results of clients' tools; the newest first. */
  waiting(options: WaitingOptions = {}): Promise<WaitInfo[]> {
    return listWaits(this.#deployment, options);
  }

  /**
   * Let a tool call run for which the run waits; `arguments`: with these instead of its own. `wait`: as the event
   * `waiting` names it. Resolves once it is decided so. Throws AlreadyDecided with the decision that counts; WaitNotFound;
   * RequestInvalid if the decision does not fit: it still waits then; DecisionPending; ServerUnavailable, ServerFull.
   */
  approve(run: string, wait: string, options: DecideOptions & { arguments?: Record<string, unknown> } = {}): Promise<WaitFate> {
    const edited = options.arguments === undefined ? {} : { arguments: options.arguments };
    return this.decide({ type: "approval", decision: "allow", ...decisionOf(run, wait, options), ...edited }, options);
  }

  /** Deny a tool call for which the run waits; the model reads that, and the `reason`. As `approve`. */
  deny(run: string, wait: string, reason?: string, options: DecideOptions = {}): Promise<WaitFate> {
    const why = reason === undefined ? {} : { reason };
    return this.decide({ type: "approval", decision: "deny", ...decisionOf(run, wait, options), ...why }, options);
  }

  /** Answer a tool's question as its schema says; or `decision`: `decline`, `cancel`, without one. As `approve`. */
  answer(run: string, wait: string, content?: Record<string, unknown>, options: DecideOptions & { decision?: "accept" | "decline" | "cancel" } = {}): Promise<WaitFate> {
    const given = content === undefined ? {} : { content };
    return this.decide({ type: "answer", decision: options.decision ?? "accept", ...decisionOf(run, wait, options), ...given }, options);
  }

  /** Give the result of a tool of the kind `client`: text, or what matches its `result` schema. As `approve`. */
  tool_result(run: string, wait: string, content: unknown, options: DecideOptions & { isError?: boolean } = {}): Promise<WaitFate> {
    return this.decide({ type: "tool_result", content, is_error: options.isError ?? false, ...decisionOf(run, wait, options) }, options);
  }

  /** Send a decision as it is on the bus; the four methods before make one. As `approve`. */
  async decide(decision: WaitDecision, options: DecideOptions = {}): Promise<WaitFate> {
    await this.#put(decision, MAX_WAITING + MORE_FOR_CANCELS, options);
    return decided(this.#deployment, decision, options);
  }

  /** The session of this name, a name within the tenant, whether or not it exists yet. Throws InvalidArgument. */
  session(name: string, options: { tenant?: string } = {}): Session {
    return new Session(this.#deployment, name, options.tenant ?? "", (append, call) => this.#put(append, MAX_WAITING, call));
  }

  /** The sessions with the newest events first. Throws InvalidArgument, ServerUnavailable. */
  sessions(options: SessionsOptions = {}): Promise<SessionInfo[]> {
    return listSessions(this.#deployment, options);
  }

  /**
   * The values of the answer's JSON at `path`, each once and in order, as soon as it is complete. `path`: names, places
   * in arrays or `*` for each, with dots between; left out: each element or field of the whole. `after`: the number of
   * the last element that was handled. Throws Malformed, TooLarge; as `result` if the run does not complete.
   */
  async *elements(
    run: string,
    path: string | readonly string[] = "*",
    options: FollowOptions & ElementBounds = {},
  ): AsyncGenerator<RunElement, void, undefined> {
    const { after = -1, mostCharacters: _, mostDepth: __, ...following } = options;
    const reader = new RunElements(path, options);
    for await (const event of this.follow(run, following)) {
      for (const element of reader.add(event)) if (element.number > after) yield element;
      if (isEnd(event) && event.type !== "completed") await this.result(run, following);
    }
  }

  /** The deployment's blob store. Throws InvalidArgument for an address that is none. */
  get blobs(): Blobs {
    return (this.#blobs ??= new Blobs(...this.#blobService, (signal) => this.#deployment.until(signal)));
  }

  /** The newest runs, open and ended ones, for as long as they are kept. Throws InvalidArgument, ServerUnavailable. */
  runs(options: RunsOptions = {}): Promise<RunInfo[]> {
    return listRuns(this.#deployment, options);
  }

  /** What is known of each of these runs, by its id; unknown ones are left out. Throws ServerUnavailable. */
  describe(runs: readonly string[], options: CallOptions = {}): Promise<Map<string, RunInfo>> {
    return describeRuns(this.#deployment, runs, this.#deployment.until(options.signal));
  }

  /**
   * Take no more calls, wait for those of `publish` and `cancel` that are under way, let groups acknowledge what is done
   * and give their partitions to others; then `close`.
   */
  drain(): Promise<void> {
    return this.#deployment.drain();
  }

  /** Close all connections. Calls and iterations that wait throw an error with the code `closed`. Runs continue. */
  close(): void {
    this.#deployment.close();
  }

  async #put(request: Generate | Cancel | Append | WaitDecision, most: number, options: CallOptions): Promise<void> {
    let sending: Promise<void> | undefined;
    const leave = this.#deployment.drains(async () => sending);
    sending = this.#send(request, most, options);
    await sending.finally(leave);
  }

  async #send(request: Generate | Cancel | Append | WaitDecision, most: number, { signal, ...options }: CallOptions): Promise<void> {
    const stream = this.#deployment.requests;
    const call = { ...options, signal: this.#deployment.until(signal) };
    const waiting = await this.#deployment.commands.use((redis) => redis.xLen(stream), call);
    if (waiting >= most) throw new ServerFull(`${stream} holds ${waiting} requests already`);
    const data = JSON.stringify(request);
    await this.#deployment.commands.use((redis) => redis.xAdd(stream, "*", { [DATA_FIELD]: data }), call);
  }
}
