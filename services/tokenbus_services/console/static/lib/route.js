// The page's address: everything behind the #, so that a link opens the same view. Pure.

export const FILTERS = ["q", "state", "tenant", "provider", "error", "finish", "since", "until", "sort"];
const SESSION_FILTERS = ["words", "tenant", "metadata", "older_than"];
const HISTORY_FILTERS = ["q", "words", "metadata", "tenant", "state", "provider", "finish", "error", "since", "until"];
const VIEWS = ["health", "history", "sessions", "waiting"];

export function parse(hash) {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  const seq = fields.get("seq");
  const filters = given(fields, FILTERS);
  const named = VIEWS.includes(fields.get("view")) ? fields.get("view") : "river";
  const found = given(fields, SESSION_FILTERS);
  return {
    view: fields.get("run") ? (fields.get("with") ? "pair" : "run") : fields.get("session") ? "session" : named,
    run: fields.get("run") ?? "",
    other: fields.get("with") ?? "",
    session: fields.get("session") ?? "",
    tenant: fields.get("tenant") ?? "",
    sessionFilters: found,
    historyFilters: given(fields, HISTORY_FILTERS),
    seq: seq !== null && /^\d{1,15}$/.test(seq) ? Number(seq) : null,
    ticket: fields.get("ticket"),
    filters,
  };
}

export function runHash(run, seq = null) {
  const fields = new URLSearchParams({ run });
  if (seq !== null) fields.set("seq", String(seq));
  return `#${fields}`;
}

function given(fields, names) {
  return Object.fromEntries(names.filter((name) => fields.get(name)).map((name) => [name, fields.get(name)]));
}

export function historyHash(filters) {
  return `#${new URLSearchParams({ view: "history", ...given(new Map(Object.entries(filters)), HISTORY_FILTERS) })}`;
}

export function pairHash(run, other) {
  return `#${new URLSearchParams({ run, with: other })}`;
}

export function riverHash(filters) {
  const fields = new URLSearchParams();
  for (const name of FILTERS) if (filters[name]) fields.set(name, filters[name]);
  return `#${fields}`;
}

export function sessionHash(session, tenant) {
  return `#${new URLSearchParams({ session, ...(tenant ? { tenant } : {}) })}`;
}

export function sessionsHash(filters) {
  const fields = new URLSearchParams({ view: "sessions" });
  for (const name of SESSION_FILTERS) if (filters[name]) fields.set(name, filters[name]);
  return `#${fields}`;
}
