import { html } from "../lib/html.js";
import { Dialog } from "./dialog.js";

const KEYS = [
  ["/", "search"],
  ["j  k", "next and previous line"],
  ["Enter", "open the run"],
  ["Esc", "back to the river; leave the search"],
  ["←  →", "in a run: one event back or on"],
  ["l", "in a run: live again"],
  ["?", "this list"],
];

export function Help({ onClose }) {
  return html`
    <${Dialog} title="Keys" onClose=${onClose}>
      <dl class="keys">
        ${KEYS.map(([keys, what]) => html`<dt>${keys.split("  ").map((key) => html`<kbd>${key}</kbd> `)}</dt><dd>${what}</dd>`)}
      </dl>
    <//>`;
}
