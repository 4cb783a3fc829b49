// Is the bus well: providers, partitions, queues, lanes, dead letters, keys and spend, and the last hour.

import { get } from "../lib/api.js";
import { age, bytes, count, ms, short } from "../lib/format.js";
import { html, useEffect, useState } from "../lib/html.js";
import { shortcuts } from "../lib/keys.js";
import { oneLine } from "../lib/safe_text.js";
import { health, price, roles } from "../lib/store.js";
import { useTitle } from "../lib/title.js";
import { DeadLetters, loadDead } from "./dead_letters.js";
import { Plots } from "./plots.js";

const MANY_ENTRIES = 1000;
const ERRORS_SHARE = 0.1;
const SILENT_S = 3;
const NO_KEYS = {
  priced: "Spend is counted by key, and this gateway has no keys. The river shows what each run cost.",
  unpriced: "Spend is counted by key, and this gateway has no keys. No price is configured either, so no run has a cost.",
};
const SPEND_MS = 10_000;

export function Health() {
  useTitle("Health");
  useEffect(() => shortcuts({ Escape: () => { location.hash = ""; } }), []);
  const [first, setFirst] = useState(null);
  const admin = roles.value.has("admin");
  useEffect(() => {
    Promise.all([loadDead(), admin ? loadKeys() : null]).then(([dead, keys]) => setFirst({ dead, keys }));
  }, []);
  const data = health.value;
  // Shown once all is there, so that nothing which comes later moves what is there.
  if (!data || !first) return html`<main id="main" class="health" tabindex="-1" aria-busy="true"><h1 class="sr">Health</h1></main>`;
  return html`
    <main id="main" class="health" tabindex="-1">
      <h1 class="sr">Health</h1>
      <${Plots} />
      <div class="cards">
        <div class="column">
          <${Providers} rows=${data?.providers} />
          <${DeadLetters} counts=${data.dead} first=${first.dead} />
          ${admin && html`<${KeysAndSpend} first=${first.keys} />`}
        </div>
        <div class="column">
          <${Partitions} rows=${data?.partitions} />
          <div class="pair">
            <${Queues} rows=${data?.queues} />
            <${Lanes} rows=${data?.lanes} />
          </div>
          <${Workers} rows=${data?.workers} />
        </div>
      </div>
    </main>`;
}

/** A card with a table; `columns` are [title, cell, "num" for numbers]. */
export function Table({ title, note, columns, rows, empty, id }) {
  return html`
    <section class="card" aria-labelledby=${`${id}-title`}>
      <h2 id=${`${id}-title`}>${title}${note && html`<small class="mute">${note}</small>`}</h2>
      ${!rows || rows.length === 0
        ? html`<p class="mute">${rows ? empty : "…"}</p>`
        : html`<div class="scroll" tabindex="0" role="group" aria-label=${title}><table>
            <thead><tr>${columns.map(([name, , kind]) => html`<th scope="col" class=${kind}>${name}</th>`)}</tr></thead>
            <tbody>${rows.map((row, index) => html`<tr key=${index}>${columns.map(([, cell, kind]) => html`<td class=${kind}>${cell(row)}</td>`)}</tr>`)}</tbody>
          </table></div>`}
    </section>`;
}

function Providers({ rows }) {
  const columns = [
    ["provider", (row) => html`<b>${oneLine(row.name)}</b>`],
    ["model", (row) => html`<span class="mono">${oneLine(row.model ?? "")}</span>`],
    ["calls", (row) => count(row.attempts_5m), "num"],
    ["errors", (row) => html`<span class=${row.errors_5m > ERRORS_SHARE * row.attempts_5m && row.errors_5m > 0 ? "bad" : ""}>${count(row.errors_5m)}</span>`, "num"],
    ["429", (row) => html`<span class=${row.limited_5m > 0 ? "warn" : ""}>${count(row.limited_5m)}</span>`, "num"],
    ["first byte p50", (row) => ms(row.first_byte_p50_ms), "num"],
    ["p99", (row) => ms(row.first_byte_p99_ms), "num"],
  ];
  return html`<${Table} id="providers" title="Providers" note="last 5 minutes" columns=${columns} rows=${rows} empty="No provider was called." />`;
}

/** A square for each partition of each stage: who owns it, and how far it lags. */
function Partitions({ rows }) {
  const stages = [...new Set((rows ?? []).map((row) => row.stage))];
  const numbers = [...new Set((rows ?? []).map((row) => row.partition))].sort((one, other) => one - other);
  const find = (stage, partition) => rows.find((row) => row.stage === stage && row.partition === partition);
  return html`
    <section class="card" aria-labelledby="partitions-title">
      <h2 id="partitions-title">Partitions <small class="mute">entries that wait, and the owner</small></h2>
      ${!rows ? html`<p class="mute">…</p>` : html`
        <div class="scroll" tabindex="0" role="group" aria-label="Partitions"><table class="matrix">
          <thead><tr><th scope="col">stage</th>${numbers.map((number) => html`<th scope="col" class="num">${number}</th>`)}</tr></thead>
          <tbody>${stages.map((stage) => html`
            <tr key=${stage}><th scope="row">${stage}</th>
              ${numbers.map((number) => html`<td key=${number}><${Cell} row=${find(stage, number)} /></td>`)}</tr>`)}</tbody>
        </table></div>`}
    </section>`;
}

function Cell({ row }) {
  if (!row) return null;
  const kind = !row.owner ? "none" : row.lag_entries > MANY_ENTRIES ? "late" : row.lag_entries > 0 ? "some" : "calm";
  const owner = row.owner ? oneLine(String(row.owner)) : "no owner";
  return html`<span class=${`cell ${kind}`} title=${`${owner}, ${count(row.lag_entries)} entries, ${bytes(row.lag_bytes)}`}>
    <b>${short(row.lag_entries)}</b><small>${owner.slice(-6)}</small></span>`;
}

function Queues({ rows }) {
  const columns = [
    ["queue", (row) => html`<b>${row.queue}</b>`],
    ["partition", (row) => row.partition ?? "", "num"],
    ["waiting", (row) => count(row.waiting), "num"],
    ["active", (row) => count(row.in_hand), "num"],
  ];
  const busy = rows?.filter((row) => row.waiting > 0 || row.in_hand > 0);
  return html`<${Table} id="queues" title="Queues" note=${rows ? `with work, of ${count(rows.length)}` : ""} columns=${columns} rows=${busy} empty="Nothing waits, nothing is active." />`;
}

function Lanes({ rows }) {
  const columns = [["tenant", (row) => oneLine(row.tenant || "–")], ["waiting", (row) => count(row.waiting), "num"]];
  return html`<${Table} id="lanes" title="Waiting lanes" note="by tenant" columns=${columns} rows=${rows} empty="No tenant waits." />`;
}

function Workers({ rows }) {
  const columns = [
    ["stage", (row) => html`<b>${row.stage}</b>`],
    ["worker", (row) => html`<span class="mono">${oneLine(String(row.worker))}</span>`],
    ["last seen", (row) => html`<span class=${row.age_s > SILENT_S ? "bad" : ""}>${age(row.age_s * 1000)} ago</span>`, "num"],
  ];
  return html`<${Table} id="workers" title="Workers" columns=${columns} rows=${rows} empty="No worker is seen." />`;
}

async function loadKeys() {
  const [keys, spend] = await Promise.allSettled([get("/keys"), get("/spend")]);
  return { keys: keys.value?.keys ?? null, spend: spend.value?.spend ?? null, prices: spend.value?.prices ?? null };
}

/** Keys and what they spent, for admins. Fields are shown as they come: there is no secret among them. */
function KeysAndSpend({ first }) {
  const [{ keys, spend, prices }, setFound] = useState(first);
  useEffect(() => {
    let gone = false;
    const timer = setInterval(async () => {
      if (document.hidden) return;
      const found = await loadKeys();
      if (!gone) setFound((before) => ({ keys: found.keys ?? before.keys, spend: found.spend ?? before.spend, prices: found.prices ?? before.prices }));
    }, SPEND_MS);
    return () => {
      gone = true;
      clearInterval(timer);
    };
  }, []);
  const keyColumns = [
    ["key", (row) => html`<span class="mono">${oneLine(row.id ?? "")}</span>`],
    ["name", (row) => oneLine(row.name ?? "")],
    ["tenant", (row) => oneLine(row.tenant ?? "")],
    ["console", (row) => (row.console ?? []).join(" ")],
    ["state", (row) => html`<span class=${row.revoked ? "bad" : row.blocked ? "warn" : ""}>${row.state}</span>`],
  ];
  const spendColumns = [
    ["key", (row) => html`<span class="mono">${oneLine(row.key)}</span>`],
    ["runs", (row) => count(row.runs), "num"],
    ["period", (row) => row.period],
    ["spent", (row) => price(row.spent), "num"],
    ["budget", (row) => price(row.budget), "num"],
  ];
  return html`
    <${Table} id="keys" title="Keys" columns=${keyColumns} rows=${keys} empty="This gateway has no keys." />
    <${Table} id="spend" title="Spend" columns=${spendColumns} rows=${spend} empty=${NO_KEYS[prices > 0 ? "priced" : "unpriced"]} />`;
}
