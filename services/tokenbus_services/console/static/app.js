// The console's page: its frame, and the view that the address names.

import { html, render, signal, useEffect } from "./lib/html.js";
import { shortcut } from "./lib/keys.js";
import {
  announcement, byLink, connection, health, loadSession, logout, needsLogin, nextTheme, now, river, roles, route,
  session, sessionError, startPage, startPageStream, theme,
} from "./lib/store.js";
import { Help } from "./views/help.js";
import { Health } from "./views/health.js";
import { History } from "./views/history.js";
import { Login } from "./views/login.js";
import { Pair } from "./views/pair.js";
import { River } from "./views/river.js";
import { RunView } from "./views/run.js";
import { SessionView } from "./views/session.js";
import { Sessions } from "./views/sessions.js";
import { Inbox, WaitBadge } from "./views/waits.js";

const helpOpen = signal(false);

function App() {
  useEffect(() => shortcut("?", () => { helpOpen.value = true; }), []);
  if (sessionError.value) return html`<${Unreachable} />`;
  if (session.value === null) return html`<main class="blank" aria-busy="true"></main>`;
  if (needsLogin.value && !byLink.value) return html`<${Login} />`;
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <${Bar} />
    <${Notice} />
    <${View} />
    <div class="sr" role="status" aria-live="polite">${announcement.value}</div>
    ${helpOpen.value && html`<${Help} onClose=${() => { helpOpen.value = false; }} />`}
  `;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function View() {
  const { view, run, other, session: name, tenant } = route.value;
  if (view === "run") return html`<${RunView} key=${run} run=${run} />`;
  if (byLink.value) return html`<main id="main" class="blank" tabindex="-1"><p>This link shows one run alone.</p></main>`;
  if (!roles.value.has("see_runs")) return html`<main id="main" class="blank" tabindex="-1"><p>You have no role that shows runs.</p></main>`;
  if (view === "pair") return html`<${Pair} key=${`${run} ${other}`} run=${run} other=${other} />`;
  if (view === "session") return html`<${SessionView} key=${`${tenant} ${name}`} name=${name} tenant=${tenant} />`;
  if (view === "history") return html`<${History} />`;
  if (view === "sessions") return html`<${Sessions} />`;
  if (view === "waiting") return html`<${Inbox} />`;
  return view === "health" ? html`<${Health} />` : html`<${River} />`;
}

const THEME_NAMES = { auto: "as the system", light: "light", dark: "dark" };

function Bar() {
  const { view } = route.value;
  const who = session.value;
  const dead = health.value?.dead?.entries ?? 0;
  const tab = (name, href, text, more) => html`
    <a class="tab" href=${href} aria-current=${view === name ? "page" : undefined}>${text}${more}</a>`;
  return html`
    <header class="bar">
      <a class="brand" href="#" aria-label="tokenbus console"><${Mark} /><span class="wide">tokenbus</span></a>
      ${!byLink.value && html`
        <nav aria-label="Views">
          ${tab("river", "#", "River")}
          ${tab("history", "#view=history", "History")}
          ${tab("sessions", "#view=sessions", "Sessions")}
          ${tab("waiting", "#view=waiting", "Waiting", roles.value.has("see_runs") && html`<${WaitBadge} />`)}
          ${tab("health", "#view=health", "Health", dead > 0 && html`<span class="badge" title="dead letters">${dead}</span>`)}
        </nav>`}
      <span class="grow"></span>
      ${!byLink.value && html`<${Connection} />`}
      ${who.tenant && html`<span class="chip wide" title="You see the runs of this tenant">${who.tenant}</span>`}
      ${who.name && html`<span class="mute wide">${who.name}</span>`}
      <button class="icon" onClick=${nextTheme} title=${`Theme: ${THEME_NAMES[theme.value]}`} aria-label=${`Theme: ${THEME_NAMES[theme.value]}. Change it`}>
        <${ThemeMark} name=${theme.value} />
      </button>
      <button class="icon" onClick=${() => { helpOpen.value = true; }} title="Keys (?)" aria-label="Keyboard shortcuts">?</button>
      ${who.login && who.name && !byLink.value && html`<button class="quiet" onClick=${logout}>Log out</button>`}
    </header>`;
}

function Mark() {
  return html`<svg class="mark" viewBox="0 0 32 32" width="22" height="22" aria-hidden="true">
    <path d="M5 9h22M5 16h14M5 23h7" fill="none" stroke="currentColor" stroke-width="3" stroke-linecap="round" />
    <circle class="one" cx="25.5" cy="16" r="2.2" /><circle class="two" cx="18.5" cy="23" r="2.2" />
  </svg>`;
}

function ThemeMark({ name }) {
  const shape = {
    auto: html`<circle cx="8" cy="8" r="5.5" fill="none" stroke="currentColor" stroke-width="1.5" /><path d="M8 2.5a5.5 5.5 0 0 1 0 11z" fill="currentColor" />`,
    light: html`<circle cx="8" cy="8" r="3.2" fill="currentColor" /><path d="M8 1v2M8 13v2M1 8h2M13 8h2M3 3l1.4 1.4M11.6 11.6 13 13M13 3l-1.4 1.4M4.4 11.6 3 13" stroke="currentColor" stroke-width="1.4" />`,
    dark: html`<path d="M13.5 9.7A6 6 0 0 1 6.3 2.5a6 6 0 1 0 7.2 7.2z" fill="currentColor" />`,
  }[name];
  return html`<svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">${shape}</svg>`;
}

/** How fresh the page is: live, behind, or without the gateway. */
function Connection() {
  const { kind, text, more } = freshness();
  // Another text is another element: it appears, and moves nothing.
  return html`<span key=${text} class=${`fresh ${kind}`} data-testid="connection"><i></i>${text}${more && html`<span class="wide">${more}</span>`}</span>`;
}

const BEHIND_MS = 3000;

function freshness() {
  const state = connection.value;
  if (state.name === "paused") return { kind: "idle", text: "paused" };
  if (state.name === "waiting") {
    const seconds = Math.max(0, Math.ceil((state.retry_at - now.value) / 1000));
    return { kind: "off", text: "disconnected", more: seconds > 0 ? ` · again in ${seconds} s` : " · trying" };
  }
  if (state.name === "refused") return { kind: "off", text: "refused" };
  if (!river.value || state.name === "connecting") return { kind: "idle", text: "connecting" };
  const late = Math.max(river.value.behind_ms ?? 0, now.value - river.value.received - 1000);
  if (late > BEHIND_MS) return { kind: "late", text: `${Math.round(late / 1000)} s behind` };
  return { kind: "on", text: "live" };
}

/** A line beneath the bar while what is shown is old. */
function Notice() {
  const state = connection.value;
  if (byLink.value || !river.value || !["waiting", "refused"].includes(state.name)) return null;
  const seconds = Math.round((now.value - river.value.received) / 1000);
  if (seconds * 1000 < BEHIND_MS) return null;
  return html`<p class="notice">The gateway does not answer. What you see is ${seconds} s old; the page goes on by itself.</p>`;
}

function Unreachable() {
  useEffect(() => {
    const timer = setInterval(loadSession, 2000);
    return () => clearInterval(timer);
  }, []);
  return html`<main class="blank"><p role="alert">The gateway does not answer: ${sessionError.value.message}</p></main>`;
}

startPage();
startPageStream();
render(html`<${App} />`, document.getElementById("app"));
loadSession();
