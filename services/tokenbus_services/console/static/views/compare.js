// The attempts of a turn side by side: what was discarded, and what replaced or continued it.

import { ms } from "../lib/format.js";
import { html } from "../lib/html.js";
import { oneLine } from "../lib/safe_text.js";
import { Dialog } from "./dialog.js";
import { GrowingText } from "./growing_text.js";

const FATES = { retried: "discarded", restarted: "discarded", continued: "continued by the next" };
const AT_MOST = 12;

/** Turns that took more than one attempt, each with its attempts. */
export function repeatedTurns(state) {
  const turns = new Map();
  for (const attempt of state.attempts) turns.set(attempt.turn, [...(turns.get(attempt.turn) ?? []), attempt]);
  return [...turns].filter(([, attempts]) => attempts.length > 1);
}

export function Compare({ state, onClose }) {
  return html`
    <${Dialog} title="Attempts side by side" wide onClose=${onClose}>
      ${repeatedTurns(state).map(([turn, attempts]) => html`
        <section key=${turn} aria-labelledby=${`turn-${turn}`}>
          <h3 id=${`turn-${turn}`}>Turn ${turn + 1}${attempts.length > AT_MOST && html` <small class="mute">its last ${AT_MOST} attempts</small>`}</h3>
          <div class="attempts" tabindex="0" role="group" aria-label=${`Attempts of turn ${turn + 1}`}>
            ${attempts.map((attempt, index) => [attempt, index + 1]).slice(-AT_MOST).map(([attempt, nth]) => html`<${Attempt} key=${attempt.attempt} nth=${nth} attempt=${attempt} blocks=${state.blocks} />`)}
          </div>
        </section>`)}
    <//>`;
}

function Attempt({ nth, attempt, blocks }) {
  const own = blocks.filter((block) => block?.attempt === attempt.attempt && block.kind !== "tool_result");
  const fate = FATES[attempt.outcome] ?? "kept";
  const took = attempt.start_at !== null && attempt.end_at !== null ? ms(attempt.end_at - attempt.start_at) : "";
  return html`
    <article class=${`attempt f-${fate.split(" ")[0]}`}>
      <header><b>try ${nth}</b> <span class="fate">${fate}</span> <span class="mute">${took}</span></header>
      <p class="mute mono">${oneLine(`${attempt.provider}/${attempt.answered_by ?? attempt.model}`)}</p>
      ${attempt.error && html`<p class="bad"><code>${oneLine(attempt.error.code ?? "")}</code> ${oneLine(attempt.error.message ?? "")}</p>`}
      ${own.length === 0 && html`<p class="mute">It said nothing.</p>`}
      ${own.map((block) => html`
        <div key=${block.block}>
          <h4>${block.kind.replace("_", " ")}${block.tool_name ? ` ${oneLine(block.tool_name)}` : ""}${block.status === "void" && html` <span class="void">void</span>`}</h4>
          ${block.hidden > 0 ? html`<p class="mute">${block.hidden} characters, hidden</p>` : html`<${GrowingText} text=${block.text} className=${block.kind === "tool_call" ? "mono" : ""} />`}
        </div>`)}
    </article>`;
}
