/** Handles events, in order within a run, those of several runs at once. */

import { setTimeout as sleep } from "node:timers/promises";
import { orderOf } from "./keys.js";

class Places {
  readonly #waiting: (() => void)[] = [];

  constructor(public free: number) {}

  async take(): Promise<void> {
    if (this.free > 0) this.free--;
    else await new Promise<void>((resolve) => this.#waiting.push(resolve));
  }

  give(): void {
    const next = this.#waiting.shift();
    if (next) next();
    else this.free++;
  }
}

/**
 * Handle all items, those of up to `concurrency` runs at once, `most` in hand. `handle` gives after how many ms it must
 * get the item again, or "left" for one that is another worker's; only the item's run waits meanwhile, and takes no place.
 * Throws what it throws, when the others have ended; `stop` must end the items.
 */
export async function each<I extends { event: { run?: string; session_seq?: number }; done: () => void }>(
  items: AsyncIterable<I>,
  handle: (item: I) => Promise<number | "left" | undefined>,
  { concurrency, most, stop }: { concurrency: number; most: number; stop: () => unknown },
): Promise<void> {
  const [free, room] = [new Places(concurrency), new Places(most)];
  const lanes = new Map<string, I[]>();
  const working = new Set<Promise<void>>();
  const ended = new AbortController();
  const failures: unknown[] = [];
  const work = async (order: string, lane: I[]): Promise<void> => {
    for (let item = lane[0]; item && failures.length === 0; item = lane[0]) {
      const again = await handle(item);
      if (typeof again === "number") {
        free.give();
        await sleep(again, undefined, { signal: ended.signal }).catch(() => {});
        await free.take();
        if (ended.signal.aborted) break;
        continue;
      }
      lane.shift();
      if (again === undefined) item.done();
      room.give();
    }
    lanes.delete(order);
  };
  try {
    for await (const item of items) {
      if (failures.length > 0) break;
      await room.take();
      const order = orderOf(item.event);
      const lane = lanes.get(order);
      if (lane) {
        lane.push(item);
        continue;
      }
      await free.take();
      const begun = [item];
      lanes.set(order, begun);
      const task = work(order, begun)
        .catch((error: unknown) => {
          failures.push(error);
          void stop();
          while (room.free < 1) room.give(); // the loop above may wait for it
        })
        .finally(() => {
          free.give();
          working.delete(task);
        });
      working.add(task);
    }
  } finally {
    ended.abort();
    await Promise.all(working);
  }
  if (failures.length > 0) throw failures[0];
}
