"""Writes what is generated: the JSON Schemas of requests and events (shared/tokenbus/schemas), src/types.ts from them,
src/generated.ts (the scripts that this client runs, the kinds of events of each topic, the words
of sentences), and the README's table.

`make schemas`; with ``--check`` nothing is written, and the exit code says whether all files are current.
"""

from __future__ import annotations

import json
import re
import sys
from inspect import cleandoc
from pathlib import Path
from typing import Any

import tokenbus
import tokenbus.sync
from tokenbus.bus.scripts.script import all_scripts
from tokenbus.client.subscriptions.topic_reader import kinds_of_topics
from tokenbus.events import schemas
from tokenbus.shaping.sentences import BEFORE_NUMBER, GOES_ON

ROOT = Path(__file__).parents[3]
SCHEMAS = ROOT / "shared" / "tokenbus" / "schemas"
TYPES = ROOT / "clients" / "typescript" / "src" / "types.ts"
GENERATED = TYPES.with_name("generated.ts")
RUN = ("commit", "leases.acquire", "leases.present", "leases.release", "leases.renew", "topics.mirror_offset")
"""The scripts of a group's worker."""
README = TYPES.parents[1] / "README.md"
TABLE = re.compile(r"(?<=<!-- written by scripts/generate_types.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
LEFT_OUT = {
    "open": "it connects when it is first used",
}
"""Why the client for Node does without."""
SCALARS = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def definitions() -> dict[str, Any]:
    """All definitions of both schemas. What both have is the same in both."""
    return dict(sorted((schemas.schema("events")["$defs"] | schemas.schema("requests")["$defs"]).items()))


def typescript(defs: dict[str, Any]) -> str:
    """The definitions as TypeScript. A field that may be left out is never null here: on the wire it is left out."""
    lines = ["// Written by scripts/generate_types.py from shared/tokenbus/schemas. Do not edit."]
    for name, one in defs.items():
        lines.append("")
        if about := one.get("description"):
            lines += ["/**", *(f" * {line}".rstrip() for line in cleandoc(about).splitlines()), " */"]
        if one.get("type") == "object":
            lines += [f"export interface {name} {{", *fields(one), "}"]
        else:
            lines.append(f"export type {name} = {type_of(one)};")
    return "\n".join(lines) + "\n"


def generated() -> str:
    """The scripts as the server gets them, and the names that `kinds` of a subscription may have."""
    texts = {one.name: one.text for one in all_scripts() if one.name in RUN}
    events, blocks = kinds_of_topics()
    names = {topic: sorted(kinds) for topic, kinds in events.items()}
    words = {language: sorted(abbreviations) for language, abbreviations in GOES_ON.items()}
    return "\n".join(
        (
            "// Written by scripts/generate_types.py from shared/tokenbus. Do not edit.",
            f"export const SCRIPTS = {json.dumps(texts, indent=2)} as const;",
            f"export const EVENT_KINDS = {json.dumps(names, indent=2)} as const;",
            f"export const GOES_ON = {json.dumps(words, ensure_ascii=False)} as const;",
            f"export const BEFORE_NUMBER = {json.dumps(sorted(BEFORE_NUMBER), ensure_ascii=False)} as const;",
            f"export const BLOCK_KINDS = {json.dumps(sorted(blocks))} as const;",
            "",
        )
    )


def abilities() -> str:
    """What each client can, by the names of its public methods, in Python's spelling."""
    python = _public(tokenbus.Client) | _public(tokenbus.Run) - {"events"} | {"group"}
    sync = _public(tokenbus.sync.Client) | _public(tokenbus.sync.Run) - {"events"} | {"group"}
    source = (TYPES.parent / "client.ts").read_text(encoding="utf-8")
    named = re.findall(r"^  (?:async |get )?\*?(\w+)(?:<[^(]*>)?\(", source, re.MULTILINE)
    node = {re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name) for name in named} - {"constructor"}
    lines = ["| | Node | Python | `tokenbus.sync` |", "|---|---|---|---|"]
    for name in sorted((python | sync | node) - {"aclose"}):
        asynchronous = "yes" if name in python or (name == "close" and "aclose" in python) else "no"
        here = "yes" if name in node else f"no: {LEFT_OUT[name]}"
        lines.append(f"| `{name}` | {here} | {asynchronous} | {'yes' if name in sync else 'no'} |")
    return "\n".join([*lines, ""])


def _public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def fields(one: dict[str, Any]) -> list[str]:
    required = set(one.get("required", ()))
    lines: list[str] = []
    for field, kind in one["properties"].items():
        optional = field not in required
        lines.append(f"  {field}{'?' if optional else ''}: {type_of(kind, nullable=not optional)};")
    return lines


def type_of(kind: dict[str, Any], *, nullable: bool = True) -> str:
    """A schema as a type expression. Raises KeyError for one that this generator does not know."""
    if "$ref" in kind:
        return kind["$ref"].removeprefix(schemas.REF)
    if "enum" in kind:
        return " | ".join(json.dumps(value) for value in kind["enum"] if nullable or value is not None)
    if "const" in kind:
        return json.dumps(kind["const"])
    if "anyOf" in kind:
        kinds = [one for one in kind["anyOf"] if nullable or one.get("type") != "null"]
        return " | ".join(dict.fromkeys(type_of(one) for one in kinds))
    if not kind.keys() - {"default", "description"}:
        return "unknown"
    if kind["type"] == "array":
        items = type_of(kind["items"])
        return f"({items})[]" if "|" in items else f"{items}[]"
    if kind["type"] == "object":
        values = kind.get("additionalProperties")
        return f"Record<string, {type_of(values) if isinstance(values, dict) else 'unknown'}>"
    return SCALARS[kind["type"]]


def main() -> int:
    files = {SCHEMAS / f"{name}.json": schemas.text(name) for name in schemas.UNIONS}
    files[TYPES] = typescript(definitions())
    files[GENERATED] = generated()
    files[README] = TABLE.sub(lambda _: abilities(), README.read_text(encoding="utf-8"))
    if "--check" not in sys.argv[1:]:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        return 0
    old = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in old:
        print(f"{path.relative_to(ROOT)} is not current: run make schemas", file=sys.stderr)  # noqa: T201
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
