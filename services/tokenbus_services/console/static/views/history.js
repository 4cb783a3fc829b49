// All runs that the bus lists, however long ago they ended: found by words, metadata, time, and how they ended.

import { get } from "../lib/api.js";
import { useFilters } from "../lib/filters.js";
import { age, ENDED_STATES, localTime, short } from "../lib/format.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { historyHash, pairHash, runHash } from "../lib/route.js";
import { oneLine } from "../lib/safe_text.js";
import { price, replaceHash, roles, route, session } from "../lib/store.js";
import { useTitle } from "../lib/title.js";
import { State } from "./river.js";

export function History() {
  useTitle("History");
  const filters = route.value.historyFilters;
  const query = new URLSearchParams(filters).toString();
  const [pages, setPages] = useState(null);
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const [chosen, setChosen] = useState([]);
  const asked = useRef("");

  const load = async (before) => {
    const last = before[before.length - 1];
    asked.current = query;
    setBusy(true);
    try {
      const found = await get(`/history?${new URLSearchParams({ ...filters, ...(last ? { after: last.next } : {}) })}`);
      if (asked.current !== query) return;
      setPages([...before, found]);
      setProblem("");
    } catch (error) {
      if (asked.current === query) setProblem(error.message);
    } finally {
      if (asked.current === query) setBusy(false);
    }
  };
  useEffect(() => {
    setPages(null);
    setChosen([]);
    load([]);
  }, [query]);

  const last = pages?.[pages.length - 1];
  const rows = (pages ?? []).flatMap((page) => page.rows);
  const choose = (run) => setChosen(chosen.includes(run) ? chosen.filter((one) => one !== run) : [...chosen, run].slice(-2));
  return html`
    <main id="main" class="river history" tabindex="-1" aria-busy=${pages ? undefined : "true"}>
      <h1 class="sr">History</h1>
      <${Filters} key=${session.value?.tenant ?? ""} filters=${filters} />
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      ${pages && html`<section aria-labelledby="history-title">
        <h2 id="history-title">Runs, the newest first
          ${last.back_to_ms && html`<small>looked back to ${new Date(last.back_to_ms).toLocaleString()}</small>`}
          <span class="grow"></span>
          <button class="small" disabled=${chosen.length !== 2} onClick=${() => { location.hash = pairHash(...chosen); }}>Compare two</button></h2>
        ${rows.length === 0 && html`<p class="empty">${last.next ? "Nothing matches so far." : "No run matches."}</p>`}
        <ol>${rows.map((row) => html`<${Line} key=${row.info.run} row=${row} chosen=${chosen.includes(row.info.run)} onChoose=${choose} />`)}</ol>
        ${last.next && html`<p class="cut"><button disabled=${busy} onClick=${() => load(pages)}>Look further back</button></p>`}
      </section>`}
    </main>`;
}

function Line({ row, chosen, onChoose }) {
  const { info } = row;
  const metadata = Object.entries(row.metadata ?? {}).map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`);
  const took = info.ended_ms ? age(info.ended_ms - info.accepted_ms) : "";
  return html`
    <li class="past" data-run=${info.run}>
      <input type="checkbox" aria-label=${`Compare ${info.run}`} checked=${chosen} onChange=${() => onChoose(info.run)} />
      <a class="line" href=${runHash(info.run)}>
        <span class="state"><${State} name=${info.state} /></span>
        <span class="when">${new Date(info.ended_ms ?? info.accepted_ms).toLocaleString()}</span>
        <span class="age" title="took">${took}</span>
        <span class="model"><i>${oneLine(info.provider ?? "?")}</i><s>/</s>${oneLine(info.model ?? "?")}</span>
        <span class="tenant">${oneLine(info.tenant ?? "")}</span>
        <span class="rate" title="tokens in and out">${row.usage ? short((row.usage.input ?? 0) + (row.usage.output ?? 0)) : ""}</span>
        <span class="last">${price(row.cost)}</span>
        <span class="words">${info.error ? html`<code class="code">${oneLine(info.error)}</code>` : html`<span class="finish">${info.finish ?? ""}</span>`}
          <bdi class="head">${roles.value.has("see_content") ? oneLine([row.begins ?? "", ...metadata].join("  ")) : html`<span class="mute">hidden</span>`}</bdi></span>
      </a>
    </li>`;
}

function Filters({ filters }) {
  const { put, field } = useFilters(filters, (typed) => replaceHash(historyHash({ ...route.value.historyFilters, ...typed })));
  const time = (name) => html`
    <label class="time"><span>${name}</span>
      <input type="datetime-local" step="1" value=${localTime(filters[name])} data-set=${filters[name] ? "yes" : undefined}
        onChange=${(event) => put(name, event.target.value && String(new Date(event.target.value).getTime()))} /></label>`;
  return html`
    <div class="filters" role="search">
      ${roles.value.has("see_content") && field("words", "Words of question or answer")}
      ${roles.value.has("see_content") && field("metadata", "Metadata, as name=value")}
      ${field("q", "Run, model, finish or error")}
      ${!session.value?.tenant && field("tenant", "Tenant")}
      <label class="choice"><span class="sr">State</span>
        <select value=${filters.state ?? ""} onChange=${(event) => put("state", event.target.value)} data-set=${filters.state ? "yes" : undefined}>
          <option value="">any state</option><option value="open">open</option>${ENDED_STATES.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select></label>
      ${time("since")}${time("until")}
    </div>`;
}
