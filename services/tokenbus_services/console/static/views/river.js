// The river: a line for each open run, and below it those that ended. Drawn once a second, whatever flows.

import { age, count, ENDED_STATES, OPEN_STATES, localTime, rate, shortId, short, stateName } from "../lib/format.js";
import { Component, createRef, html, useCallback, useEffect, useRef, useState } from "../lib/html.js";
import { shortcuts } from "../lib/keys.js";
import { riverHash, runHash } from "../lib/route.js";
import { oneLine } from "../lib/safe_text.js";
import { price, replaceHash, river, roles, route } from "../lib/store.js";
import { useTitle } from "../lib/title.js";

const RED_MS = 600_000;
const STUCK_MS = 120_000;
const SORTS = { trouble: "silent first", newest: "newest first", longest: "longest first" };
const TYPED_MS = 250;

export function River() {
  const [selected, setSelected] = useState(null);
  const search = useRef(null);
  const data = river.value;
  const open = data?.rows ?? []; // the gateway has sorted both
  const ended = data?.ended ?? [];
  const silent = open.filter((row) => row.quiet_ms).length;
  useTitle(silent > 0 ? `${silent} silent · River` : "River");
  const ids = [...open, ...ended].map((row) => row.run);
  const select = useCallback((event) => setSelected(event.currentTarget.dataset.run), []);
  const latest = useRef({ ids, selected });
  latest.current = { ids, selected };

  useEffect(() => {
    const step = (by) => () => {
      const { ids: all, selected: from } = latest.current;
      if (!all.length) return;
      const index = all.indexOf(from);
      const next = all[index < 0 ? 0 : Math.min(all.length - 1, Math.max(0, index + by))];
      latest.current.selected = next; // Enter may come before the next draw
      setSelected(next);
      document.getElementById(`line-${next}`)?.focus();
    };
    return shortcuts({
      j: step(1),
      k: step(-1),
      "/": () => search.current?.focus(),
      Enter: () => {
        const { selected: run } = latest.current;
        if (document.activeElement instanceof HTMLButtonElement) document.activeElement.click();
        else if (run) location.hash = runHash(run);
      },
      Escape: () => {
        if (document.activeElement instanceof HTMLElement) document.activeElement.blur();
      },
    });
  }, []);

  return html`
    <main id="main" class="river" tabindex="-1">
      <h1 class="sr">Runs</h1>
      <${Filters} search=${search} data=${data} />
      ${data && html`<section aria-labelledby="open-title">
        <h2 id="open-title">Open <b>${count(data.open)}</b>
          ${data.open > open.length && html`<small>${open.length} are shown, ${SORTS[route.value.filters.sort ?? "trouble"]}</small>`}</h2>
        ${open.length > 0 && html`<${Heading} words="last words" last="turn" rate="tok/s" />`}
        ${open.length === 0 && (ended.length > 0 || filtered() ? html`<p class="empty">No run is open${filtered() ? " that matches" : ""}.</p>` : html`<${FirstRun} />`)}
        <ol class="lines">
          ${open.map((row, index) => html`<${Line} key=${row.run} index=${index} row=${row} at=${data.at} selected=${row.run === selected} onSelect=${select} />`)}
        </ol>
      </section>`}
      ${data && (ended.length > 0 || open.length > 0 || filtered()) && html`<section aria-labelledby="ended-title">
        <h2 id="ended-title">Ended</h2>
        <${Heading} words="finish" last="cost" rate="tokens" />
        ${ended.length === 0 && html`<p class="empty">No run has ended lately${filtered() ? " that matches" : ""}.</p>`}
        <ol class="lines">
          ${ended.map((row, index) => html`<${Line} key=${row.run} index=${open.length + index} row=${row} at=${data.at} selected=${row.run === selected} onSelect=${select} />`)}
        </ol>
      </section>`}
    </main>`;
}

/** What to do where nothing has ever run. */
function FirstRun() {
  return html`
    <div class="first-run">
      <p><b>No runs yet.</b> Publish one, and it appears here while it speaks:</p>
      <pre tabindex="0" aria-label="A command that publishes a run">tokenbus send "Do I need an umbrella?"</pre>
      <p class="mute">or by HTTP, in any of the APIs that the gateway speaks:</p>
      <pre tabindex="0" aria-label="The same by HTTP">${`curl -N ${location.origin}/runs -H 'content-type: application/json' \\\n  -d '{"model": "PROVIDER/MODEL", "messages": [{"role": "user", "content": "Hello"}]}'`}</pre>
    </div>`;
}

function filtered() {
  return Object.keys(route.value.filters).some((name) => name !== "sort");
}

function Heading({ words, last, rate: speed }) {
  return html`
    <div class="line heading" aria-hidden="true">
      <span class="state">state</span><span class="age">age</span><span class="model">provider / model</span>
      <span class="tenant">tenant</span><span class="rate">${speed}</span><span class="words">${words}</span>
      <span class="last">${last}</span><span class="id">run</span>
    </div>`;
}

const IN_SIGHT_MARGIN = "300px";
const TURNS = 20;
const FIRST = 50;

/** Tells lines when they come into sight, and when they leave it. */
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.line?.see(entry.isIntersecting);
}, { rootMargin: `${IN_SIGHT_MARGIN} 0px` });

/** Lines out of sight are drawn in turn, a few with each sample, and one that was never in sight is a bare link: so a draw
 * costs the same however long the list is, and however many runs come and go. */
class Line extends Component {
  box = createRef();
  inSight = true;
  stale = false;
  isWhole = this.props.index < FIRST;

  componentDidMount() {
    this.box.current.line = this;
    sight.observe(this.box.current);
  }

  componentWillUnmount() {
    sight.unobserve(this.box.current);
  }

  see(inSight) {
    this.inSight = inSight;
    if (!inSight || (this.isWhole && !this.stale)) return;
    this.isWhole = true;
    this.forceUpdate();
  }

  shouldComponentUpdate(next) {
    const isTurn = this.isWhole && next.index % TURNS === Math.floor(next.at / 1000) % TURNS;
    const draws = this.inSight || isTurn || next.selected !== this.props.selected || next.row.state !== this.props.row.state;
    this.stale ||= !draws;
    return draws;
  }

  render({ row, at, selected, onSelect }) {
    this.stale = false;
    if (!this.isWhole) {
      return html`<li ref=${this.box}><a id=${`line-${row.run}`} class="line" href=${runHash(row.run)} data-run=${row.run} onFocus=${onSelect}>${stateName(row.state)} ${row.run}</a></li>`;
    }
    const isOpen = row.ended_at === null || row.ended_at === undefined;
    const bad = row.state === "failed" || row.state === "incomplete";
    const hot = bad && at - row.ended_at < RED_MS;
    const quiet = isOpen && row.quiet_ms ? (row.quiet_ms >= STUCK_MS ? "stuck" : "quiet") : "";
    const past = age(at - (isOpen ? row.started_at : row.ended_at));
    const speed = isOpen ? rate(row.tokens_per_s) : tokens(row.usage);
    // Numbers stand to the right: one with more digits is another element, so that none moves.
    return html`
      <li ref=${this.box}>
        <a id=${`line-${row.run}`} class=${`line ${hot ? "hot" : quiet}`} href=${runHash(row.run)} data-run=${row.run}
          aria-current=${selected ? "true" : undefined} onFocus=${onSelect}>
          <span class="state"><${State} name=${row.state} /></span>
          <span key=${`age ${past}`} class="age" title=${started(row.started_at)}>${past}</span>
          <span class="model"><i>${oneLine(row.provider ?? "?")}</i><s>/</s>${oneLine(row.model ?? "?")}</span>
          <span class="tenant">${row.tenant ? oneLine(row.tenant) : ""}</span>
          <span key=${`rate ${speed}`} class="rate" title=${isOpen ? "estimated from characters" : "tokens in and out"}>${speed}</span>
          <span class="words">${quiet && html`<b class="silent" title="nothing was published for so long">silent ${age(row.quiet_ms)}</b>`}${isOpen ? words(row.words) : finish(row)}</span>
          <span class="last">${isOpen ? turns(row) : price(row.cost)}</span>
          <span class="id" title=${row.run}>${shortId(row.run)}</span>
        </a>
      </li>`;
  }
}

const times = new Map();

/** Formatting a time takes longer than all else of a line, and it never changes. */
function started(at) {
  let text = times.get(at);
  if (text === undefined) {
    if (times.size > 5000) times.clear();
    text = new Date(at).toLocaleString();
    times.set(at, text);
  }
  return text;
}

export function State({ name }) {
  return html`<span class=${`st st-${name}`}><i></i>${stateName(name)}</span>`;
}

function turns(row) {
  const turn = row.turn ?? 0;
  const retries = row.attempt - 1 - turn; // attempts count through the whole run, and each turn takes one
  return html`${retries > 0 ? html`<span class="retries" title="retries">↻ ${retries}</span> ` : ""}<span title="turn">t${turn + 1}</span>`;
}

function tokens(usage) {
  if (!usage) return "";
  return short((usage.input ?? 0) + (usage.output ?? 0));
}

function words(text) {
  if (text === null || text === undefined) return html`<span class="mute">${roles.value.has("see_content") ? "" : "hidden"}</span>`;
  const shown = oneLine(text);
  return html`<bdi class="tail"><span key=${shown}>${shown}</span></bdi>`; // another element: the text does not move, it is new
}

function finish(row) {
  const said = row.words ? html`<bdi class="mute head">${oneLine(row.words)}</bdi>` : null;
  if (row.error) return html`<code class="code">${oneLine(row.error)}</code>${said}`;
  return html`<span class="finish">${row.finish ?? ""}</span>${said}`;
}

function Filters({ search, data }) {
  const { filters } = route.value;
  const [typed, setTyped] = useState(filters.q ?? "");
  const timer = useRef(0);
  useEffect(() => setTyped(filters.q ?? ""), [filters.q]);
  const known = useRef({ tenant: new Set(), provider: new Set(), finish: new Set(), error: new Set() });
  for (const row of data ? [...data.rows, ...data.ended] : []) {
    for (const name of Object.keys(known.current)) if (row[name]) known.current[name].add(row[name]);
  }

  const put = (name, value) => {
    const next = { ...route.value.filters };
    if (value) next[name] = value;
    else delete next[name];
    replaceHash(riverHash(next));
  };
  const onType = (event) => {
    const { value } = event.target;
    setTyped(value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => put("q", value.trim()), TYPED_MS);
  };
  const onDone = (event) => {
    clearTimeout(timer.current); // later, it would take back a step to another page
    put("q", event.target.value.trim());
  };
  useEffect(() => () => clearTimeout(timer.current), []);
  const choice = (name, text) => html`
    <label class="choice"><span class="sr">${text}</span>
      <select value=${filters[name] ?? ""} onChange=${(event) => put(name, event.target.value)} data-set=${filters[name] ? "yes" : undefined}>
        <option value="">any ${text}</option>
        ${[...new Set([...known.current[name], ...(filters[name] ? [filters[name]] : [])])].sort()
          .map((value) => html`<option key=${value} value=${value}>${oneLine(value)}</option>`)}
      </select>
    </label>`;

  const time = (name, text) => html`
    <label class="time"><span>${text}</span>
      <input type="datetime-local" step="1" value=${localTime(filters[name])} data-set=${filters[name] ? "yes" : undefined}
        onChange=${(event) => put(name, event.target.value && String(new Date(event.target.value).getTime()))} /></label>`;

  return html`
    <div class="filters" role="search">
      <label class="search"><span class="sr">Search runs</span>
        <input ref=${search} type="search" placeholder="Search by run, tenant, model, finish, error" value=${typed} onInput=${onType} onChange=${onDone} /><kbd aria-hidden="true">/</kbd></label>
      ${choice("tenant", "tenant")}${choice("provider", "provider")}${choice("finish", "finish")}${choice("error", "error")}
      ${time("since", "since")}${time("until", "until")}
      <label class="choice"><span class="sr">Sort</span>
        <select value=${filters.sort ?? "trouble"} onChange=${(event) => put("sort", event.target.value === "trouble" ? "" : event.target.value)}>
          ${Object.entries(SORTS).map(([name, text]) => html`<option key=${name} value=${name}>${text}</option>`)}
        </select></label>
      <div class="states" role="group" aria-label="State">
        ${[...OPEN_STATES, ...ENDED_STATES].map((name) => html`
          <button key=${name} class=${`st st-${name}`} aria-pressed=${filters.state === name ? "true" : "false"}
            onClick=${() => put("state", filters.state === name ? "" : name)}><i></i>${stateName(name)}<b key=${data?.states?.[name]}>${count(data?.states?.[name] ?? 0)}</b></button>`)}
      </div>
      ${filtered() && html`<button class="quiet" onClick=${() => replaceHash("#")}>Clear</button>`}
    </div>`;
}
