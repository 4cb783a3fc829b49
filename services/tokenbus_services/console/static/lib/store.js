// What the whole page shares: the session, the page's own stream, the address, the theme.

import { get, post, rememberCsrf, ROOT, useTicket } from "./api.js";
import { cost } from "./format.js";
import { batch, computed, effect, signal } from "./html.js";
import { FILTERS, parse } from "./route.js";
import { openStream } from "./stream.js";

const HOUR_POINTS = 360;

export const session = signal(null);
export const sessionError = signal(null);
export const route = signal(parse(location.hash));
export const river = signal(null);
export const health = signal(null);
export const plots = signal({ step_s: 10, points: [] });
export const connection = signal({ name: "connecting" });
export const announcement = signal("");
export const now = signal(Date.now());

/** An amount with the currency of the gateway's prices. */
export function price(value) {
  return cost(value, session.value?.currency);
}

export const roles = computed(() => new Set(session.value?.roles ?? []));
export const needsLogin = computed(() => session.value !== null && session.value.login && roles.value.size === 0);

/** Tell it to readers of the screen; seldom, for it interrupts. */
export function announce(text) {
  announcement.value = text;
}

/** A link shows one run alone: neither river nor health. */
export const byLink = computed(() => route.value.ticket !== null);

export async function loadSession() {
  useTicket(route.value.ticket);
  try {
    accept(await get("/session"));
    sessionError.value = null;
  } catch (error) {
    if (error.status === 401) accept({ name: null, roles: [], login: true, tenant: null, csrf: "", version: "" });
    else sessionError.value = error;
  }
}

export async function login(key) {
  accept(await post("/login", { key }));
}

export async function logout() {
  await post("/logout");
  river.value = null;
  health.value = null;
  await loadSession();
}

function accept(value) {
  rememberCsrf(value.csrf);
  session.value = value;
}

/** The page's one stream, for the filters of the address; opened again when they change. */
export function startPageStream() {
  const query = computed(() => {
    const filters = route.value.filters;
    const fields = new URLSearchParams();
    for (const name of FILTERS) if (filters[name]) fields.set(name, filters[name]);
    fields.set("limit", "200");
    return String(fields);
  });
  const wanted = computed(() => roles.value.has("see_runs") && !byLink.value);
  return effect(() => {
    if (!wanted.value) return undefined;
    const address = `${ROOT}/stream?${query.value}`;
    const stream = openStream({
      url: () => address,
      silentMs: 15_000,
      onState: (state) => {
        connection.value = state;
        if (state.name === "refused" && state.status === 401) loadSession();
      },
      onEvent: take,
    });
    return () => stream.close();
  });
}

function take({ name, data }) {
  const value = JSON.parse(data);
  if (name === "river") river.value = { ...value, received: Date.now() };
  else if (name === "health") health.value = value;
  else if (name === "plots") takePlots(value);
}

function takePlots(value) {
  const seen = new Map(plots.value.points.map((point) => [point.at, point]));
  for (const point of value.points) seen.set(point.at, point);
  const points = [...seen.values()].sort((one, other) => one.at - other.at).slice(-HOUR_POINTS);
  plots.value = { step_s: value.step_s, points };
}

const THEMES = ["auto", "light", "dark"];

export const theme = signal(storedTheme());

function storedTheme() {
  try {
    const stored = localStorage.getItem("tokenbus-theme");
    return THEMES.includes(stored) ? stored : "auto";
  } catch {
    return "auto";
  }
}

export function nextTheme() {
  theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length];
  try {
    localStorage.setItem("tokenbus-theme", theme.value);
  } catch {
    // Without storage the choice holds until the page is closed.
  }
}

export function startPage() {
  window.addEventListener("hashchange", () => {
    route.value = parse(location.hash);
  });
  effect(() => {
    document.documentElement.dataset.theme = theme.value;
  });
  setInterval(() => {
    if (!document.hidden) now.value = Date.now();
  }, 1000);
}

/** Change the address without a step in the browser's history. */
export function replaceHash(hash) {
  history.replaceState(null, "", hash || "#");
  batch(() => {
    route.value = parse(location.hash);
  });
}
