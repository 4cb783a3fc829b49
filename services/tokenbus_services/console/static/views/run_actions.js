// What may be done with a run: cancel, retry, resume, copy, and a link for a colleague.

import { post } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { runHash } from "../lib/route.js";
import { announce, byLink, roles } from "../lib/store.js";
import { asCurl, asJson, asPython } from "../run/snippets.js";
import { Ask, copyText, Dialog } from "./dialog.js";
import { ChooseOther } from "./pair.js";

const SAID_MS = 1800;

export function Actions({ run, info, ended, seq, onActed }) {
  const [asked, setAsked] = useState(null);
  const [busy, setBusy] = useState(null);
  const [said, setSaid] = useState(null);
  const [byHand, setByHand] = useState(null);
  const possible = info?.actions ?? [];
  const request = info?.request ?? null;

  const say = (text) => {
    setSaid(text);
    announce(text);
    setTimeout(() => setSaid((now) => (now === text ? null : now)), SAID_MS);
  };

  async function act(action) {
    setBusy(action);
    try {
      const { run: other } = await post(`/runs/${encodeURIComponent(run)}/${action}`);
      if (other && other !== run) location.hash = runHash(other);
      else onActed();
    } catch (error) {
      say(error.message);
    } finally {
      setBusy(null);
    }
  }

  async function copy(name, text) {
    if (await copyText(text)) say(`Copied: ${name}`);
    else setByHand({ name, text });
  }

  async function share() {
    try {
      const { url } = await post("/tickets", { run, seq: Math.max(0, seq) });
      await copy("a link for a colleague", new URL(url, location.origin).href);
    } catch (error) {
      say(error.message);
    }
  }

  const names = { cancel: "Cancel", retry: "Retry", resume: "Resume" };
  const offered = Object.keys(names).filter((name) => possible.includes(name) && !(ended && name === "cancel"));
  const why = request ? undefined : "The request is content: it needs the role see_content";
  return html`
    <span class="actions">
      <span class="said" aria-hidden="true">${said}</span>
      <span class="offered">${offered.map((name) => html`
        <button key=${name} class=${name === "cancel" ? "danger" : ""} disabled=${busy !== null} data-testid=${name}
          onClick=${() => (name === "cancel" ? setAsked("cancel") : act(name))}>${names[name]}</button>`)}</span>
      <span class="group" role="group" aria-label="Copy the request">
        <button disabled=${!request} title=${why} onClick=${() => copy("JSON", asJson(request))}>JSON</button>
        <button disabled=${!request} title=${why} onClick=${() => copy("curl", asCurl(request, location.origin))}>curl</button>
        <button disabled=${!request} title=${why} onClick=${() => copy("Python", asPython(request))}>Python</button>
      </span>
      ${!byLink.value && roles.value.has("see_runs") && html`<button onClick=${share} title="A link that shows this run alone, for some minutes">Link</button>`}
      ${!byLink.value && html`<button onClick=${() => setAsked("compare")} title="Side by side with another run">Compare</button>`}
      ${asked === "compare" && html`<${ChooseOther} run=${run} onClose=${() => setAsked(null)} />`}
      ${asked === "cancel" && html`
        <${Ask} title="Cancel this run?" yes="Cancel the run" onYes=${() => act("cancel")} onClose=${() => setAsked(null)}>
          <p>The provider's connection is closed. What was published stays.</p>
        <//>`}
      ${byHand && html`
        <${Dialog} title=${`Copy ${byHand.name}`} wide onClose=${() => setByHand(null)}>
          <textarea readonly rows="14" aria-label=${byHand.name} onFocus=${(event) => event.target.select()}>${byHand.text}</textarea>
        <//>`}
    </span>`;
}
