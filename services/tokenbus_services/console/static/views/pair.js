// Two runs side by side: what was asked differently, what each took and cost, and what each said.

import { age, count, ms, shortId, stateName } from "../lib/format.js";
import { html, useEffect, useMemo } from "../lib/html.js";
import { pairHash, runHash } from "../lib/route.js";
import { oneLine, visible } from "../lib/safe_text.js";
import { now, price, river, roles } from "../lib/store.js";
import { useTitle } from "../lib/title.js";
import { differences } from "../run/differences.js";
import { RunFeed } from "../run/feed.js";
import { Blocks } from "./blocks.js";
import { Dialog } from "./dialog.js";
import { NoRun } from "./no_run.js";
import { State } from "./river.js";

const VALUE_CHARACTERS = 400;

export function Pair({ run, other }) {
  useTitle(`${shortId(run)} and ${shortId(other)}`);
  const sides = [useFeed(run), useFeed(other)];
  now.value;
  const problem = sides.find((side) => side.problem.value && side.history.last < 0);
  if (problem) return html`<${NoRun} run=${problem.run} problem=${problem.problem.value} />`;
  if (!sides.every((side) => side.ready.value)) return html`<main id="main" class="blank" tabindex="-1" aria-busy="true"></main>`;
  const states = sides.map((side) => side.history.at(side.history.last));
  return html`
    <main id="main" class="two" tabindex="-1">
      <header class="two-line">
        <h1>Two runs</h1>
        <a href=${pairHash(other, run)}>Exchange the sides</a>
      </header>
      <${FactsOfBoth} sides=${sides} states=${states} />
      <${Asked} requests=${sides.map((side) => side.info.value?.request)} />
      <div class="two-outputs">
        ${sides.map((side, index) => html`
          <section key=${side.run} class="output" aria-label=${`Output of ${side.run}`}>
            ${states[index].blocks.length === 0 && html`<p class="empty">It said nothing.</p>`}
            <${Blocks} blocks=${states[index].blocks} path=${side.path} canSee=${roles.value.has("see_content")} />
          </section>`)}
      </div>
    </main>`;
}

function useFeed(run) {
  const canSee = roles.value.has("see_content");
  const feed = useMemo(() => new RunFeed(run), [run]);
  useEffect(() => {
    feed.start(canSee);
    return () => feed.stop();
  }, [feed]);
  feed.version.value;
  return feed;
}

function FactsOfBoth({ sides, states }) {
  const rows = sides.map((side, index) => facts(states[index], side.info.value?.row));
  return html`
    <section class="card" aria-labelledby="facts-title">
      <h2 id="facts-title">What each was</h2>
      <table class="two-table">
        <thead><tr><th scope="col"><span class="sr">fact</span></th>${sides.map((side) => html`<th key=${side.run} scope="col"><a class="mono" href=${runHash(side.run)}>${oneLine(side.run)}</a></th>`)}</tr></thead>
        <tbody>
          ${rows[0].map(([name, value], index) => html`
            <tr key=${name} class=${value === rows[1][index][1] ? "" : "differs"}><th scope="row">${name}</th>
              ${rows.map((row, nth) => html`<td key=${nth}>${name === "state" ? html`<${State} name=${row[index][1]} />` : oneLine(String(row[index][1]))}</td>`)}</tr>`)}
        </tbody>
      </table>
    </section>`;
}

function facts(state, row) {
  const usage = state.usage ?? row?.usage;
  const timing = state.end?.timing;
  const turns = new Set(state.attempts.map((attempt) => attempt.turn)).size;
  return [
    ["state", state.end?.type ?? row?.state ?? state.phase],
    ["model", `${state.provider}/${state.model}`],
    ["tenant", row?.tenant ?? "–"],
    ["began", row?.started_at ? new Date(row.started_at).toLocaleString() : "–"],
    ["took", timing ? ms(timing.total_ms) : age((row?.ended_at ?? now.value) - (row?.started_at ?? now.value))],
    ["first byte", ms(timing?.first_byte_ms)],
    ["first text", ms(timing?.first_visible_ms)],
    ["turns", count(turns)],
    ["retries", count(Math.max(0, state.attempts.length - turns))],
    ["failed tools", count(state.blocks.filter((block) => block?.kind === "tool_result" && block.is_error).length)],
    ["tokens in", count(usage?.input)],
    ["tokens out", count(usage?.output)],
    ["cost", price(row?.cost) || "–"],
    ["finish", state.end?.finish ?? "–"],
    ["error", state.end?.error?.code ?? "–"],
  ];
}

function Asked({ requests }) {
  const seen = requests.every(Boolean);
  const found = seen ? differences(...requests) : { total: 0, rows: [] };
  return html`
    <section class="card" aria-labelledby="asked-title">
      <h2 id="asked-title">Where the requests differ <small class="mute">${count(found.total)}</small></h2>
      ${!seen && html`<p class="mute">Requests are content: they need the role see_content.</p>`}
      ${seen && found.total === 0 && html`<p class="mute">Nowhere.</p>`}
      ${found.rows.length > 0 && html`<table class="two-table"><tbody>
        ${found.rows.map(({ path, left, right }) => html`<tr key=${path}><th scope="row" class="mono">${oneLine(path)}</th><td>${shown(left)}</td><td>${shown(right)}</td></tr>`)}
      </tbody></table>`}
      ${found.total > found.rows.length && html`<p class="mute">${count(found.total - found.rows.length)} more</p>`}
    </section>`;
}

function shown(text) {
  if (text === undefined) return html`<span class="mute">–</span>`;
  return visible(text.length > VALUE_CHARACTERS ? `${text.slice(0, VALUE_CHARACTERS)}…` : text);
}

/** Asks with which run to compare: those of the river, or any by its id. */
export function ChooseOther({ run, onClose }) {
  const known = [...(river.value?.ended ?? []), ...(river.value?.rows ?? [])].filter((row) => row.run !== run);
  const go = (event) => {
    event.preventDefault();
    const other = new FormData(event.currentTarget).get("other").trim();
    if (other) location.hash = pairHash(run, other);
  };
  return html`
    <${Dialog} title="Compare with another run" wide onClose=${onClose}>
      <form onSubmit=${go}>
        <label>Its id <input name="other" list="other-runs" autocomplete="off" autofocus required /></label>
        <datalist id="other-runs">${known.map((row) => html`<option key=${row.run} value=${row.run}>${`${stateName(row.state)} ${row.provider ?? ""}/${row.model ?? ""}`}</option>`)}</datalist>
        <footer><button class="main">Compare</button></footer>
      </form>
    <//>`;
}
