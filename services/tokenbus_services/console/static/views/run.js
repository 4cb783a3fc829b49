// One run: its blocks as they come, its timeline, its events, and the slider back to any of them.

import { age, count, plural, shortId, stateName } from "../lib/format.js";
import { Component, Fragment, html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../lib/html.js";
import { shortcuts } from "../lib/keys.js";
import { runHash } from "../lib/route.js";
import { oneLine } from "../lib/safe_text.js";
import { announce, byLink, now, replaceHash, roles, route } from "../lib/store.js";
import { useTitle } from "../lib/title.js";
import { RunFeed } from "../run/feed.js";
import { Actions } from "./run_actions.js";
import { Blocks } from "./blocks.js";
import { NoRun } from "./no_run.js";
import { Decisions, Facts } from "./run_facts.js";
import { RawEvents } from "./raw_events.js";
import { State } from "./river.js";
import { Timeline } from "./timeline.js";
import { RunWaits } from "./waits.js";

const LINK_MS = 200;
const NEAR_END = 80;
const MARGIN = 12;

export function RunView({ run }) {
  const canSee = roles.value.has("see_content");
  const feed = useMemo(() => new RunFeed(run), [run]);
  const [wanted, setWanted] = useState(route.value.seq);
  useEffect(() => {
    feed.start(canSee);
    return () => feed.stop();
  }, [feed]);
  useEffect(() => setWanted(route.value.seq), [route.value.seq]);

  feed.version.value;
  now.value;
  const { history } = feed;
  const live = wanted === null || (wanted >= history.last && history.head.end !== null);
  const seq = live ? history.last : Math.min(wanted, history.last);
  const state = history.at(seq); // a copy, for views compare it with the one before
  const info = feed.info.value;
  const row = info?.row;
  useTitle(`${stateName(history.head.end?.type ?? row?.state ?? "run")} · ${shortId(run)}`);

  const timer = useRef(0);
  const seek = (value) => {
    const next = value === null || value >= history.last ? null : Math.max(0, value);
    setWanted(next);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => replaceHash(linkOf(run, next)), LINK_MS);
  };
  useEffect(() => () => clearTimeout(timer.current), []);
  const latest = useRef(null);
  latest.current = { seq, seek };
  useEffect(() => shortcuts({
    Escape: () => { if (!byLink.value) location.hash = ""; },
    ArrowLeft: () => latest.current.seek(latest.current.seq - 1),
    ArrowRight: () => latest.current.seek(latest.current.seq + 1),
    l: () => latest.current.seek(null),
  }), []);

  const ended = history.head.end;
  const wasOpen = useRef(false);
  useEffect(() => {
    if (!ended && history.last >= 0) wasOpen.current = true;
    if (ended && wasOpen.current) announce(`The run ended: ${stateName(ended.type)}.`);
  }, [ended, history.last >= 0]);

  const problem = feed.problem.value;
  if (problem && history.last < 0) {
    return html`<${NoRun} run=${run} problem=${problem} />`;
  }
  if (!feed.ready.value) return html`<main id="main" class="blank" tabindex="-1" aria-busy="true"></main>`;
  return html`
    <main id="main" class="run" tabindex="-1">
      <header class="run-head">
        <h1><span class="mono">${oneLine(run)}</span></h1>
        <div class="run-line">
          <${State} name=${live ? phaseOf(state, feed.doing.value) : state.phase} />
          <span><i class="mute">${oneLine(state.provider || row?.provider || "")}</i> / <b>${oneLine(state.model || row?.model || "")}</b></span>
          ${row?.tenant && html`<span class="chip">${oneLine(row.tenant)}</span>`}
          ${row?.started_at && html`<span class="mute" title=${new Date(row.started_at).toLocaleString()}>${`${age((row.ended_at ?? now.value) - row.started_at)}${row.ended_at || ended ? "" : " so far"}`}</span>`}
          ${info?.recorded && html`<span class="chip" title="The server has it no more">from its record</span>`}
          <${FailedTools} blocks=${state.blocks} />
          <${Feed} state=${feed.state.value} ended=${ended} />
          <span class="grow"></span>
          <${Actions} run=${run} info=${info} ended=${ended} seq=${seq} events=${history.events} onActed=${() => feed.load()} />
        </div>
        <${Slider} seq=${seq} last=${history.last} live=${live} onSeek=${seek} />
      </header>
      ${live && !ended && html`<${RunWaits} run=${run} waits=${state.waits} />`}
      <div class="run-grid">
        <${Scroll} version=${state.seq} follow=${live && (!ended || wasOpen.current)}>
          ${state.blocks.length === 0 && html`<p class="empty">${state.end ? "The run ended without output." : "Nothing was said yet."}</p>`}
          <${Blocks} blocks=${state.blocks} path=${feed.path} canSee=${canSee} />
          ${state.end && html`<${End} end=${state.end} />`}
        <//>
        <aside aria-label="About this run">
          <${Calm} live=${live && !ended} seq=${seq} feed=${feed}>
            <${Facts} state=${state} info=${info} />
            <${Timeline} state=${state} decisions=${feed.decisions.value} now=${live ? now.value : null} onSeek=${seek} />
            <${Decisions} decisions=${feed.decisions.value} />
          <//>
        </aside>
        <${RawEvents} history=${history} total=${history.events.length} seq=${seq} onSeek=${seek} />
      </div>
    </main>`;
}

function linkOf(run, seq) {
  const { ticket } = route.value;
  return runHash(run, seq) + (ticket ? `&ticket=${encodeURIComponent(ticket)}` : "");
}

/** What the events tell, unless the gateway knows more of the same moment: no event tells that a run waits. */
function phaseOf(state, doing) {
  return !state.end && doing && doing.seq === state.seq ? doing.state : state.phase;
}

/** That a tool failed is said where the page begins, with the way to its result. */
function FailedTools({ blocks }) {
  const failed = blocks.filter((block) => block?.kind === "tool_result" && block.is_error && block.status !== "void");
  if (failed.length === 0) return null;
  const names = [...new Set(failed.map((block) => block.tool_name ?? "a tool"))].map(oneLine).join(", ");
  const show = () => document.querySelector(`[data-block="${failed[0].block}"]`)?.scrollIntoView({ block: "center" });
  return html`<button class="danger small" data-testid="failed-tools" onClick=${show}>${`${plural(failed.length, "call")} failed: ${names}`}</button>`;
}

/** Draws its children at most twice a second while a run is live: bars and sums need no more. */
class Calm extends Component {
  shouldComponentUpdate(next) {
    if (!next.live || !this.props.live || performance.now() - (this.drawn ?? 0) > 500) return true;
    return false;
  }

  render({ children }) {
    this.drawn = performance.now();
    return html`<${Fragment}>${children}<//>`;
  }
}

function Feed({ state, ended }) {
  if (ended) return null;
  if (state.name === "waiting") return html`<span class="fresh off"><i></i>disconnected</span>`;
  if (state.name === "paused") return html`<span class="fresh idle"><i></i>paused</span>`;
  return null;
}

function Slider({ seq, last, live, onSeek }) {
  return html`
    <div class="slider">
      <button class="icon" aria-label="One event back" disabled=${seq <= 0} onClick=${() => onSeek(seq - 1)}>‹</button>
      <input type="range" min="0" max=${Math.max(0, last)} value=${Math.max(0, seq)} aria-label="Event" aria-valuetext=${`event ${seq} of ${last}`}
        onInput=${(event) => onSeek(Number(event.target.value))} />
      <button class="icon" aria-label="One event on" disabled=${seq >= last} onClick=${() => onSeek(seq + 1)}>›</button>
      <output class="mono">${`${count(Math.max(0, seq))} / ${count(Math.max(0, last))}`}</output>
      <button class=${`live-button ${live ? "on" : ""}`} aria-pressed=${live ? "true" : "false"} onClick=${() => onSeek(null)}>${live ? "newest" : "to the newest"}</button>
    </div>`;
}

/** Follows the end of a growing text as long as the reader stays there. The page scrolls, and nothing in it. */
function Scroll({ version, follow, children }) {
  const box = useRef(null);
  const stays = useRef(true);
  useLayoutEffect(() => {
    const below = belowSight(box.current);
    if (follow && stays.current && below > 0) window.scrollBy(0, below);
  }, [version, follow]);
  useEffect(() => {
    const onScroll = () => {
      stays.current = Math.abs(belowSight(box.current)) < NEAR_END;
    };
    window.addEventListener("scroll", onScroll, { passive: true });
    return () => window.removeEventListener("scroll", onScroll);
  }, []);
  return html`<section class="output" ref=${box} aria-labelledby="output-title">
    <h2 id="output-title" class="sr">Output</h2>${children}</section>`;
}

/** Pixels of it below the window's end. */
function belowSight(element) {
  return element.getBoundingClientRect().bottom + MARGIN - window.innerHeight;
}

function End({ end }) {
  const error = end.error;
  return html`
    <div class=${`end end-${end.type}`}>
      <${State} name=${end.type} /> <span>${end.finish}${end.finish_raw && end.finish_raw !== end.finish ? html` <i class="mute">(${oneLine(end.finish_raw)})</i>` : ""}</span>
      ${end.reason && html`<bdi>${oneLine(end.reason)}</bdi>`}
      ${error && html`<p><code>${oneLine(error.code)}</code> ${oneLine(error.message ?? "")}</p>`}
    </div>`;
}

