/**
 * Splits streamed text into sentences for speech, as Python's `tokenbus.shaping` does: the sentences concatenate to the
 * exact text, and how the text was cut into pieces changes nothing.
 */

import { InvalidArgument } from "./errors.js";
import { BEFORE_NUMBER, GOES_ON } from "./generated.js";

export interface SentenceRules {
  /** A language tag (`de`, `en-GB`). Left out or unknown: the abbreviations of all languages apply. */
  language?: string;
  /** Characters. A shorter sentence is joined with the next one. A wide character counts twice. Default 8. */
  least?: number;
  /** Characters. A longer sentence is split. Default 300. */
  most?: number;
}

/** So many characters beyond `most` decide where a sentence ends. */
const AHEAD = 64;
const WIDE_STOPS = "。！？｡";
const END = /(?<stop>[.!?…‽؟۔।॥።։。！？｡]+)(?<close>["'”’»›)\]}」』）】》*_]*)(?<blank>\s*)|(?<line>\s*\n\s*)/gu;
const CLAUSE = /[,;:—–、，；：][”"')\]]*\s+|[、，；：]|\s[—–]\s/gu;
const BLANK = /\s+/gu;
const WORDS = /^\s*\S[^]*\s/u;
const WORD = /[^\s"“«([{]*$/u;
const LETTER = /^[a-zA-Z\u00c0-\u024f\u0400-\u04ff]$/u;
const MARKER = /(?:^|\n)[ \t]*(?:\p{Nd}{1,3}|\p{L})$/u;
const WIDE = new RegExp(
  "[\\u1100-\\u115f\\u2e80-\\u303e\\u3041-\\u33ff\\u3400-\\u4dbf\\u4e00-\\u9fff\\ua000-\\ua4cf\\ua960-\\ua97c\\uac00-\\ud7a3\\uf900-\\ufaff" +
    "\\ufe10-\\ufe19\\ufe30-\\ufe6f\\uff01-\\uff60\\uffe0-\\uffe6\\u{20000}-\\u{3fffd}\\p{Emoji_Presentation}]",
  "u",
);
const COMBINES = /[\p{M}\u200d\ufe0f]/u;

export class SentenceCutter {
  readonly #least: number;
  readonly #most: number;
  readonly #goesOn: ReadonlySet<string>;
  readonly #ordinals: boolean;
  #held: string[] = [];
  #lineStart = true;

  /** Throws InvalidArgument. */
  constructor({ language = "", least = 8, most = 300 }: SentenceRules = {}) {
    if (!(0 <= least && least <= most && most >= 1)) throw new InvalidArgument(`least ${least}, most ${most}: 0 <= least <= most and most >= 1 are required`);
    const all: Record<string, readonly string[]> = GOES_ON;
    this.#goesOn = new Set(all[language.split("-")[0]?.toLowerCase() ?? ""] ?? Object.values(all).flat());
    this.#ordinals = language.toLowerCase().startsWith("de");
    [this.#least, this.#most] = [least, most];
  }

  /** Whether text was fed that was not returned yet. */
  get holds(): boolean {
    return this.#held.length > 0;
  }

  /** Add text; the sentences that are complete. */
  feed(text: string): string[] {
    this.#held.push(...text);
    return this.#taken(false);
  }

  /** The held text up to its last whitespace, for a caller that cannot wait longer. */
  release(): string[] {
    const words = WORDS.exec(this.#held.join(""))?.[0];
    return words ? [this.#cut([...words].length)] : [];
  }

  /** The rest. A new text may follow. */
  end(): string[] {
    const rest = this.#taken(true);
    if (this.#held.length > 0) rest.push(this.#cut(this.#held.length));
    this.#lineStart = true;
    return rest;
  }

  #taken(ended: boolean): string[] {
    const sentences: string[] = [];
    const window = this.#most + AHEAD;
    while (this.#held.length > 0) {
      const characters = this.#held.slice(0, window); // always the same ones, however much has arrived
      const whole = characters.length === window;
      let end = this.#firstEnd(characters.join(""), ended || whole);
      if (end === undefined && (whole || (ended && characters.length > this.#most))) end = forced(characters, this.#most);
      if (end === undefined) break;
      sentences.push(this.#cut(end));
    }
    return sentences;
  }

  #cut(end: number): string {
    const sentence = this.#held.splice(0, end).join("");
    this.#lineStart = sentence.slice(sentence.trimEnd().length).includes("\n");
    return sentence;
  }

  /** Where the first sentence ends, in characters; undefined while that is open. */
  #firstEnd(text: string, ended: boolean): number | undefined {
    for (const found of text.matchAll(END)) {
      const [start, end] = [found.index, found.index + found[0].length];
      if (end === text.length) return ended && length(text.slice(0, start)) < this.#most ? length(text) : undefined;
      if (length(text.slice(0, start)) >= this.#most) return undefined;
      if (this.#isEnd(text, found, end) && width(text.slice(0, end).trim()) >= Math.max(1, this.#least)) return length(text.slice(0, end));
    }
    return undefined;
  }

  #isEnd(text: string, found: RegExpExecArray, end: number): boolean {
    const { stop = "", close = "", blank = "", line } = found.groups ?? {};
    const before = text.slice(0, found.index);
    const marker = (): boolean => stop === "." && MARKER.test(((this.#lineStart ? "\n" : " ") + before).slice(-9));
    if (line || blank.includes("\n")) return !stop.startsWith(".") || !marker();
    const following = String.fromCodePoint(text.codePointAt(end) ?? 0);
    if (!blank) return WIDE_STOPS.includes(stop.at(-1) ?? "-") && !(close && "とっ".includes(following));
    if (/^\p{Lowercase}$/u.test(following)) return false;
    if (stop !== "." || close) return true;
    const word = (WORD.exec(before.slice(-32))?.[0] ?? "").replace(/^['‘]+/u, "");
    if (marker() || this.#goesOn.has(word.toLowerCase())) return false;
    const digit = /^\p{Nd}$/u.test(following);
    if (digit && (BEFORE_NUMBER as readonly string[]).includes(word.toLowerCase())) return false;
    if (this.#ordinals && /^\p{Nd}{1,2}$/u.test(word)) return false;
    return word === "I" || !LETTER.test(word);
  }
}

/** Where to split a text that is too long: after a clause in its second half, else after a word, else between characters. */
function forced(characters: string[], most: number): number {
  const text = characters.slice(0, most).join("");
  for (const [kind, least] of [[CLAUSE, Math.floor(most / 2)], [BLANK, 1]] as const) {
    const ends = [...text.matchAll(kind)].map((found) => text.slice(0, found.index + found[0].length)).filter((part) => length(part) >= least && part.trim());
    const last = ends.at(-1);
    if (last !== undefined) return length(last);
  }
  let end = most;
  while (end > 1 && (COMBINES.test(characters[end] ?? "") || characters[end - 1] === "\u200d")) end--;
  return end > 1 ? end : most;
}

function length(text: string): number {
  return [...text].length;
}

function width(text: string): number {
  return [...text].reduce((sum, one) => sum + (WIDE.test(one) ? 2 : 1), 0);
}
