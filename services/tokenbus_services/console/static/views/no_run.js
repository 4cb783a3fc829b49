// What is shown in place of a run that cannot be shown.

import { html } from "../lib/html.js";
import { oneLine } from "../lib/safe_text.js";
import { session } from "../lib/store.js";

export function NoRun({ run, problem }) {
  return html`<main id="main" class="blank" tabindex="-1"><div role="alert"><p>${problem.message}</p><p class="mute mono">${oneLine(run)}</p>
    ${problem.status === 404 && html`<p class="mute">It never was, or it has expired${session.value?.tenant ? ", or it is another tenant's" : ""}.</p>`}</div></main>`;
}
