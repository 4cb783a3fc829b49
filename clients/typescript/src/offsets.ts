/** How far the entries of one partition are done: they are given in order, and done in any order. */
export class Offsets {
  /** How many entries `position` has passed since this was last set to 0. */
  count = 0;
  /** How many are given and not done. */
  open = 0;
  readonly #given = new Map<string, boolean>();

  /** `position`: the last entry up to which all are done. */
  constructor(public position: string) {}

  give(id: string): void {
    this.#given.set(id, false);
    this.open++;
  }

  done(id: string): void {
    if (this.#given.get(id) !== false) return;
    this.open--;
    this.pass(id);
  }

  /** What comes next stands behind this, once all that was given before is done. */
  pass(id: string): void {
    this.#given.set(id, true);
    for (const [first, done] of this.#given) {
      if (!done) return;
      this.position = first;
      this.count++;
      this.#given.delete(first);
    }
  }
}

/** An event, and what says that it is done. */
export interface Delivered<E> {
  event: E;
  done: () => void;
}
