// The page's address: everything behind the #, so that a link opens the same view. Pure.

export const FILTERS = ["q", "state", "tenant", "provider", "error", "finish", "since", "until", "sort"];
const SESSION_FILTERS = ["words", "tenant", "metadata", "older_than"];
const VIEWS = ["health", "sessions", "waiting"];

export function parse(hash) {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  const seq = fields.get("seq");
  const filters = {};
  for (const name of FILTERS) if (fields.get(name)) filters[name] = fields.get(name);
  const named = VIEWS.includes(fields.get("view")) ? fields.get("view") : "river";
  const found = {};
  for (const name of SESSION_FILTERS) if (fields.get(name)) found[name] = fields.get(name);
  return {
    view: fields.get("run") ? "run" : fields.get("session") ? "session" : named,
    run: fields.get("run") ?? "",
    session: fields.get("session") ?? "",
    tenant: fields.get("tenant") ?? "",
    sessionFilters: found,
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
