/** Elements of a JSON text while it is written, as Python's `tokenbus.shaping`: each value at a path, once it is complete. */

import { Malformed, TooLarge } from "./errors.js";
import type { PublicEvent } from "./types.js";

export interface ElementBounds {
  /** Characters of a value at the path, a number or a name. Default 1,048,576. */
  mostCharacters?: number;
  /** Of arrays and objects. Default 128. */
  mostDepth?: number;
}

/** A complete value of a JSON text. */
export interface Element {
  /** Names of fields, and places in arrays from 0. */
  path: (string | number)[];
  value: unknown;
}

/** A complete value of a run's answer. */
export interface RunElement extends Element {
  /** Counts the run's elements from 0. */
  number: number;
  /** Of the chunk that completed it. */
  seq: number;
  turn: number;
  /** With `on_failure` `restart` a text may be void: its elements come again, of a higher attempt. */
  attempt: number;
}

interface Container {
  isObject: boolean;
  onPath: boolean;
  at: string | number;
  names: Set<string>;
}

type State = "value" | "first value" | "name" | "first name" | "colon" | "comma" | "string" | "name string" | "word" | "end";

const BLANK = " \t\n\r";
const WORD = /^[-+.0-9A-Za-z]$/;
const SCALAR = /^(?:true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)$/;

/** Reads one JSON text: call `feed` with its pieces, then `end`. Each value is given by the piece that completes it. */
export class JsonElements {
  readonly #path: readonly string[];
  readonly #mostCharacters: number;
  readonly #mostDepth: number;
  #state: State = "value";
  readonly #open: Container[] = [];
  /** What is kept until it is complete: a value at the path, or a name. */
  #kept: "value" | "name" | undefined;
  #pieces: string[] = [];
  /** How many containers were open where the value at the path began. */
  #depth = 0;
  /** In a string: after a backslash, then the hex digits that are still to come. */
  #escape = 0;
  #word = "";
  #error: Malformed | TooLarge | undefined;

  /** `path`: steps with dots between, or an array: names, places in arrays, or `*` for each; empty: the whole. */
  constructor(path: string | readonly string[] = "*", { mostCharacters = 2 ** 20, mostDepth = 128 }: ElementBounds = {}) {
    this.#path = typeof path === "string" ? (path ? path.split(".") : []) : path;
    [this.#mostCharacters, this.#mostDepth] = [mostCharacters, mostDepth];
  }

  /** The values that this completes. Those before a fault come first. Throws Malformed, TooLarge. */
  feed(text: string): Element[] {
    if (this.#error) throw this.#error;
    const out: Element[] = [];
    try {
      for (const character of text) this.#read(character, out);
    } catch (error) {
      if (!(error instanceof Malformed || error instanceof TooLarge)) throw error;
      this.#error = error;
      if (out.length === 0) throw error;
    }
    return out;
  }

  /** The value that only the end completes: a number that is the whole text. Throws as `feed`, also if the text ends early. */
  end(): Element[] {
    const out = this.feed("\n");
    if (this.#state !== "end") throw this.#error ?? new Malformed(this.#where, "the text ends early");
    return out;
  }

  #read(character: string, out: Element[]): void {
    if (this.#state === "string" || this.#state === "name string") return this.#inString(character, out);
    if (this.#state === "word") {
      if (WORD.test(character)) return this.#keep(character);
      this.#complete(out, true);
    }
    if (BLANK.includes(character)) {
      if (this.#kept === "value") this.#keep(character);
      return;
    }
    const last = this.#open.at(-1);
    switch (this.#state) {
      case "value":
      case "first value":
        if (character === "]" && this.#state === "first value") return this.#close(character, out);
        return this.#begin(character, last);
      case "name":
      case "first name":
        if (character === "}" && this.#state === "first name") return this.#close(character, out);
        if (character !== '"') break;
        this.#state = "name string";
        if (last?.onPath) this.#kept = "name";
        return this.#keep(character);
      case "colon":
        if (character !== ":") break;
        this.#state = "value";
        return this.#keep(character);
      case "comma":
        if (last && character === (last.isObject ? "}" : "]")) return this.#close(character, out);
        if (character !== "," || !last) break;
        this.#state = last.isObject ? "name" : "value";
        if (typeof last.at === "number") last.at++;
        return this.#keep(character);
    }
    throw new Malformed(this.#where, `${JSON.stringify(character)} is not expected`);
  }

  /** A value begins. */
  #begin(character: string, parent: Container | undefined): void {
    const depth = this.#open.length;
    const step = this.#path[depth - 1];
    const onPath = this.#kept === undefined && (!parent || (parent.onPath && (step === "*" || step === String(parent.at))));
    const wanted = onPath && depth === this.#path.length;
    if (wanted) [this.#kept, this.#depth] = ["value", depth];
    if (character === "[" || character === "{") {
      if (depth + 1 > this.#mostDepth) throw new TooLarge(this.#where, depth + 1, this.#mostDepth, "levels");
      const isObject = character === "{";
      this.#open.push({ isObject, onPath: onPath && !wanted, at: isObject ? "" : 0, names: new Set() });
      this.#state = isObject ? "first name" : "first value";
    } else if (character === '"') {
      this.#state = "string";
    } else if (WORD.test(character)) {
      this.#state = "word";
      this.#word = "";
    } else {
      throw new Malformed(this.#where, `${JSON.stringify(character)} is not expected`);
    }
    this.#keep(character);
  }

  #inString(character: string, out: Element[]): void {
    this.#keep(character);
    if (this.#escape > 0) {
      const valid = this.#escape === 1 ? '"\\/bfnrtu'.includes(character) : /[0-9a-fA-F]/.test(character);
      if (!valid) throw new Malformed(this.#where, "a string with an unknown escape");
      this.#escape = this.#escape === 1 ? (character === "u" ? 5 : 0) : this.#escape === 2 ? 0 : this.#escape - 1;
    } else if (character === "\\") {
      this.#escape = 1;
    } else if (character < " ") {
      throw new Malformed(this.#where, "a string with a control character");
    } else if (character === '"') {
      if (this.#state === "string") return this.#complete(out, false);
      this.#state = "colon";
      if (this.#kept === "name") this.#named();
    }
  }

  #named(): void {
    const parent = this.#open.at(-1);
    const name = JSON.parse(this.#taken()) as string;
    if (!parent) return;
    parent.at = name;
    if (parent.names.has(name)) throw new Malformed(this.#where, "the field is there twice");
    parent.names.add(name);
  }

  #close(character: string, out: Element[]): void {
    this.#open.pop();
    this.#keep(character);
    this.#complete(out, false);
  }

  #complete(out: Element[], word: boolean): void {
    if (word && !SCALAR.test(this.#word)) throw new Malformed(this.#where, `${JSON.stringify(this.#word.slice(0, 40))} is no number and no literal`);
    this.#state = this.#open.length > 0 ? "comma" : "end";
    if (this.#kept === "value" && this.#open.length === this.#depth) out.push({ path: this.#open.map(({ at }) => at), value: JSON.parse(this.#taken()) });
  }

  #keep(character: string): void {
    if (this.#state === "word") {
      this.#word += character;
      if (this.#word.length > this.#mostCharacters) throw new TooLarge(this.#where, this.#word.length, this.#mostCharacters, "characters");
    }
    if (!this.#kept) return;
    this.#pieces.push(character);
    if (this.#pieces.length > this.#mostCharacters) throw new TooLarge(this.#where, this.#pieces.length, this.#mostCharacters, "characters");
  }

  #taken(): string {
    const whole = this.#pieces.join("");
    this.#pieces = [];
    this.#kept = undefined;
    return whole;
  }

  get #where(): string {
    return `the JSON at ${this.#open.slice(0, 8).map(({ at }) => String(at).slice(0, 40)).join(".") || "its beginning"}`;
  }
}

/** Reads the answer of a run from its events, all of them in order: its JSON is the text of its last turn. */
export class RunElements {
  #text: JsonElements;
  /** The last block of the turn's text. */
  #block = -1;
  #turn = 0;
  #number = 0;
  #problem: unknown;

  constructor(readonly path: string | readonly string[], readonly bounds: ElementBounds) {
    this.#text = new JsonElements(path, bounds);
  }

  /** The values that this completes. Throws Malformed, TooLarge with the end of the run: an earlier turn may be anything. */
  add(event: PublicEvent): RunElement[] {
    if (event.turn !== this.#turn) {
      this.#turn = event.turn;
      this.#begin();
    }
    if (event.type === "chunk" && event.kind === "text") {
      this.#block = event.block;
      return this.#read(event, event.text);
    }
    if ((event.type === "retrying" || event.type === "restarted") && event.drop_from <= this.#block) this.#begin();
    if (event.type !== "completed") return [];
    const found = this.#read(event, undefined);
    if (this.#problem) throw this.#problem;
    return found;
  }

  #begin(): void {
    this.#text = new JsonElements(this.path, this.bounds);
    this.#block = -1;
    this.#problem = undefined;
  }

  #read({ seq, turn, attempt }: PublicEvent, text: string | undefined): RunElement[] {
    if (this.#problem) return [];
    try {
      const found = text === undefined ? this.#text.end() : this.#text.feed(text);
      return found.map((element) => ({ ...element, number: this.#number++, seq, turn, attempt }));
    } catch (error) {
      this.#problem = error;
      return [];
    }
  }
}
