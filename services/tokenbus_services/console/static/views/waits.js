// What runs wait for: an inbox of all, those of one run, and how a person decides them.

import { freshId, get, post } from "../lib/api.js";
import { age, count } from "../lib/format.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { runHash } from "../lib/route.js";
import { oneLine, visible, visibleJson } from "../lib/safe_text.js";
import { announce, byLink, now, roles } from "../lib/store.js";
import { useTitle } from "../lib/title.js";

const EVERY_MS = 2000;
const COUNT_EVERY_MS = 5000;
const SOON_MS = 60_000;

/** What is at this path, again after `again`; null while it is unknown. */
function useWaits(path, again, every) {
  const [page, setPage] = useState(null);
  const [problem, setProblem] = useState("");
  const loaded = useRef(null);
  useEffect(() => {
    let gone = false;
    loaded.current = async () => {
      if (document.hidden) return;
      try {
        const found = await get(path);
        if (gone) return;
        setPage({ ...found, ahead: found.now - Date.now() });
        setProblem("");
      } catch (error) {
        if (!gone) setProblem(error.message);
      }
    };
    loaded.current();
    const timer = every && setInterval(loaded.current, every);
    return () => {
      gone = true;
      clearInterval(timer);
    };
  }, [path, again]);
  return { page, problem, load: () => loaded.current() };
}

/** How many waits are open, beside the name of their page. */
export function WaitBadge() {
  const { page } = useWaits("/waiting/count", "", COUNT_EVERY_MS);
  return page?.count > 0 && html`<span class="badge" title="open waits">${count(page.count)}</span>`;
}

/** All that runs wait for which the viewer may see, the oldest deadline first. */
export function Inbox() {
  useTitle("Waiting");
  const { page, problem, load } = useWaits("/waiting", "", EVERY_MS);
  return html`
    <main id="main" class="inbox" tabindex="-1" aria-busy=${page ? undefined : "true"}>
      <h1 class="sr">What runs wait for</h1>
      <h2 class="sr">The oldest deadline first</h2>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      ${page?.waiting.length === 0 && html`<p class="empty">No run waits for anybody.</p>`}
      <${List} page=${page} whose=${true} onDecided=${load} />
      ${page?.more && html`<p class="cut">More runs wait. These are the ${count(page.waiting.length)} that have waited longest.</p>`}
    </main>`;
}

/** What one run waits for. `waits` names it, as its events tell. */
export function RunWaits({ run, waits }) {
  if (!waits) return null;
  return html`<${OfRun} run=${run} waits=${waits} />`;
}

function OfRun({ run, waits }) {
  const { page, problem, load } = useWaits(`/runs/${encodeURIComponent(run)}/waiting`, waits, 0);
  return html`
    <section class="asks" aria-labelledby="asks-title">
      <h2 id="asks-title" class="sr">What the run waits for</h2>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      <${List} page=${page} whose=${false} onDecided=${load} />
    </section>`;
}

function List({ page, whose, onDecided }) {
  if (!page?.waiting.length) return null;
  return html`<ol>${page.waiting.map((wait) => html`
    <${Wait} key=${`${wait.run} ${wait.wait}`} wait=${wait} ahead=${page.ahead} whose=${whose} onDecided=${onDecided} />`)}</ol>`;
}

const TITLES = { approval: "may it run?", answer: "a question", tool_result: "its result is wanted" };

function Wait({ wait, ahead, whose, onDecided }) {
  const left = wait.deadline_ms - (now.value + ahead);
  return html`
    <li class="ask" data-wait=${`${wait.run} ${wait.wait}`}>
      <header>
        <h3>${oneLine(wait.tool_name)}</h3>
        <span>${TITLES[wait.what] ?? oneLine(wait.what)}</span>
        ${whose && wait.tenant && html`<span class="chip">${oneLine(wait.tenant)}</span>`}
        ${whose && html`<a class="mono" href=${runHash(wait.run)}>${oneLine(wait.run)}</a>`}
        <span class=${left < SOON_MS ? "soon" : "mute"} title=${new Date(wait.deadline_ms).toLocaleString()}>${`${age(left)} left, then ${oneLine(wait.on_deadline ?? "deny")}`}</span>
      </header>
      ${wait.hidden > 0 && html`<p class="mute hidden-content">${count(wait.hidden)} characters, hidden: you have neither the role <code>see_content</code> nor <code>decide</code></p>`}
      ${wait.text && html`<p>${visible(wait.text)}</p>`}
      ${wait.url && html`<p class="mono">${visible(wait.url)}</p>`}
      ${wait.arguments && html`<pre tabindex="0" dir="ltr">${wait.what === "approval" && !wait.schema ? visible(wait.arguments) : visibleJson(wait.arguments)}</pre>`}
      ${roles.value.has("decide") && !byLink.value && html`<${Choice} wait=${wait} onDecided=${onDecided} />`}
    </li>`;
}

/** What may be decided, by what is waited for: a button's text, and what is typed before it is sent, if anything is. */
const CHOICES = {
  approval: (wait) => [
    { name: "Allow", main: true, body: () => ({ decision: "allow" }) },
    ...(wait.schema ? [{ name: "Edit", asks: "Arguments, as JSON", begin: visibleJson(wait.arguments ?? "{}"), yes: "Allow with these", body: (text) => ({ decision: "allow", arguments: text }) }] : []),
    { name: "Deny", danger: true, asks: "Reason, which the model reads", begin: "", yes: "Deny it", body: (text) => ({ decision: "deny", ...(text.trim() ? { reason: text.trim() } : {}) }) },
  ],
  answer: (wait) => [
    wait.url
      ? { name: "Done", main: true, body: () => ({ decision: "accept" }) }
      : { name: "Answer", main: true, asks: "Answer, as JSON", begin: sample(wait.schema), yes: "Send it", body: (text) => ({ decision: "accept", content: text }) },
    { name: "Decline", danger: true, body: () => ({ decision: "decline" }) },
  ],
  tool_result: (wait) => [
    { name: "Return a result", main: true, asks: wait.schema ? "Result, as JSON" : "Result", begin: wait.schema ? sample(wait.schema) : "", yes: "Send it", body: (text) => ({ content: text }) },
    { name: "It failed", danger: true, asks: "What the model reads", begin: "", yes: "Send it", body: (text) => ({ content: text, is_error: true }) },
  ],
};

function sample(schema) {
  return visibleJson(JSON.stringify(Object.fromEntries(Object.keys(schema?.properties ?? {}).map((name) => [name, null]))));
}

function Choice({ wait, onDecided }) {
  const [chosen, setChosen] = useState(null);
  const [text, setText] = useState("");
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const id = useRef(null);
  const choices = CHOICES[wait.what]?.(wait) ?? [];

  async function send(choice) {
    if (busy) return;
    setBusy(true);
    setProblem("");
    id.current ??= freshId();
    try {
      const path = `/runs/${encodeURIComponent(wait.run)}/waiting/${encodeURIComponent(wait.wait)}`;
      const fate = await post(path, { type: wait.what, decision_id: id.current, ...choice.body(text) });
      announce(`Decided: ${fate.decision}.`);
      await onDecided();
    } catch (error) {
      if (error.status > 0 && error.status < 500) id.current = null; // refused: the next one is another decision
      setProblem(error.message);
      if (error.status === 409 || error.status === 404) setTimeout(onDecided, EVERY_MS);
    } finally {
      setBusy(false);
    }
  }

  const choose = (choice) => {
    setProblem("");
    if (!choice.asks) {
      send(choice);
      return;
    }
    id.current = null;
    setText(choice.begin);
    setChosen(choice.name);
  };
  const open = choices.find((choice) => choice.name === chosen);
  const onSubmit = (event) => {
    event.preventDefault();
    send(open);
  };
  return html`
    ${open
      ? html`<form onSubmit=${onSubmit}>
          <label><span class="mute">${open.asks}</span>
            <textarea value=${text} onInput=${(event) => { id.current = null; setText(event.target.value); }}></textarea></label>
          <button class=${open.danger ? "danger" : "main"} disabled=${busy}>${open.yes}</button>
          <button type="button" onClick=${() => setChosen(null)}>Back</button>
        </form>`
      : html`<footer>${choices.map((choice) => html`
          <button key=${choice.name} class=${choice.danger ? "danger" : choice.main ? "main" : ""} disabled=${busy} onClick=${() => choose(choice)}>${choice.name}</button>`)}</footer>`}
    ${problem && html`<p class="error" role="alert">${problem}</p>`}`;
}
