"""Writes clients/schema.json from the public events and requests of tokenbus, and src/types.ts from that.

`python clients/typescript/scripts/generate_types.py`; with ``--check`` nothing is written, and the exit code says
whether both files are current.
"""

from __future__ import annotations

import json
import sys
from inspect import cleandoc
from pathlib import Path
from typing import Any, Union, get_args

import msgspec

from tokenbus.events import decisions, public, requests

CLIENTS = Path(__file__).parents[2]
SCHEMA = CLIENTS / "schema.json"
TYPES = CLIENTS / "typescript" / "src" / "types.ts"
REF = "#/$defs/"
UNIONS: dict[str, Any] = {
    "TerminalEvent": public.TerminalEvent,
    "ChunkTopicEvent": public.Chunk,
    "BlockTopicEvent": public.BlockTopicEvent,
    "RunTopicEvent": public.RunTopicEvent,
    "PublicEvent": public.PublicEvent,
    "DecisionTopicEvent": decisions.Decided,
    "Request": requests.Request,
}
"""What can come on the topics, in a log, and go onto the inbound stream."""
SCALARS = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def members(union: Any) -> list[Any]:
    """The classes of a union that travel: `UnknownEvent` is never written."""
    found = [one for member in get_args(union) for one in members(member)] or [union]
    return [one for one in found if one is not public.UnknownEvent]


def components(types: list[Any]) -> tuple[Any, dict[str, Any]]:
    """The schemas of these types, and of what they refer to. `object` is any JSON."""
    hook = {object: {"description": "Any JSON."}}
    found, objects = msgspec.json.schema_components(types, schema_hook=hook.__getitem__, ref_template=REF + "{name}")
    return found, objects


def schema() -> dict[str, Any]:
    """One JSON Schema with a definition for each object, and one for each union of them."""
    unions = {name: members(union) for name, union in UNIONS.items()}
    structs = dict.fromkeys(one for union in unions.values() for one in union)
    _, objects = components(list(structs))
    defs: dict[str, Any] = dict(sorted(objects.items()))
    for name, union in unions.items():
        defs[name] = components([Union[tuple(union)]])[0][0]  # noqa: UP007
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Public events and requests of tokenbus",
        "$defs": defs,
    }


def typescript(defs: dict[str, Any]) -> str:
    """The definitions as TypeScript. A field that may be left out is never null here: on the wire it is left out."""
    lines = ["// Written by scripts/generate_types.py from clients/schema.json. Do not edit."]
    for name, one in defs.items():
        lines.append("")
        if about := one.get("description"):
            lines += ["/**", *(f" * {line}".rstrip() for line in cleandoc(about).splitlines()), " */"]
        if one.get("type") == "object":
            lines += [f"export interface {name} {{", *fields(one), "}"]
        else:
            lines.append(f"export type {name} = {type_of(one)};")
    return "\n".join(lines) + "\n"


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
        return kind["$ref"].removeprefix(REF)
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
    found = schema()
    files = {SCHEMA: json.dumps(found, indent=2, ensure_ascii=False) + "\n", TYPES: typescript(found["$defs"])}
    if "--check" not in sys.argv[1:]:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        return 0
    old = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in old:
        print(f"{path.relative_to(CLIENTS)} is not current: run {Path(__file__).name}", file=sys.stderr)  # noqa: T201
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
