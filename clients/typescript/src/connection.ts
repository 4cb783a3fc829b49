/** One connection to the server, made anew when it was lost; and how long a reader puts up with a server that is away. */

import { setTimeout as sleep } from "node:timers/promises";
import { createClient, ErrorReply } from "@redis/client";
import { ServerFull, ServerUnavailable, TokenbusError } from "./errors.js";

/** A read waits so long for entries, well below what a connection may be silent. */
export const BLOCK_MS = 2_000;
const SILENT_MS = 10_000;
const CONNECT_MS = 5_000;
const NOT_READY = /^(LOADING|MASTERDOWN|READONLY|TRYAGAIN|CLUSTERDOWN|UNBLOCKED)/;

const newClient = (url: string, socketTimeout: number | undefined) =>
  createClient({
    url,
    name: "tokenbus-ts",
    socket: {
      connectTimeout: CONNECT_MS,
      reconnectStrategy: false,
      ...(socketTimeout === undefined ? {} : { socketTimeout }),
    },
  });

export type Redis = ReturnType<typeof newClient>;
export interface Entry {
  id: string;
  message: Record<string, string>;
}

export class Connection {
  #client: Promise<Redis> | undefined;
  #closed = false;

  /** `reading`: the connection is used without a pause, so silence means that it is broken. */
  constructor(readonly url: string, readonly reading: boolean) {}

  /** Run commands. Throws ServerUnavailable, ServerFull, and the server's other errors as they are. */
  async use<T>(commands: (redis: Redis) => Promise<T>): Promise<T> {
    try {
      return await commands(await this.#ready());
    } catch (error) {
      throw translated(error);
    }
  }

  /** Break the connection; a read that waits fails. */
  close(): void {
    this.#closed = true;
    this.#client?.then((redis) => redis.destroy()).catch(() => {});
  }

  #ready(): Promise<Redis> {
    if (this.#closed) throw new TokenbusError("closed", "the client is closed");
    if (this.#client) return this.#client;
    const client = newClient(this.url, this.reading ? SILENT_MS : undefined);
    const connecting = client.connect().then(() => {
      if (this.#closed) client.destroy();
      return client;
    });
    const lost = (): void => {
      if (this.#client === connecting) this.#client = undefined; // the next command connects anew
    };
    client.on("error", lost);
    client.on("end", lost);
    connecting.catch(lost);
    this.#client = connecting;
    return connecting;
  }
}

function translated(error: unknown): unknown {
  if (!(error instanceof Error) || error instanceof TokenbusError) return error;
  if (!(error instanceof ErrorReply)) return new ServerUnavailable(`the server cannot be reached: ${error.message}`, { cause: error });
  if (error.message.startsWith("OOM")) return new ServerFull(`the server has no memory left: ${error.message}`, { cause: error });
  return NOT_READY.test(error.message) ? new ServerUnavailable(error.message, { cause: error }) : error;
}

const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 1_000;

/** Pauses that grow while the server is away, `boundMs` in all. */
export class Outage {
  #since: number | undefined;
  #pauseMs = FIRST_PAUSE_MS;

  constructor(readonly boundMs: number) {}

  /** Pause before another try. Throws `error` if it is another kind, or the server has been away for too long. */
  async wait(error: unknown): Promise<void> {
    if (!(error instanceof ServerUnavailable)) throw error;
    this.#since ??= Date.now();
    if (Date.now() - this.#since >= this.boundMs) throw error;
    await sleep(this.#pauseMs * (0.5 + Math.random() / 2));
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
