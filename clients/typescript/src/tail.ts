/**
 * Waits for new entries of many logs on one connection, for all readers of a client.
 *
 * One XREAD waits for all of them. To add a log, the waiting read is ended with CLIENT UNBLOCK, or by breaking its
 * connection if the server does not allow that. A reader asks for entries only when it has handled the last ones, so a
 * slow one holds no memory here and delays no other.
 */

import { BLOCK_MS, type Connection, type Entry } from "./connection.js";
import { isAfter } from "./keys.js";

const COUNT = 256;
/** Readers that arrive within this time end the waiting read once. */
const GATHER_MS = 2;
const TRIES = 3;
/** A connection that nobody reads on is closed after this. */
const IDLE_MS = 5_000;
/** The server looks at each log of a read when it begins. */
export const READERS = 1_000;

interface Waiter {
  log: string;
  id: string;
  take: (entries: Entry[]) => void;
  fail: (error: unknown) => void;
}

export class Tail {
  /** Readers that use this, waiting or not. */
  readers = 0;
  readonly #waiters = new Set<Waiter>();
  #reading: ReadonlySet<Waiter> | undefined;
  #runs = false;
  #interrupting = false;
  #broken = false;
  #idle: NodeJS.Timeout | undefined;

  /** `connection` waits; `commands`, to the same node, never does, and ends a read. */
  constructor(readonly connection: Connection, readonly commands: Connection) {}

  close(): void {
    clearTimeout(this.#idle);
    this.connection.close();
    this.commands.close();
  }

  /**
   * The entries of a log after an id; empty if none came within `ms`. Throws the signal's reason, and what the read
   * threw: ServerUnavailable, ServerError.
   */
  wait(log: string, id: string, ms: number, signal: AbortSignal): Promise<Entry[]> {
    return new Promise<Entry[]>((resolve, reject) => {
      const done = (): void => {
        clearTimeout(timer);
        signal.removeEventListener("abort", stop);
        this.#waiters.delete(waiter);
      };
      const waiter: Waiter = {
        log,
        id,
        take: (entries) => (done(), resolve(entries)),
        fail: (error) => (done(), reject(error)),
      };
      const stop = (): void => waiter.fail(signal.reason);
      const timer = setTimeout(() => waiter.take([]), ms);
      if (signal.aborted) return stop();
      signal.addEventListener("abort", stop);
      this.#waiters.add(waiter);
      clearTimeout(this.#idle);
      if (!this.#runs) void this.#run();
      else if (this.#reading) void this.#interrupt(this.#reading);
    });
  }

  async #run(): Promise<void> {
    this.#runs = true;
    while (this.#waiters.size > 0) {
      const reading = new Set(this.#waiters);
      const from = new Map<string, string>();
      for (const { log, id } of reading) {
        const other = from.get(log);
        if (other === undefined || isAfter(other, id)) from.set(log, id);
      }
      const streams = [...from].map(([key, id]) => ({ key, id }));
      try {
        this.#reading = reading;
        const found = (await this.connection.use((redis) => redis.xRead(streams, { COUNT, BLOCK: BLOCK_MS }))) ?? [];
        const entries = new Map<string, Entry[]>(found.map(({ name, messages }) => [name, messages]));
        for (const waiter of reading) {
          const later = entries.get(waiter.log)?.filter(({ id }) => isAfter(id, waiter.id)) ?? [];
          if (later.length > 0) waiter.take(later);
        }
      } catch (error) {
        if (!this.#broken) for (const waiter of reading) waiter.fail(error);
      } finally {
        this.#reading = undefined;
        this.#broken = false;
      }
      await new Promise(setImmediate); // readers that go on at once are in the next read
    }
    this.#runs = false;
    this.#idle = setTimeout(() => this.connection.drop(), IDLE_MS);
    this.#idle.unref();
  }

  /** End the read that waits, once for all that arrive meanwhile. */
  async #interrupt(reading: ReadonlySet<Waiter>): Promise<void> {
    if (this.#interrupting) return;
    this.#interrupting = true;
    try {
      for (let n = 0; n < TRIES; n++) {
        await new Promise((resolve) => setTimeout(resolve, GATHER_MS)); // the read may not have reached the server yet
        const id = this.connection.id;
        if (this.#reading !== reading) return;
        if (id !== undefined && (await this.commands.use((redis) => redis.clientUnblock(id)).catch(() => 0))) return;
      }
      if (this.#reading !== reading) return;
      this.#broken = true;
      this.connection.drop();
    } finally {
      this.#interrupting = false;
      // One that came while the read ended is in no read, if a next one has begun without it.
      const now = this.#reading;
      if (now && now !== reading && [...this.#waiters].some((waiter) => !now.has(waiter))) void this.#interrupt(now);
    }
  }
}
