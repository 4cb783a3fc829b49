// The page's address: everything behind the #, so that a link opens the same view. Pure.

const FILTERS = ["q", "state", "tenant", "provider", "error"];

export function parse(hash) {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  const seq = fields.get("seq");
  const filters = {};
  for (const name of FILTERS) if (fields.get(name)) filters[name] = fields.get(name);
  return {
    view: fields.get("run") ? "run" : fields.get("view") === "health" ? "health" : "river",
    run: fields.get("run") ?? "",
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
