// Turns, attempts, tools and policies as bars. SVG, for a style attribute would need a looser policy of the page.

import { ms } from "../lib/format.js";
import { html, useState } from "../lib/html.js";
import { oneLine } from "../lib/safe_text.js";
import { spansOf } from "../run/spans.js";
import { Compare, repeatedTurns } from "./compare.js";

const AT_MOST = 200;

export function Timeline({ state, decisions, now, onSeek }) {
  const [comparing, setComparing] = useState(false);
  const { timed, total_ms: total, rows } = spansOf(state, decisions ?? [], now);
  const shown = rows.slice(-AT_MOST);
  return html`
    <section class="card timeline" aria-labelledby="timeline-title">
      <h2 id="timeline-title">Timeline <small class="mute">${timed ? ms(total) : "by events"}</small><span class="grow"></span>
        ${repeatedTurns(state).length > 0 && html`<button class="small" onClick=${() => setComparing(true)}>Compare attempts</button>`}</h2>
      ${comparing && html`<${Compare} state=${state} onClose=${() => setComparing(false)} />`}
      ${rows.length > shown.length && html`<p class="mute">${rows.length - shown.length} rows before</p>`}
      <ol>
        ${shown.map((row, index) => html`
          <li key=${index} class=${`row o-${row.outcome} t-${row.type}`}>
            <button class="name" onClick=${() => onSeek(row.seq)} title=${row.detail ? oneLine(row.detail) : undefined}>${oneLine(row.name)}</button>
            <span key=${row.ms === null ? "" : ms(row.ms)} class="took">${row.ms === null ? "" : ms(row.ms)}</span>
            <svg class="bars" viewBox="0 0 1000 12" preserveAspectRatio="none" aria-hidden="true">
              ${row.bars.map((bar) => html`<rect class=${`bar b-${bar.kind} s-${bar.status ?? ""}`} x=${bar.from * 1000} width=${Math.max(3, (bar.to - bar.from) * 1000)} y="1" height="10"><title>${bar.label}</title></rect>`)}
            </svg>
            ${row.error && html`<p class="why"><code>${oneLine(row.error.code ?? "")}</code> ${oneLine(row.error.message ?? "")}${row.delay_ms ? html`<span class="mute"> · next in ${ms(row.delay_ms)}</span>` : ""}</p>`}
            ${row.type === "policy" && html`<p class="why"><b>${row.outcome}</b> ${row.detail ? oneLine(row.detail) : ""}</p>`}
          </li>`)}
      </ol>
    </section>`;
}
