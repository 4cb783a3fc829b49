"""Writes the JSON Schemas of requests and events (shared/tokenbus/schemas), and src/types.ts from them.

`make schemas`; with ``--check`` nothing is written, and the exit code says whether all files are current.
"""

from __future__ import annotations

import json
import sys
from inspect import cleandoc
from pathlib import Path
from typing import Any

from tokenbus.events import schemas

ROOT = Path(__file__).parents[3]
SCHEMAS = ROOT / "shared" / "tokenbus" / "schemas"
TYPES = ROOT / "clients" / "typescript" / "src" / "types.ts"
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
