// What a model wrote, as text that cannot act: controls become their pictures, and what would reorder or hide other
// text becomes its code point. The page adds it as text nodes only. Pure.

const ACTS = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f" + // controls but tab and newline
    "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069" + // marks, embeddings, overrides and isolates of direction
    "\\u200b\\u2028\\u2029\\u2060-\\u2064\\u206a-\\u206f\\ufeff\\ufff9-\\ufffb" + // invisible ones
    "\\u{e0000}-\\u{e007f}\\ud800-\\udfff]", // tags that hide a second text; halves of characters
  "gu",
);

export function visible(text) {
  return text.replaceAll("\r\n", "\n").replace(ACTS, picture);
}

/** The same on one line. */
export function oneLine(text) {
  return visible(text).replaceAll("\n", "⏎").replaceAll("\t", " ");
}

/** JSON on one line that says the same, with what would act written as escapes: what is read is what counts. */
export function visibleJson(text) {
  return text.replace(ACTS, (character) => Array.from({ length: character.length }, (_, at) => `\\u${character.charCodeAt(at).toString(16).padStart(4, "0")}`).join(""));
}

function picture(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

const STEP = 8000;

/** The part of a long text that is drawn: its end while it grows. `from` moves in steps, so text that is on the screen
 * stays where it is. */
export function windowOf(text, { characters = 24000, lines = 600, from = null } = {}) {
  let start = from ?? Math.max(0, Math.ceil((text.length - characters) / STEP) * STEP);
  let stop = Math.min(text.length, start + characters);
  if (from === null) {
    stop = text.length;
    let seen = 0;
    for (let index = text.length - 1; index >= start; index -= 1) {
      if (text.charCodeAt(index) === 10 && (seen += 1) >= lines) {
        start = index + 1;
        break;
      }
    }
  } else {
    let seen = 0;
    for (let index = start; index < stop; index += 1) {
      if (text.charCodeAt(index) === 10 && (seen += 1) >= lines) {
        stop = index + 1;
        break;
      }
    }
  }
  return { text: text.slice(start, stop), before: start, after: text.length - stop };
}
