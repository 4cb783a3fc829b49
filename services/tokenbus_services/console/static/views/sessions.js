// Sessions by their last event, found by words, tenant, metadata and age.

import { get } from "../lib/api.js";
import { useFilters } from "../lib/filters.js";
import { age, count, plural } from "../lib/format.js";
import { html, useEffect, useState } from "../lib/html.js";
import { sessionHash, sessionsHash } from "../lib/route.js";
import { oneLine } from "../lib/safe_text.js";
import { replaceHash, roles, route, session } from "../lib/store.js";
import { useTitle } from "../lib/title.js";

const EVERY_MS = 3000;
const AGES = [["", "any age"], ["3600", "quiet for an hour"], ["86400", "quiet for a day"], ["604800", "quiet for a week"]];

export function Sessions() {
  useTitle("Sessions");
  const filters = route.value.sessionFilters;
  const query = new URLSearchParams(filters).toString();
  const [page, setPage] = useState(null);
  const [more, setMore] = useState([]);
  const [problem, setProblem] = useState("");

  useEffect(() => {
    let gone = false;
    const load = async () => {
      if (document.hidden) return;
      try {
        const found = await get(`/sessions?${query}`);
        if (gone) return;
        setPage(found);
        setProblem("");
      } catch (error) {
        if (!gone) setProblem(error.message);
      }
    };
    setMore([]);
    load();
    const timer = setInterval(load, EVERY_MS);
    return () => {
      gone = true;
      clearInterval(timer);
    };
  }, [query]);

  const last = more[more.length - 1] ?? page;
  const next = async () => {
    try {
      const found = await get(`/sessions?${new URLSearchParams({ ...filters, after: last.next })}`);
      setMore([...more, found]);
    } catch (error) {
      setProblem(error.message);
    }
  };
  const rows = new Map();
  for (const each of page ? [page, ...more] : []) {
    for (const row of each.sessions) if (!rows.has(keyOf(row))) rows.set(keyOf(row), row);
  }
  return html`
    <main id="main" class="river sessions" tabindex="-1" aria-busy=${page ? undefined : "true"}>
      <h1 class="sr">Sessions</h1>
      <${Filters} filters=${filters} />
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      ${page && html`<section aria-label="Sessions">
        ${rows.size === 0 && html`<p class="empty">${query ? "No session matches." : "No sessions yet. tokenbus chat begins one."}</p>`}
        <ol>${[...rows.values()].map((row) => html`<${Line} key=${keyOf(row)} row=${row} now=${page.now} />`)}</ol>
        ${last.next && html`<p class="cut"><button onClick=${next}>More</button></p>`}
      </section>`}
    </main>`;
}

function keyOf(row) {
  return `${row.tenant ?? ""} ${row.session}`;
}

function Line({ row, now }) {
  const metadata = Object.entries(row.metadata ?? {}).map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`);
  return html`
    <li><a class="line" href=${sessionHash(row.session, session.value?.tenant ? "" : row.tenant)} data-session=${row.session}>
      <span class="age" title=${new Date(row.last_ms).toLocaleString()}>${age(Math.max(0, now - row.last_ms))}</span>
      <span class="name">${oneLine(row.session)}</span>
      <span class="tenant">${oneLine(row.tenant ?? "")}</span>
      <span class="model">${oneLine(`${row.provider}/${row.model}`)}</span>
      <span class="runs">${plural(row.runs ?? 0, "run")}</span>
      <span class="does">${row.run ? "answering" : ""}${row.waiting > 0 ? ` ${count(row.waiting)} wait` : ""}</span>
      <bdi class="words">${row.begins === undefined && !roles.value.has("see_content") ? "hidden" : oneLine([row.begins ?? "", ...metadata].join("  "))}</bdi>
    </a></li>`;
}

function Filters({ filters }) {
  const { put, field } = useFilters(filters, (typed) => replaceHash(sessionsHash({ ...route.value.sessionFilters, ...typed })));
  return html`
    <div class="filters" role="search">
      ${field("words", roles.value.has("see_content") ? "Words of name, first message, metadata" : "Words of the name")}
      ${!session.value?.tenant && field("tenant", "Tenant")}
      ${roles.value.has("see_content") && field("metadata", "Metadata, as name=value")}
      <label class="choice"><span class="sr">Age</span>
        <select value=${filters.older_than ?? ""} onChange=${(event) => put("older_than", event.target.value)}>
          ${AGES.map(([value, name]) => html`<option key=${value} value=${value}>${name}</option>`)}
        </select></label>
    </div>`;
}
