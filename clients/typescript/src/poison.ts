/**
 * A group's events whose handlers fail, as Python's client/subscriptions/poison.py has them, with the same counts on the
 * server: each is tried again with growing pauses, and is a dead letter after so many tries. The death of a process is a
 * try of each event that it may have had in hand; the last try of these is alone.
 */

import { setTimeout as sleep } from "node:timers/promises";
import type { Redis } from "./connection.js";
import type { Deployment } from "./deployment.js";
import { ServerUnavailable } from "./errors.js";
import { DATA_FIELD, orderOf } from "./keys.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 30_000;
const KEPT_MS = 7 * 86_400_000;
const KEPT_BYTES = 256 * 1024;
const DEAD_ENTRIES = 10_000;
/** Begins the field by which a living worker shows that it has events in hand, and whether it counts them before. */
const OPEN = "open:";
const UNCOUNTED = "1";
const COUNTED = "2";

/** An event in hand, and where it is from. A decision has its `n` for a `seq`, an event of a session its `session_seq`. */
export interface Held {
  event: { run?: string; seq?: number; n?: number; session_seq?: number };
  partition: number;
  token: string;
  stream: string;
  entry: string;
}

interface Counts {
  token: string;
  tries: Map<string, number>;
  /** How many further events a worker that died may have had in hand. */
  suspects: number;
  /** That death is not among the tries yet. */
  died: boolean;
  /** The server knows that events are counted before they are handled. */
  counted: boolean;
}

export class Poison<E extends Held["event"]> {
  readonly #partitions = new Map<number, Promise<Counts>>();
  #alone: Promise<unknown> = Promise.resolve();

  /** `group`: as its leases name it. `inHand`: maximum events that a worker holds. */
  constructor(
    readonly deployment: Deployment,
    readonly group: string,
    readonly handler: (event: E) => unknown,
    readonly tries: number,
    readonly inHand: number,
    readonly signal: AbortSignal,
  ) {}

  /** Handle the event; after how many ms to do that again, or undefined if it was handled or is dead. */
  async handle(held: Held & { event: E }): Promise<number | undefined> {
    let counts: Counts;
    try {
      counts = await this.#counts(held);
    } catch (error) {
      if (!(error instanceof ServerUnavailable)) throw error;
      return FIRST_PAUSE_MS; // without the server nothing is handled that may be poison
    }
    if (counts.suspects === 0) {
      if (counts.counted) {
        counts.counted = false;
        await this.#write(held, { [OPEN + held.token]: UNCOUNTED });
      }
      return this.#try(held, counts, false);
    }
    counts.suspects--;
    const field = fieldOf(held);
    if (counts.died && (counts.tries.get(field) ?? 0) < this.tries - 1) counts.tries.set(field, (counts.tries.get(field) ?? 0) + 1);
    if ((counts.tries.get(field) ?? 0) < this.tries - 1) return this.#try(held, counts, true);
    const turn = this.#alone.then(() => this.#try(held, counts, true));
    this.#alone = turn.catch(() => {});
    return turn;
  }

  /** Sign off from a partition whose events in hand are done or left to another worker. */
  async leave({ partition, token }: Pick<Held, "partition" | "token">): Promise<void> {
    const counts = await this.#partitions.get(partition)?.catch(() => undefined);
    if (counts?.token !== token) return;
    this.#partitions.delete(partition);
    await this.#use((redis) => redis.hDel(this.#key(partition), OPEN + token));
  }

  #key(partition: number): string {
    return `${this.deployment.prefix}:{${partition}}:lease:${this.group}:failed`;
  }

  #use<T>(commands: (redis: Redis) => Promise<T>): Promise<T> {
    return this.deployment.commands.use(commands);
  }

  async #counts(held: Held): Promise<Counts> {
    const known = await this.#partitions.get(held.partition);
    if (known?.token === held.token) return known;
    const opening = this.#opened(held);
    this.#partitions.set(held.partition, opening);
    opening.catch(() => this.#partitions.get(held.partition) === opening && this.#partitions.delete(held.partition));
    return opening;
  }

  async #opened({ partition, token }: Held): Promise<Counts> {
    const key = this.#key(partition);
    const fields = Object.entries(await this.#use((redis) => redis.hGetAll(key)));
    const left = fields.filter(([name]) => name.startsWith(OPEN) && name !== OPEN + token);
    await this.#use(async (redis) => {
      if (left.length > 0) await redis.hDel(key, left.map(([name]) => name));
      await redis.hSet(key, { [OPEN + token]: left.length > 0 ? COUNTED : UNCOUNTED });
      await redis.pExpire(key, KEPT_MS);
    });
    const tries = new Map(fields.filter(([name]) => !name.startsWith(OPEN)).map(([name, count]) => [name, Number(count)]));
    const died = left.some(([, mark]) => mark === UNCOUNTED);
    return { token, tries, suspects: left.length > 0 ? this.inHand : 0, died, counted: left.length > 0 };
  }

  async #try(held: Held & { event: E }, counts: Counts, suspect: boolean): Promise<number | undefined> {
    const field = fieldOf(held);
    let tried = counts.tries.get(field) ?? 0;
    let error: unknown;
    if (tried < this.tries) {
      if (suspect) await this.#count(held, counts);
      try {
        await this.handler(held.event);
        tried = 0;
      } catch (caught) {
        error = caught ?? new Error("the handler threw nothing");
        if (!suspect) await this.#count(held, counts);
        tried = counts.tries.get(field) ?? 0;
        if (tried < this.tries) return Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** (tried - 1));
      }
    }
    if (tried > 0) await this.#bury(held, tried, error);
    if (counts.tries.delete(field)) await this.#write(held, {}, field);
    return undefined;
  }

  async #count(held: Held, counts: Counts): Promise<void> {
    const field = fieldOf(held);
    const tried = (counts.tries.get(field) ?? 0) + 1;
    counts.tries.set(field, tried);
    await this.#write(held, { [field]: String(tried) });
  }

  /** Write what this process knows anyway: if the server does not take it, another process counts less. */
  async #write(held: Held, fields: Record<string, string>, gone?: string): Promise<void> {
    const key = this.#key(held.partition);
    try {
      await this.#use(async (redis) => {
        if (gone !== undefined) await redis.hDel(key, gone);
        if (Object.keys(fields).length > 0) {
          await redis.hSet(key, fields);
          await redis.pExpire(key, KEPT_MS);
        }
      });
    } catch (error) {
      if (!(error instanceof ServerUnavailable)) throw error;
    }
  }

  /** Until the server has it, the run waits; a subscription that is closed leaves it to another worker. */
  async #bury({ event, stream, entry }: Held, tried: number, error: unknown): Promise<void> {
    const bytes = Buffer.from(JSON.stringify(event));
    const letter = {
      reason: `failed ${tried} times: ${error === undefined ? "a process that handled it ended" : String(error)}`,
      stage: `group ${this.group}`,
      stream,
      entry,
      bytes: bytes.subarray(0, KEPT_BYTES).toString("base64"),
      ...(event.run === undefined ? {} : { run: event.run }),
      ...(bytes.length > KEPT_BYTES ? { size: bytes.length } : {}),
      seq: event.seq ?? event.n ?? event.session_seq,
      group: this.group,
    };
    const key = `${this.deployment.prefix}:dead`;
    for (;;) {
      try {
        const most = Math.max(DEAD_ENTRIES, await this.#use((redis) => redis.xLen(key)));
        const trim = { TRIM: { strategy: "MAXLEN" as const, strategyModifier: "~" as const, threshold: most } };
        await this.#use((redis) => redis.xAdd(key, "*", { [DATA_FIELD]: JSON.stringify(letter) }, trim));
        return;
      } catch (failure) {
        if (!(failure instanceof ServerUnavailable)) throw failure;
        await sleep(FIRST_PAUSE_MS, undefined, { signal: this.signal });
      }
    }
  }
}

function fieldOf({ event }: Held): string {
  return `${orderOf(event)}/${event.seq ?? event.n ?? event.session_seq}`;
}
