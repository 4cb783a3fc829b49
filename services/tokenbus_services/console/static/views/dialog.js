// Questions and texts above the page. The browser's own dialog keeps the focus inside, and gives it back.

import { html, useEffect, useRef } from "../lib/html.js";

export function Dialog({ title, onClose, children, wide }) {
  const box = useRef(null);
  useEffect(() => {
    box.current.showModal();
  }, []);
  return html`
    <dialog ref=${box} class=${wide ? "wide" : ""} aria-label=${title} onClose=${onClose}>
      <header>
        <h2>${title}</h2>
        <button class="icon" aria-label="Close" onClick=${() => box.current.close()}>✕</button>
      </header>
      ${children}
    </dialog>`;
}

/** A question before something that cannot be taken back. */
export function Ask({ title, children, yes, onYes, onClose }) {
  const act = () => {
    onClose();
    onYes();
  };
  return html`
    <${Dialog} title=${title} onClose=${onClose}>
      ${children}
      <footer>
        <button autofocus onClick=${onClose}>No</button>
        <button class="danger" onClick=${act}>${yes}</button>
      </footer>
    <//>`;
}

/** Copy a text; where the browser refuses, as outside of HTTPS and loopback, give it to be copied by hand. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
