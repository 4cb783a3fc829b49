/** One connection to the server, made anew when it was lost; and how long a reader puts up with a server that is away. */

import { setTimeout as sleep } from "node:timers/promises";
import { ErrorReply } from "@redis/client";
import { ServerError, ServerFull, ServerUnavailable, TokenbusError } from "./errors.js";
import { ANSWER_MS, type Server } from "./server.js";

/** A read waits so long for entries, well below what a connection may be silent. */
export const BLOCK_MS = 2_000;
/** A connection that reads is silent while it waits for entries. */
const SILENT_MS = 10_000;
const NOT_READY = /^(MOVED|ASK|BUSY|LOADING|MASTERDOWN|MISCONF|NOREPLICAS|READONLY|TRYAGAIN|CLUSTERDOWN|UNBLOCKED)/;
/** As in Python: the operator may set the user's password or rights while the client waits. */
const REFUSED = /^(NOAUTH|NOPERM|WRONGPASS)/;

/** It is elsewhere by now: at another master, or another node of a Cluster. */
const ELSEWHERE = /^(READONLY|MOVED|ASK)/;

export type Redis = Awaited<ReturnType<Server["client"]>>;
export interface Entry {
  id: string;
  message: Record<string, string>;
}

/** Of a call: `signal` ends it with the signal's reason. */
export interface CallOptions {
  signal?: AbortSignal | undefined;
  /** How long the server may take to answer, in ms. Default 5,000. */
  timeoutMs?: number;
}

export class Connection {
  #client: Redis | undefined;
  #connecting: Promise<Redis> | undefined;
  #closed = false;
  /** The server's id of a connection that reads; undefined while there is none, or this user may not ask. */
  id: number | undefined;

  /** `reading`: commands wait on the server for entries. `near`: in a Cluster all are for the node of this key. */
  constructor(readonly server: Server, readonly reading: boolean, readonly near?: string) {}

  /**
   * Run commands. Throws the signal's reason; ServerUnavailable, also for a server that does not answer in time;
   * ServerFull; ServerError.
   */
  async use<T>(commands: (redis: Redis) => Promise<T>, options: CallOptions = {}): Promise<T> {
    const { signal, timeoutMs = this.reading ? SILENT_MS : ANSWER_MS } = options;
    signal?.throwIfAborted();
    let timer: NodeJS.Timeout | undefined;
    let stop = (): void => {};
    const ended = new Promise<never>((_, reject) => {
      timer = setTimeout(() => {
        this.drop(); // whatever waits for it behind this
        reject(new ServerUnavailable(`the server did not answer within ${timeoutMs} ms`));
      }, timeoutMs);
      stop = () => reject(signal?.reason);
      signal?.addEventListener("abort", stop);
    });
    try {
      return await Promise.race([this.#run(commands), ended]);
    } catch (error) {
      signal?.throwIfAborted();
      if (error instanceof ErrorReply && ELSEWHERE.test(error.message)) this.drop();
      throw translated(error);
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", stop);
    }
  }

  /** Break the connection; a read that waits fails. */
  close(): void {
    this.#closed = true;
    this.drop();
  }

  async #run<T>(commands: (redis: Redis) => Promise<T>): Promise<T> {
    if (this.#closed) throw closed();
    const connecting = (this.#connecting ??= this.#connect());
    try {
      return await commands(await connecting);
    } finally {
      if (!this.#client && this.#connecting === connecting) this.#connecting = undefined; // the next command connects anew
    }
  }

  async #connect(): Promise<Redis> {
    const client = await this.server.client(this.near);
    const connection = this.reading ? "reader" : "commands";
    const lost = (error?: unknown): void => {
      if (this.#client !== client) return;
      this.drop(); // a Cluster's other nodes too
      this.server.onStatus({ state: "lost", connection, error });
    };
    client.on("error", lost);
    client.on("end", lost);
    this.id = undefined;
    const connecting = this.#connecting;
    await client.connect();
    if (this.#closed || !connecting || this.#connecting !== connecting) {
      discard(client);
      throw this.#closed ? closed() : new ServerUnavailable("the connection was given up while it was made");
    }
    this.#client = client;
    if (this.reading) this.id = await client.clientId().catch(() => undefined);
    this.server.onStatus({ state: "connected", connection });
    return client;
  }

  /** Break the connection; the next command makes another. */
  drop(): void {
    const client = this.#client;
    this.#client = this.#connecting = undefined;
    if (client) discard(client);
  }
}

function discard(client: Redis): void {
  try {
    client.destroy();
  } catch {
    // it is closed
  }
}

export function closed(): TokenbusError {
  return new TokenbusError("closed", "the client is closed");
}

function translated(error: unknown): unknown {
  if (!(error instanceof Error) || error instanceof TokenbusError) return error;
  if (!(error instanceof ErrorReply)) return new ServerUnavailable(`the server cannot be reached: ${error.message}`, { cause: error });
  if (error.message.startsWith("OOM")) return new ServerFull(`the server has no memory left: ${error.message}`, { cause: error });
  if (REFUSED.test(error.message)) return new ServerUnavailable(`the server refuses this user: ${error.message}`, { cause: error });
  if (NOT_READY.test(error.message)) return new ServerUnavailable(error.message, { cause: error });
  return new ServerError(error.message, { cause: error });
}

const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 1_000;

/** Pauses that grow while the server is away, `boundMs` in all. */
export class Outage {
  #since: number | undefined;
  #pauseMs = FIRST_PAUSE_MS;

  constructor(readonly boundMs: number) {}

  /**
   * Pause before another try. Throws `error` if it is another kind, or the server has been away for too long; the
   * signal's reason at once.
   */
  async wait(error: unknown, signal: AbortSignal): Promise<void> {
    if (!(error instanceof ServerUnavailable)) throw error;
    this.#since ??= Date.now();
    if (Date.now() - this.#since >= this.boundMs) throw error;
    await sleep(this.#pauseMs * (0.5 + Math.random() / 2), undefined, { signal }).catch(() => signal.throwIfAborted());
    this.#pauseMs = Math.min(2 * this.#pauseMs, LONGEST_PAUSE_MS);
  }

  /** The server answered. */
  over(): void {
    this.#since = undefined;
    this.#pauseMs = FIRST_PAUSE_MS;
  }
}

/** Up to one entry at that end of a stream, from or up to an id. */
export async function oldest(redis: Redis, stream: string, from = "-", to = "+"): Promise<Entry | undefined> {
  return (await redis.xRange(stream, from, to, { COUNT: 1 }))?.[0] ?? undefined;
}

export async function newest(redis: Redis, stream: string): Promise<Entry | undefined> {
  return (await redis.xRevRange(stream, "+", "-", { COUNT: 1 }))?.[0] ?? undefined;
}
