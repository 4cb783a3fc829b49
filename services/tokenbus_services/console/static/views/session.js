// One session: the conversation over its runs, what waits, and a line to say something.

import { freshId, post } from "../lib/api.js";
import { clock, count, ms, plural } from "../lib/format.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../lib/html.js";
import { shortcuts } from "../lib/keys.js";
import { runHash } from "../lib/route.js";
import { oneLine } from "../lib/safe_text.js";
import { roles } from "../lib/store.js";
import { useTitle } from "../lib/title.js";
import { modelOf } from "../session/fold.js";
import { SessionFeed } from "../session/feed.js";
import { Blocks } from "./blocks.js";
import { GrowingText } from "./growing_text.js";
import { State } from "./river.js";
import { RunWaits } from "./waits.js";

const AT_MOST = 80;
const NEAR_END = 80;

export function SessionView({ name, tenant }) {
  useTitle(`${name} · session`);
  const feed = useMemo(() => new SessionFeed(name, tenant), [name, tenant]);
  const [extra, setExtra] = useState(0);
  useEffect(() => {
    feed.start();
    return () => feed.stop();
  }, [feed]);
  useEffect(() => shortcuts({ Escape: () => { location.hash = "#view=sessions"; } }), []);
  feed.version.value;
  const { told } = feed;
  const info = feed.info.value;
  const problem = feed.problem.value;
  if (problem && !info) {
    return html`<main id="main" class="blank" tabindex="-1"><div role="alert"><p>${problem.message}</p><p class="mute">${oneLine(name)}</p></div></main>`;
  }
  if (!info) return html`<main id="main" class="blank" tabindex="-1" aria-busy="true"></main>`;
  const first = Math.max(0, told.entries.length - AT_MOST - extra);
  return html`
    <main id="main" class="session" tabindex="-1">
      <header class="run-head">
        <h1><span class="mono">${oneLine(name)}</span></h1>
        <div class="run-line">
          <span>${oneLine(modelOf(told.config) ?? `${info.provider}/${info.model}`)}</span>
          ${info.tenant && html`<span class="chip">${oneLine(info.tenant)}</span>`}
          <span class="mute">${plural(told.runs.size, "run")}</span>
          ${feed.state.value.name === "waiting" && html`<span class="fresh off"><i></i>disconnected</span>`}
        </div>
      </header>
      ${problem && html`<p class="notice" role="alert">${problem.message}</p>`}
      <${Scroll} version=${feed.version.value}>
        ${first > 0 && html`<p class="cut">${count(first)} entries before <button onClick=${() => setExtra(extra + AT_MOST)}>Show ${AT_MOST} more</button></p>`}
        <ol class="told">${told.entries.slice(first).map((entry, index) => html`<${Entry} key=${first + index} entry=${entry} told=${told} version=${versionOf(entry, told)} />`)}</ol>
        ${told.entries.length === 0 && html`<p class="empty">Nothing was said yet.</p>`}
      <//>
      ${told.open !== null && html`<${RunWaits} key=${told.open} run=${told.open} waits=${told.runs.get(told.open)?.waits} />`}
      <${Waiting} feed=${feed} version=${feed.version.value} />
      ${roles.value.has("act") && !problem && html`<${Composer} feed=${feed} open=${told.open !== null} />`}
    </main>`;
}

/** What is folded changes in place, and a component is drawn again only if one of its properties is another. */
function versionOf(entry, told) {
  return entry.kind === "run" ? `${told.runs.get(entry.run)?.seq} ${entry.to}` : "";
}

/** Follows the end as long as the reader stays there. */
function Scroll({ version, children }) {
  const box = useRef(null);
  const stays = useRef(true);
  useLayoutEffect(() => {
    if (stays.current) box.current.scrollTop = box.current.scrollHeight;
  }, [version]);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    stays.current = scrollHeight - scrollTop - clientHeight < NEAR_END;
  };
  return html`<section class="talk" ref=${box} tabindex="0" aria-labelledby="talk-title" onScroll=${onScroll}>
    <h2 id="talk-title" class="sr">Conversation</h2>${children}</section>`;
}

function Entry({ entry, told }) {
  if (entry.kind === "note") return html`<li class="note">${oneLine(entry.text)}</li>`;
  if (entry.kind === "run") return html`<${Answer} entry=${entry} state=${told.runs.get(entry.run)} version=${versionOf(entry, told)} />`;
  const returned = entry.kind === "returned";
  return html`
    <li class=${`utterance ${returned ? "returned" : ""} ${entry.answer ? "answered" : ""}`} data-append=${entry.append}>
      <header><h3><bdi>${oneLine(entry.author)}</bdi></h3>
        <span class="facts">
          ${entry.at && html`<time>${clock(entry.at)}</time>`}
          ${entry.steered && html`<span>into this answer</span>`}
          ${entry.waited_ms > 1000 && html`<span>${`waited ${ms(entry.waited_ms)}`}</span>`}
          ${returned && html`<span class="bad">${`returned: ${oneLine(entry.why)}`}</span>`}
        </span></header>
      <${Said} message=${entry} />
    </li>`;
}

function Said({ message }) {
  if (message.hidden > 0) return html`<p class="mute hidden-content">${count(message.hidden)} characters, hidden: you have not the role <code>see_content</code></p>`;
  return html`<${GrowingText} text=${message.text} />`;
}

function Answer({ entry, state }) {
  const whole = entry.to === null;
  const { end } = state ?? {};
  return html`
    <li class="answer" data-run=${entry.run}>
      <header><h3>${state ? oneLine(state.participant ?? state.model) : "…"}</h3>
        <span class="facts">
          ${state && whole && html`<${State} name=${state.phase} />`}
          <a href=${runHash(entry.run)}>run</a>
        </span></header>
      ${state && html`<${Blocks} blocks=${state.blocks.slice(entry.from, entry.to ?? undefined)} path=${`/runs/${encodeURIComponent(entry.run)}`} canSee=${roles.value.has("see_content")} />`}
      ${whole && end?.error && html`<p class="error"><code>${oneLine(end.error.code)}</code> ${oneLine(end.error.message ?? "")}</p>`}
      ${whole && end?.reason && html`<p class="mute">${oneLine(end.reason)}</p>`}
    </li>`;
}

/** What was accepted and has not taken effect. */
function Waiting({ feed }) {
  const [problem, setProblem] = useState("");
  const waiting = [...feed.told.waiting.values()];
  if (waiting.length === 0) return null;
  const withdraw = async (append) => {
    try {
      await post(feed.path("/events"), { item: { type: "withdraw", append } });
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`
    <section class="waits" aria-labelledby="waits-title">
      <h2 id="waits-title" class="sr">Messages that wait</h2>
      <ul>${waiting.map((message) => html`
        <li key=${message.append}><b><bdi>${oneLine(message.author)}</bdi></b>
          <bdi class="head">${message.hidden > 0 ? "hidden" : oneLine(message.text)}</bdi>
          <span class="mute">${message.steers ? "goes in at the next turn, or follows" : "waits"}</span>
          ${roles.value.has("act") && html`<button onClick=${() => withdraw(message.append)}>Withdraw</button>`}</li>`)}</ul>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
    </section>`;
}

const HOW = [["", "as configured"], ["enqueue", "after this answer"], ["steer", "into this answer"], ["interrupt", "instead of this answer"]];

function Composer({ feed, open }) {
  const [text, setText] = useState("");
  const [how, setHow] = useState("");
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const id = useRef(null);

  async function append(item, own) {
    setBusy(true);
    setProblem("");
    try {
      await post(feed.path("/events"), { item, ...(own ? { id: own } : {}) });
      return true;
    } catch (error) {
      setProblem(error.message);
      return false;
    } finally {
      setBusy(false);
    }
  }

  async function send(event) {
    event?.preventDefault();
    const content = text.trim();
    if (!content || busy) return;
    id.current ??= freshId(); // kept while it fails: sent again, it is the same append
    if (await append({ type: "message", content, ...(how ? { when_busy: how } : {}) }, id.current)) {
      id.current = null;
      setText("");
    }
  }

  const onType = (event) => {
    id.current = null;
    setText(event.target.value);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`
    <form class="composer" onSubmit=${send}>
      <label class="sr" for="say">Message</label>
      <textarea id="say" rows="2" value=${text} onInput=${onType} onKeyDown=${onKey} placeholder="Say something. Enter sends, Shift Enter is a new line"></textarea>
      <label><span class="sr">While the model speaks</span>
        <select value=${how} onChange=${(event) => setHow(event.target.value)}>
          ${HOW.map(([value, name]) => html`<option key=${value} value=${value}>${name}</option>`)}
        </select></label>
      <button class="main" disabled=${busy || !text.trim()}>Send</button>
      <button type="button" class="danger" disabled=${!open} onClick=${() => append({ type: "interrupt" })}>Interrupt</button>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
    </form>`;
}
