"""Every error in any settings table is reported with its place: unknown keys, choices, types, patterns."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from tests.rows import over_rows
from tokenbus_services.settings import Settings
from tokenbus_services.settings.errors import problems_of

Path = tuple[str | int, ...]
NAME = "a name"
WRONG = dt.time(7, 32)
"""A value that TOML has and no setting takes."""


def walk(kind: inspect.Type, path: Path, tag: str = "") -> Iterator[tuple[Path, inspect.Type]]:
    """Each value that the settings have, with a path to it. Of a table of several kinds, each of them."""
    yield path, kind
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                if not isinstance(one, inspect.NoneType):
                    yield from walk(one, path)
        case inspect.StructType():
            for field in kind.fields:
                yield from walk(field.type, (*path, field.encode_name))
        case inspect.DictType():
            yield from walk(kind.key_type, (*path, "KEY"))
            yield from walk(kind.value_type, (*path, NAME))
        case inspect.VarTupleType() | inspect.ListType():
            yield from walk(kind.item_type, (*path, 0))
        case inspect.Metadata():
            yield from walk(kind.type, path)
        case _:
            pass


ROOT = inspect.type_info(Settings)
VALUES = list(walk(ROOT, ()))
TABLES = [(path, kind) for path, kind in VALUES if isinstance(kind, inspect.StructType)]
CHOICES = [(path, kind) for path, kind in VALUES if isinstance(kind, inspect.LiteralType)]


def settings_with(path: Path, value: object) -> dict[str, Any]:
    """Settings with this value alone, and what the tables around it must have."""
    made = value
    for depth in range(len(path) - 1, -1, -1):
        if isinstance(path[depth], int):
            made = [made]
        else:
            tables = [kind for at, kind in TABLES if at == path[:depth]]
            around = [kind for kind in tables if any(field.encode_name == path[depth] for field in kind.fields)]
            needs = {} if path[depth] == NAME or not around else required(around[-1], str(path[depth]))
            made = {**needs, str(path[depth]): made}
    assert isinstance(made, dict)
    return made


def required(table: inspect.StructType, beside: str) -> dict[str, Any]:
    tagged = [kind for at, kind in TABLES if kind.cls is table.cls]
    of_kind = {table.tag_field: tagged[0].tag} if table.tag_field else {}
    return {**of_kind, **{f.encode_name: sample(f.type, f.encode_name) for f in table.fields if f.required}}


def sample(kind: inspect.Type, name: str) -> Any:
    match kind:
        case inspect.Metadata():
            return sample(kind.type, name)
        case inspect.StrType():
            return {"api": "gemini", "use": "a:b"}.get(name, "x/y")
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.VarTupleType() | inspect.ListType():
            return [sample(kind.item_type, "")]
        case inspect.StructType():
            return required(kind, "")
        case _:
            return 1


def said_of(raw: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, Settings)
    [found] = problems_of(raw, Settings)
    return found


def shown(path: Path) -> str:
    text = "".join(f"[{s}]" if isinstance(s, int) else f'."{s}"' if s == NAME else f".{s}" for s in path)
    return text.removeprefix(".")


def ids(cases: list[tuple[Path, Any]]) -> list[str]:
    return [f"{shown(path) or 'file'}-{getattr(kind, 'tag', None)}" for path, kind in cases]


@over_rows(("path", "table"), TABLES, ids=ids(TABLES))
def test_an_unknown_key_is_named_with_the_nearest_and_all_that_are_known(path: Path, table: inspect.StructType) -> None:
    known = [field.encode_name for field in table.fields]
    typo = f"{known[-1]}x" if known else "any"
    tag = {table.tag_field: table.tag} if table.tag_field else {}
    where, problem = said_of(settings_with(path, {**required(table, ""), **tag, typo: 1}))
    assert where == shown((*path, typo))
    assert (f"did you mean {known[-1]!r}?" if known else "Known keys here: type") in problem
    assert all(key in problem for key in known)


@over_rows(("path", "choice"), CHOICES, ids=ids(CHOICES))
def test_a_wrong_choice_is_named_with_the_nearest_and_all_there_are(path: Path, choice: inspect.LiteralType) -> None:
    nearest = next(str(value) for value in choice.values if value)
    where, problem = said_of(settings_with(path, f"{nearest}x"))
    assert where == shown(path)
    assert f"did you mean {nearest!r}?" in problem
    assert all(str(value) in problem for value in choice.values)


@over_rows(("path", "table"), TABLES, ids=ids(TABLES))
def test_a_value_of_the_wrong_kind_is_named_in_each_key_of_each_table(path: Path, table: inspect.StructType) -> None:
    tag = {table.tag_field: table.tag} if table.tag_field else {}
    for field in table.fields:
        where, problem = said_of(settings_with(path, {**required(table, ""), **tag, field.encode_name: WRONG}))
        assert where == shown((*path, field.encode_name))
        assert problem.startswith("must be "), problem
        assert "Expected" not in problem, "msgspec's words are none for a reader of TOML"


@over_rows("table", {kind.cls: kind for _, kind in TABLES}.values(), ids=lambda t: t.cls.__name__)
def test_a_missing_key_is_named(table: inspect.StructType) -> None:
    path = next(at for at, kind in TABLES if kind.cls is table.cls)
    tag = {table.tag_field: table.tag} if table.tag_field else {}
    for field in table.fields:
        if field.required:
            there = {**required(table, ""), **tag}
            del there[field.encode_name]
            where, problem = said_of(settings_with(path, there))
            assert (where, problem) == (shown(path), f"the key `{field.encode_name}` is missing")


BOUNDED = [
    (path, kind)
    for path, kind in VALUES
    if isinstance(kind, inspect.IntType | inspect.FloatType) and (kind.ge, kind.gt) != (None, None)
]


@over_rows(("path", "kind"), BOUNDED, ids=ids(BOUNDED))
def test_a_number_out_of_bounds_is_named_with_them(path: Path, kind: inspect.IntType | inspect.FloatType) -> None:
    where, problem = said_of(settings_with(path, -1))
    assert where == shown(path)
    assert problem.startswith("must be a ")
    assert f" {kind.ge if kind.ge is not None else kind.gt}" in problem
    assert problem.endswith(", not -1")


WITH_WORDS = [(path, kind) for path, kind in VALUES if isinstance(kind, inspect.Metadata)]
PATTERNS = {kind.type.pattern for _, kind in WITH_WORDS if isinstance(kind.type, inspect.StrType)}


@over_rows(("path", "kind"), WITH_WORDS, ids=ids(WITH_WORDS))
def test_a_value_that_does_not_match_is_named_with_the_words_of_its_type(path: Path, kind: inspect.Metadata) -> None:
    wrong = " sk-secret\n"
    if path[-1] == "KEY":
        where, problem = said_of(settings_with(path[:-1], {wrong: "x"}))
        path = path[:-1]
    elif path[-1] == NAME:
        path = (*path[:-1], "name")
        where, problem = said_of(settings_with(path[:-1], {"name": wrong}))
    else:
        where, problem = said_of(settings_with(path, wrong))
    assert where == shown(path)
    assert (kind.extra_json_schema or {})["description"] in problem
    assert "sk-secret" not in problem, "a secret in the wrong place is not shown"


def test_every_pattern_has_words() -> None:
    assert {k.pattern for _, k in VALUES if isinstance(k, inspect.StrType) and k.pattern} == PATTERNS


def test_settings_that_are_right_have_no_problem() -> None:
    for path, kind in TABLES:
        tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
        raw = settings_with(path, {**required(kind, ""), **tag})
        msgspec.convert(raw, Settings)
        assert problems_of(raw, Settings) == [], path
