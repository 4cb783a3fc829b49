// A text that grows. It is one text node: what is new is appended to it, what is on the screen is not drawn again.

import { count } from "../lib/format.js";
import { html, useLayoutEffect, useRef, useState } from "../lib/html.js";
import { visible, windowOf } from "../lib/safe_text.js";

const PAGE = 24_000;

/** Model output. Its controls are shown, its direction is its own, and of a long one a part is drawn. */
export function GrowingText({ text, className = "", label }) {
  const [from, setFrom] = useState(null);
  const box = useRef(null);
  const shown = windowOf(text, { from });
  const safe = visible(shown.text);

  useLayoutEffect(() => {
    let node = box.current.firstChild;
    if (!node) {
      node = document.createTextNode(safe);
      box.current.append(node);
    } else if (safe.startsWith(node.data)) {
      if (safe.length > node.data.length) node.appendData(safe.slice(node.data.length));
    } else {
      node.data = safe;
    }
  }, [safe]);

  return html`
    ${shown.before > 0 && html`
      <p class="cut">${count(shown.before)} characters before
        <button onClick=${() => setFrom(Math.max(0, shown.before - PAGE))}>Earlier</button>
        <button onClick=${() => setFrom(0)}>Beginning</button></p>`}
    <div ref=${box} class=${`model-text ${className}`} dir="auto" aria-label=${label}></div>
    ${shown.after > 0 && html`
      <p class="cut">${count(shown.after)} characters after
        <button onClick=${() => setFrom(from + shown.text.length)}>Later</button>
        <button onClick=${() => setFrom(null)}>End</button></p>`}`;
}
