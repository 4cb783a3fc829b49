// Numbers, times and names as people read them. Pure.

const WHOLE = new Intl.NumberFormat("en");

export function count(value) {
  return value === null || value === undefined ? "–" : WHOLE.format(value);
}

export function plural(value, what) {
  return `${count(value)} ${what}${value === 1 ? "" : "s"}`;
}

/** 950, 12.4k, 3.1M: never wider than five characters. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1000) return String(Math.round(value));
  if (value < 1e6) return `${trim(value / 1e3)}k`;
  if (value < 1e9) return `${trim(value / 1e6)}M`;
  return `${trim(value / 1e9)}G`;
}

function trim(value) {
  return value < 100 ? value.toFixed(1) : String(Math.round(value));
}

export function bytes(value) {
  return value === null || value === undefined ? "–" : `${short(value)}B`;
}

export function rate(value) {
  if (value === null || value === undefined) return "";
  return value >= 0.05 && value < 10 ? value.toFixed(1) : String(Math.round(value));
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1000) return `${Math.round(value)} ms`;
  if (value < 60_000) return `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60_000);
  return `${minutes} min ${Math.floor((value % 60_000) / 1000)} s`;
}

export function age(value) {
  if (value === null || value === undefined) return "–";
  const seconds = Math.max(0, Math.floor(value / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")}`;
  return `${Math.floor(seconds / 86_400)} d ${Math.floor((seconds % 86_400) / 3600)} h`;
}

export function clock(at) {
  const time = new Date(at);
  return [time.getHours(), time.getMinutes(), time.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

/** A Unix time in ms as a field shows it: in the time of this machine. */
export function localTime(ms) {
  if (!/^\d{1,15}$/.test(ms ?? "")) return "";
  const at = new Date(Number(ms));
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
}

/** An amount in the currency of the configured prices, as `$0.0042` or `CHF 0.0042`. */
export function cost(value, currency) {
  if (value === null || value === undefined) return "";
  const digits = value === 0 ? 0 : value < 0.01 ? 5 : value < 1 ? 4 : 2;
  const form = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return new Intl.NumberFormat("en", currency ? { ...form, style: "currency", currency } : form).format(value);
}

/** What stays on a narrow screen: a run's id begins with its time, so its end tells runs apart. */
export function shortId(run) {
  return run.length <= 13 ? run : `…${run.slice(-12)}`;
}

const NAMES = {
  queued: "queued",
  waiting: "waiting",
  first_byte: "first byte",
  thinking: "thinking",
  speaking: "speaking",
  tool: "tool",
  retrying: "retrying",
  judged: "judged",
  completed: "completed",
  incomplete: "incomplete",
  failed: "failed",
  cancelled: "cancelled",
};

export const OPEN_STATES = ["queued", "waiting", "first_byte", "thinking", "speaking", "tool", "retrying", "judged"];
export const ENDED_STATES = ["completed", "incomplete", "failed", "cancelled"];

export function stateName(state) {
  return NAMES[state] ?? state;
}
