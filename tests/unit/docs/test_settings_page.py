"""docs/reference/settings.md names exactly the settings and variables that exist, with values and defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from tests.rows import over_rows
from tests.unit.docs.pages import ROOT, page, quoted, rows, sections
from tokenbus.providers import registry
from tokenbus_services.settings import DEFAULT_PROVIDERS, Settings

PAGE = sections(page("reference/settings.md"))
Row = tuple[str, str]
"""What a value may be, and the default."""


def tables(kind: inspect.Type, path: str) -> Iterator[tuple[str, inspect.StructType]]:
    """All tables in a value, by the headings that they have in the file."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from tables(one, path)
        case inspect.StructType():
            tag = "" if kind.tag is None else f' {kind.tag_field} = "{kind.tag}"'
            yield (f"[{path}]{tag}" if path else "The file"), kind
            for field in kind.fields:
                yield from tables(field.type, f"{path}.{field.encode_name}" if path else field.encode_name)
        case inspect.DictType():
            yield from tables(kind.value_type, f"{path}.NAME")
        case inspect.VarTupleType():
            yield from tables(kind.item_type, f"[{path.strip('[').replace(']', '')}]")
        case _:
            pass


def values(kind: inspect.Type) -> str:
    """What a value may be, in the page's words."""
    match kind:
        case inspect.UnionType():
            kinds = [values(one) for one in kind.types if not isinstance(one, inspect.NoneType)]
            return " or ".join(dict.fromkeys(kinds))
        case inspect.StructType():
            return "table"
        case inspect.DictType():
            inner = values(kind.value_type)
            return {"table": "tables", "anything": "table"}.get(inner, f"table of {inner}")
        case inspect.VarTupleType():
            inner = values(kind.item_type)
            return "tables" if inner == "table" else f"list of {inner}"
        case inspect.IntType() | inspect.FloatType():
            return ("whole number" if isinstance(kind, inspect.IntType) else "number") + bounds(kind)
        case inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case inspect.Metadata():
            return values(kind.type)
        case _:
            return "anything"


def bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.gt is not None:
        return f" above {kind.gt}" + (f", to {kind.le}" if kind.le is not None else "")
    if kind.ge is None:
        return ""
    return f" from {kind.ge}" if kind.le is None else f" {kind.ge} to {kind.le}"


def row_of(field: inspect.Field) -> Row:
    """The cells that a setting must have, its default as JSON."""
    kind = values(field.type)
    if field.required:
        return kind, "required"
    value: Any = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    value = msgspec.to_builtins(value)
    if kind == "tables" or (kind == "table" and value != {}) or isinstance(field.type, inspect.StructType):
        return kind, ""
    if kind == "table" and value is None:
        return kind, ""
    return kind, "none" if value is None else json.dumps(value)


THERE = dict(tables(inspect.type_info(Settings), ""))
SHOWN = {name: text for heading, text in PAGE.items() for name in heading.split(", ") if heading != "Environment"}


def test_each_table_of_the_file_is_on_the_page_and_no_other() -> None:
    assert set(SHOWN) == set(THERE)


@over_rows("name", sorted(THERE))
def test_a_tables_settings_are_as_the_page_says(name: str) -> None:
    documented: dict[str, Row] = {}
    for key, kind, default, what in rows(SHOWN[name]):
        assert what, key
        documented[quoted(key)] = kind, default if default in ("required", "none", "") else quoted(default)
    expected = {field.encode_name: row_of(field) for field in THERE[name].fields}
    assert documented.keys() == expected.keys()
    for key, (kind, default) in expected.items():
        assert documented[key][0] == kind, key
        if default in ("required", "none", ""):
            assert documented[key][1] == default, key
        else:
            assert json.loads(documented[key][1]) == json.loads(default), key


def test_each_environment_variable_is_on_the_page_and_no_other() -> None:
    code = "".join(path.read_text() for root in ("shared", "services") for path in (ROOT / root).rglob("*.py"))
    used = set(re.findall(r'"(TOKENBUS_[A-Z_]+)"', code))
    keys = {registry.get(settings.api).default_key_env for settings in DEFAULT_PROVIDERS.values()}
    table = rows(PAGE["Environment"])
    assert all(what and wrong for _, what, wrong in table)
    documented = {quoted(name) for name, _, _ in table}
    assert len(used) > 5
    assert documented == used | keys
