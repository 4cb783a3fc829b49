/** Which deployment a client talks to: the server, and the keys as `<prefix>:meta` tells them. */

import { closed, Connection } from "./connection.js";
import { DeploymentMismatch, Malformed, ServerUnavailable } from "./errors.js";
import { DATA_FIELD, Keys, WIRE_VERSIONS } from "./keys.js";
import type { Server } from "./server.js";
import { READERS, Tail } from "./tail.js";

/** How often a client asks, while it reads, whether the number of partitions was changed. */
const REFRESH_MS = 1_000;
const FIELDS = ["partitions", "wire_version", "numbers", "ever", "spread"];

export class Deployment {
  /** For commands that do not wait. */
  readonly commands: Connection;
  readonly #closing = new AbortController();
  /** Each with the partition of the Cluster that it reads; elsewhere one reads all. */
  readonly #tails: { of: number; tail: Tail }[] = [];
  /** What `drain` waits for: calls that are under way, and the ends of groups. */
  readonly #busy = new Set<() => Promise<unknown>>();
  #draining = false;
  #keys: Keys | undefined;
  #askedAt = 0;

  constructor(readonly server: Server, readonly prefix: string, readonly reconnectMs: number) {
    this.commands = new Connection(server, false);
  }

  /** Let `drain` wait for what this gives, until the function that is returned is called. */
  drains(end: () => Promise<unknown>): () => void {
    if (this.#draining) throw closed();
    this.#busy.add(end);
    return () => this.#busy.delete(end);
  }

  async drain(): Promise<void> {
    this.#draining = true;
    await Promise.allSettled([...this.#busy].map((end) => end()));
    this.close();
  }

  get requests(): string {
    return `${this.prefix}:requests`;
  }

  /** A signal that ends with the client, and with the caller's. */
  until(signal: AbortSignal | undefined): AbortSignal {
    return AbortSignal.any(signal ? [signal, this.#closing.signal] : [this.#closing.signal]);
  }

  /** End all that reads, and close what it shares. */
  close(): void {
    this.#closing.abort(closed());
    for (const one of [this.commands, ...this.#tails.map(({ tail }) => tail)]) one.close();
  }

  /** What a reader of a log of the partition waits on, with others. Lower its `readers` in the end. */
  tail(partition: number): Tail {
    const of = this.server.cluster ? partition : 0;
    let tail = this.#tails.find((one) => one.of === of && one.tail.readers < READERS)?.tail;
    if (!tail) {
      const near = this.server.cluster ? `{${partition}}` : undefined;
      const commands = near ? new Connection(this.server, false, near) : this.commands;
      this.#tails.push({ of, tail: (tail = new Tail(new Connection(this.server, true, near), commands)) });
    }
    tail.readers++;
    return tail;
  }

  /** Where the run or session is; of one that is nowhere yet, where a new one would be. Throws as `keys`. */
  async partitionOf(name: string, signal: AbortSignal): Promise<number> {
    const keys = await this.keys(signal);
    const places = keys.places(name);
    if (places.length > 1) {
      // A log may outlive its run's hash, so the hash counts first.
      for (const key of [keys.run, keys.log]) {
        const there = await this.commands.use((redis) => Promise.all(places.map((partition) => redis.exists(key.call(keys, name, partition)))), { signal });
        const found = places.find((_, n) => there[n]);
        if (found !== undefined) return found;
      }
    }
    return keys.partitionOf(name);
  }

  /**
   * The names of the keys, at most a second old: the number of partitions may change while a client reads.
   *
   * Throws DeploymentMismatch; ServerUnavailable, also while no deployment is there.
   */
  async keys(signal: AbortSignal): Promise<Keys> {
    if (this.#keys && Date.now() - this.#askedAt < REFRESH_MS) return this.#keys;
    const meta = `${this.prefix}:meta`;
    const [partitions, version, numbers, ever, spread] = await this.commands.use((redis) => redis.hmGet(meta, FIELDS), { signal });
    this.#askedAt = Date.now();
    if (!partitions || !version) {
      if (this.#keys) return this.#keys; // the server lost it, and a worker is about to write it again
      throw new ServerUnavailable(`no deployment here yet: ${meta} is not written`);
    }
    if (!WIRE_VERSIONS.includes(version)) {
      throw new DeploymentMismatch(`wire_version: this client speaks ${WIRE_VERSIONS.join(" and ")}, the deployment ${version}`);
    }
    const placing = Number(partitions);
    const most = Math.max(placing, Number(spread ?? 0));
    this.#keys = new Keys(this.prefix, [placing, ...numbersIn(numbers)], most, Math.min(placing, ...numbersIn(ever)));
    return this.#keys;
  }
}

function numbersIn(text: string | null | undefined): number[] {
  return text ? text.split(",").map(Number) : [];
}

/** What numbers an event: of a run, of the topic `decisions`, of a session, of which an event may be of no run. */
type Count = "seq" | "n" | "session_seq";

/** What every event has, whatever its type. */
export interface Envelope {
  type: string;
  run: string;
}

/** The event in an entry's `__data__`, of whatever type: a newer server may write some that `types.ts` does not have. */
export function eventIn(stream: string, id: string, message: Record<string, string>, count: Count): Envelope {
  const data = message[DATA_FIELD];
  let value: unknown;
  try {
    value = data === undefined ? undefined : JSON.parse(data);
  } catch {
    value = undefined;
  }
  if (!isEnvelope(value, count)) throw new Malformed(`${stream} ${id}`, "no public event");
  return value;
}

function isEnvelope(value: unknown, count: Count): value is Envelope {
  if (typeof value !== "object" || value === null) return false;
  const found = value as Record<string, unknown>;
  return typeof found["type"] === "string" && (typeof found["run"] === "string" || count === "session_seq") && Number.isSafeInteger(found[count]);
}
