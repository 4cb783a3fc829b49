// Where two requests differ, by the path of each value. Pure.

const AT_MOST = 200;

/** Values of a JSON object by their paths, as `messages[0].content`. */
export function leaves(value, path = "", found = new Map()) {
  if (value === null || typeof value !== "object") found.set(path, JSON.stringify(value));
  else if (Array.isArray(value)) value.forEach((one, index) => leaves(one, `${path}[${index}]`, found));
  else for (const [name, one] of Object.entries(value)) leaves(one, path ? `${path}.${name}` : name, found);
  return found;
}

/** Paths at which the two differ, each with both values; undefined where one has none. */
export function differences(one, other) {
  const left = leaves(one ?? {});
  const right = leaves(other ?? {});
  const paths = [...new Set([...left.keys(), ...right.keys()])].filter((path) => left.get(path) !== right.get(path));
  return { total: paths.length, rows: paths.slice(0, AT_MOST).map((path) => ({ path, left: left.get(path), right: right.get(path) })) };
}
