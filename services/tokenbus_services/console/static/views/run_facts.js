// Usage, cost, decisions, notes and the request of a run.

import { count, ms } from "../lib/format.js";
import { html } from "../lib/html.js";
import { oneLine, visible } from "../lib/safe_text.js";
import { price } from "../lib/store.js";

const TOKENS = [["input", "input"], ["output", "output"], ["reasoning", "reasoning"], ["cache_read", "cache read"], ["cache_write", "cache write"]];
const REQUEST_CHARACTERS = 20_000;

export function Facts({ state, info }) {
  return html`
    <${Usage} state=${state} info=${info} />
    <${Notes} state=${state} />
    <${Request} info=${info} />`;
}

function Usage({ state, info }) {
  const usage = state.usage ?? info?.row?.usage;
  const timing = state.end?.timing;
  const paid = state.end ? info?.row?.cost : null;
  const facts = TOKENS.map(([name, text]) => [text, count(usage?.[name])]);
  facts.push(["cost", price(paid) || "–"], ["first byte", ms(timing?.first_byte_ms)], ["first text", ms(timing?.first_visible_ms)], ["all", ms(timing?.total_ms)]);
  return html`
    <section class="card" aria-labelledby="usage-title">
      <h2 id="usage-title">Usage</h2>
      <dl class="facts-list">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    </section>`;
}

export function Decisions({ decisions }) {
  if (!decisions || decisions.length === 0) return null;
  return html`
    <section class="card" aria-labelledby="decisions-title">
      <h2 id="decisions-title">Decisions <small class="mute">${decisions.length}</small></h2>
      <ol class="decisions">
        ${decisions.map((one) => html`
          <li key=${one.n}>
            <p><b>${oneLine(one.policy)}</b> <span class=${`action a-${one.action}`}>${one.action}</span>${one.tool_name ? html` <code>${oneLine(one.tool_name)}</code>` : ""}</p>
            ${one.reason && html`<p class="mute">${oneLine(one.reason)}</p>`}
            ${one.original && html`<details><summary>what it judged</summary>
              <p class="was model-text" dir="auto">${visible(one.original.slice(0, REQUEST_CHARACTERS))}</p>
              ${one.final !== undefined && html`<p class="is model-text" dir="auto">${visible(one.final.slice(0, REQUEST_CHARACTERS))}</p>`}</details>`}
          </li>`)}
      </ol>
    </section>`;
}

function Notes({ state }) {
  if (state.notes.length === 0 && state.fallback.length === 0) return null;
  return html`
    <section class="card" aria-labelledby="notes-title">
      <h2 id="notes-title">Notes</h2>
      ${state.fallback.length > 0 && html`<p class="mute">fallback: ${state.fallback.map((one) => oneLine(`${one.provider}/${one.model}`)).join(", ")}</p>`}
      <ul class="notes">${state.notes.map((note) => html`<li>${oneLine(note)}</li>`)}</ul>
    </section>`;
}

function Request({ info }) {
  if (!info?.request) return null;
  const text = JSON.stringify(info.request, null, 2);
  return html`
    <details class="card">
      <summary><h2>Request</h2></summary>
      <pre tabindex="0" aria-label="The request" dir="ltr">${visible(text.length > REQUEST_CHARACTERS ? `${text.slice(0, REQUEST_CHARACTERS)}\n…` : text)}</pre>
    </details>`;
}
