// A run's request as something to paste: JSON, a curl line, a Python program.

export function asJson(request) {
  return JSON.stringify(request, null, 2);
}

/** POSIX shell. A single quote ends the quoted text, so it is written outside of it. */
export function asCurl(request, origin) {
  const { id: _id, provider, model, ...rest } = request;
  const body = { model: provider ? `${provider}/${model}` : model, ...rest };
  delete body.type;
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl -N ${origin}/runs \\`,
    `  -H 'content-type: application/json' \\`,
    `  -H 'accept: text/event-stream' \\`,
    `  -H "authorization: Bearer $TOKENBUS_KEY" \\`,
    `  -d '${quoted}'`,
    "",
  ].join("\n");
}

export function asPython(request) {
  const { id: _id, type: _type, ...rest } = request;
  return [
    "import asyncio",
    "",
    "from tokenbus import Chunk, Client",
    "",
    `REQUEST = ${python(rest, 0)}`,
    "",
    "",
    "async def main() -> None:",
    "    async with Client() as bus:",
    "        async for event in bus.stream(REQUEST):",
    "            if isinstance(event, Chunk) and event.visible:",
    '                print(event.text, end="", flush=True)',
    "",
    "",
    "asyncio.run(main())",
    "",
  ].join("\n");
}

/** A Python literal. JSON's strings are Python's if lone surrogates and controls stay escaped, which stringify does. */
function python(value, depth) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  const items = Array.isArray(value)
    ? value.map((item) => python(item, depth + 1))
    : Object.entries(value).map(([key, item]) => `${JSON.stringify(key)}: ${python(item, depth + 1)}`);
  if (items.length === 0) return open + close;
  const pad = "    ".repeat(depth + 1);
  return `${open}\n${items.map((item) => `${pad}${item},\n`).join("")}${"    ".repeat(depth)}${close}`;
}
