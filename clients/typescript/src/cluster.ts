/** The nodes of a Cluster: each command goes to the node that has its key, on one connection to each node. */

import { ErrorReply } from "@redis/client";
import type { Redis } from "./connection.js";
import { ServerUnavailable } from "./errors.js";

export interface Place {
  host: string;
  port: number;
}

/** The commands of a client, of those that name a key: it comes first, or among the `keys` of a script. */
export class Cluster {
  /** First and last slot, and the node that has them. */
  #slots: [number, number, Place][] = [];
  readonly #nodes = new Map<string, Promise<Redis>>();
  readonly #listeners: ((error?: unknown) => void)[] = [];
  #closed = false;

  /** `seeds`: some of its nodes. `plain` gives a client of one, not connected yet. */
  constructor(readonly seeds: readonly Place[], readonly plain: (place: Place) => Redis) {}

  /** As a client: what it has not itself is a command. */
  get commands(): Redis {
    return new Proxy(this, {
      get: (cluster, name) => {
        if (typeof name !== "string" || name === "then") return undefined; // a promise of this is no promise of a promise
        if (name in cluster) return (cluster[name as keyof Cluster] as (...args: unknown[]) => unknown).bind(cluster);
        return (...args: unknown[]) => cluster.#send(name, args);
      },
    }) as unknown as Redis;
  }

  /** Learn which node has which slots. Throws ServerUnavailable. */
  async connect(): Promise<void> {
    let problem: unknown;
    for (const seed of this.seeds) {
      const client = this.plain(seed);
      client.on("error", () => {});
      try {
        await client.connect();
        const found = (await client.sendCommand(["CLUSTER", "SLOTS"])) as unknown as [number, number, [string, number]][];
        this.#slots = found.map(([first, last, [host, port]]) => [first, last, { host: host || seed.host, port }]);
        return;
      } catch (error) {
        problem = error; // the next one may know
      } finally {
        destroyed(client);
      }
    }
    throw new ServerUnavailable(`no node of the Cluster answers: ${String(problem)}`);
  }

  /** The node of a key. Throws ServerUnavailable. */
  placeOf(key: string): Place {
    const slot = slotOf(key);
    const found = this.#slots.find(([first, last]) => first <= slot && slot <= last);
    if (!found) throw new ServerUnavailable(`no node of the Cluster has the slot of ${key}`);
    return found[2];
  }

  on(_event: "error" | "end", listener: (error?: unknown) => void): void {
    this.#listeners.push(listener);
  }

  destroy(): void {
    this.#closed = true;
    for (const node of this.#nodes.values()) node.then(destroyed, () => {});
  }

  async #send(name: string, args: unknown[]): Promise<unknown> {
    const { keys } = (args[1] ?? {}) as { keys?: string[] };
    const client = await this.#node(this.placeOf(keys?.[0] ?? String(args[0])));
    try {
      return await call(client, name, args);
    } catch (error) {
      // A slot that moves: the key may be at its next node already.
      const [, host, port] = (error instanceof ErrorReply && /^ASK \d+ (.*):(\d+)$/.exec(error.message)) || [];
      if (host === undefined) throw error;
      const next = await this.#node({ host, port: Number(port) });
      const [, reply] = await Promise.all([next.asking(), call(next, name, args)]);
      return reply;
    }
  }

  #node(place: Place): Promise<Redis> {
    const address = `${place.host}:${place.port}`;
    let node = this.#nodes.get(address);
    if (!node) {
      this.#nodes.set(address, (node = this.#connected(place)));
      node.catch(() => this.#nodes.delete(address));
    }
    return node;
  }

  async #connected(place: Place): Promise<Redis> {
    const client = this.plain(place);
    for (const event of ["error", "end"]) client.on(event, (error?: unknown) => this.#listeners.forEach((listener) => listener(error)));
    await client.connect();
    if (this.#closed) {
      destroyed(client);
      throw new ServerUnavailable("the connection was given up while it was made");
    }
    return client;
  }
}

function call(client: Redis, name: string, args: unknown[]): Promise<unknown> {
  return (client[name as keyof Redis] as (...args: unknown[]) => Promise<unknown>)(...args);
}

function destroyed(client: Redis): void {
  if (client.isOpen) client.destroy();
}

/** CRC-16 (XMODEM) of the part in braces, modulo the number of slots. */
function slotOf(key: string): number {
  const tag = /\{([^}]+)\}/.exec(key)?.[1] ?? key;
  let crc = 0;
  for (const byte of Buffer.from(tag)) {
    crc ^= byte << 8;
    for (let bit = 0; bit < 8; bit++) crc = crc & 0x8000 ? ((crc << 1) ^ 0x1021) & 0xffff : (crc << 1) & 0xffff;
  }
  return crc % 16_384;
}
