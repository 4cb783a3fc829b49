// Entries that could not be worked on: look, retry, drop.

import { get, post } from "../lib/api.js";
import { bytes, clock, count } from "../lib/format.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { runHash } from "../lib/route.js";
import { oneLine, visible } from "../lib/safe_text.js";
import { announce, roles } from "../lib/store.js";
import { Ask, Dialog } from "./dialog.js";

/** One page of them; with `problem` if it could not be had. */
export async function loadDead(after = null) {
  try {
    return await get(after === null ? "/dead" : `/dead?after=${encodeURIComponent(after)}`);
  } catch (error) {
    return { entries: [], next: null, problem: error.message };
  }
}

export function DeadLetters({ counts, first }) {
  const [entries, setEntries] = useState(first.entries);
  const [next, setNext] = useState(first.next ?? null);
  const [looked, setLooked] = useState(null);
  const [asked, setAsked] = useState(null);
  const [problem, setProblem] = useState(first.problem ?? "");
  const admin = roles.value.has("admin");

  async function load(after = null) {
    const page = await loadDead(after);
    setProblem(page.problem ?? "");
    if (page.problem) return;
    setEntries((before) => (after === null ? page.entries : [...before, ...page.entries]));
    setNext(page.next ?? null);
  }
  const total = (counts?.entries ?? 0) + (counts?.rejected ?? 0);
  const shown = useRef(total);
  useEffect(() => {
    if (shown.current !== total) load();
    shown.current = total;
  }, [total]);

  async function act(entry, action) {
    try {
      await post(`/dead/${encodeURIComponent(entry.id)}/${action}`);
      announce(action === "drop" ? "Dropped." : "Sent again.");
      await load();
    } catch (error) {
      setProblem(error.message);
    }
  }

  const titles = { retry: "Send this entry again?", drop: "Drop this entry?" };
  return html`
    <section class="card" aria-labelledby="dead-title">
      <h2 id="dead-title">Dead letters <small class=${counts?.entries ? "bad" : "mute"}>${count(counts?.entries)}</small>
        ${counts?.rejected > 0 && html`<small class="mute">and ${count(counts.rejected)} rejected requests</small>`}</h2>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      ${entries.length === 0
        ? html`<p class="mute">None.</p>`
        : html`<div class="scroll" tabindex="0" role="group" aria-label="Dead letters"><table>
            <thead><tr><th scope="col">at</th><th scope="col">stage</th><th scope="col">run</th><th scope="col">reason</th><th scope="col"><span class="sr">Actions</span></th></tr></thead>
            <tbody>${entries.map((entry) => html`
              <tr key=${entry.id}>
                <td class="mono">${clock(Number(String(entry.id).split("-")[0]))}</td><td>${oneLine(entry.stage ?? "")}</td>
                <td>${entry.run ? html`<a class="mono" href=${runHash(entry.run)}>${oneLine(entry.run)}</a>` : ""}</td>
                <td class="reason">${entry.reason === null ? html`<span class="mute">hidden</span>` : oneLine(entry.reason ?? "")}</td>
                <td class="buttons"><button onClick=${() => setLooked(entry)}>Look</button>
                  ${admin && html`<button onClick=${() => setAsked({ entry, action: "retry" })}>Retry</button>
                    <button class="danger" onClick=${() => setAsked({ entry, action: "drop" })}>Drop</button>`}</td>
              </tr>`)}</tbody>
          </table></div>`}
      ${next && html`<button onClick=${() => load(next)}>More</button>`}
      ${looked && html`<${Look} entry=${looked} onClose=${() => setLooked(null)} />`}
      ${asked && html`
        <${Ask} title=${titles[asked.action]} yes=${asked.action === "drop" ? "Drop it" : "Send it again"} onClose=${() => setAsked(null)} onYes=${() => act(asked.entry, asked.action)}>
          <p>${asked.action === "drop" ? "Its bytes are lost then." : "It goes back to where it lay. If nothing was mended, it comes back here."}</p>
          <p class="mute">${oneLine(asked.entry.reason ?? "")}</p>
        <//>`}
    </section>`;
}

function Look({ entry, onClose }) {
  const { bytes: body, ...facts } = entry;
  return html`
    <${Dialog} title="Dead letter" wide onClose=${onClose}>
      <pre tabindex="0" dir="ltr">${visible(JSON.stringify(facts, null, 2))}</pre>
      ${body ? html`<p class="mute">${bytes(body.length * 0.75)} of content</p><pre tabindex="0" dir="ltr">${visible(decode(body))}</pre>` : html`<p class="mute">Its content is for admins who may see content.</p>`}
    <//>`;
}

function decode(base64) {
  try {
    const binary = atob(base64);
    return new TextDecoder().decode(Uint8Array.from(binary, (character) => character.charCodeAt(0))).slice(0, 20_000);
  } catch {
    return base64.slice(0, 20_000);
  }
}
