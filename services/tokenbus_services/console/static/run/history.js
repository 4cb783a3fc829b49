// All events of one run that arrived, and the run's state after any of them.

import { apply, copy, initial } from "./reducer.js";

const EVERY = 1000;

export class RunHistory {
  constructor(every = EVERY) {
    this.every = every;
    this.events = [];
    /** The same, by type. */
    this.byType = new Map();
    this.head = initial();
    this.checkpoints = [copy(this.head)];
  }

  /** The last seq that arrived; -1 before the first. */
  get last() {
    return this.events.length - 1;
  }

  /** Take the next event; false if it was here before, as after a reconnect. */
  push(event) {
    if (event.seq < this.events.length) return false;
    if (event.seq > this.events.length) throw new Error(`seq ${event.seq} came after ${this.last}`);
    this.events.push(event);
    const alike = this.byType.get(event.type);
    if (alike) alike.push(event);
    else this.byType.set(event.type, [event]);
    apply(this.head, event);
    if (this.events.length % this.every === 0) this.checkpoints.push(copy(this.head));
    return true;
  }

  /** The state after the event with this seq: from the nearest checkpoint, never from the beginning. */
  at(seq) {
    if (seq >= this.last) return copy(this.head);
    const count = Math.max(0, seq + 1);
    const nearest = Math.floor(count / this.every);
    const state = copy(this.checkpoints[nearest]);
    for (let index = nearest * this.every; index < count; index += 1) apply(state, this.events[index]);
    return state;
  }
}
