"""What is wrong in a settings file: the place as TOML writes it, and what would be right there. Pure.

The words come from the types: their kinds and bounds, and the `Meta(description=…)` of a value that has a pattern.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import msgspec
from msgspec import inspect

from tokenbus.core.nearest_name import nearest

Path: TypeAlias = tuple[str | int, ...]
"""Keys of tables, and indexes of lists."""
Problem: TypeAlias = tuple[Path, str | inspect.StructType]
"""The problem of a value; for an unknown key, the table that does not have it."""

_KINDS: Final[Mapping[type, str]] = {
    dict: "a table",
    list: "a list",
    str: "text in quotes",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dt.datetime: "a time with a date",
    dt.date: "a date",
    dt.time: "a time without a date",
}
"""The types that TOML has, in its readers' words."""
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ANY = "NAME"
"""In a path of a table that is not in the file: a key that users choose."""


def problems_of(raw: Mapping[str, Any], kind: type) -> list[tuple[str, str]]:
    """Where each wrong value or key is, and its problem; empty if ``raw`` converts to ``kind``."""
    root = inspect.type_info(kind)
    return [
        (shown_path(path), problem if isinstance(problem, str) else _unknown_key(path, problem, root))
        for path, problem in _problems(root, raw, ())
    ]


def unknown_value(value: object, known: Sequence[str], *, what: str = "") -> str:
    """What to say of a value that is none of the known ones: the nearest, and all of them. ``what``: a word for it."""
    close = nearest(value, known) if isinstance(value, str) else None
    meant = f"did you mean {close!r}? " if close else ""
    there = f"it may be {', '.join(known)}" if known else "there are none"
    return f"unknown {f'{what} ' if what else ''}{value!r}: {meant}{there[:1].upper() + there[1:] if meant else there}"


def shown_path(path: Path) -> str:
    """The path as one would write it in TOML; `file` for the file as a whole."""
    text = ""
    for segment in path:
        if isinstance(segment, int):
            text += f"[{segment}]"
        else:
            text += f".{segment}" if _PLAIN_KEY.fullmatch(segment) else f".{msgspec.json.encode(segment).decode()}"
    return text.removeprefix(".") or "file"


# --- finding -------------------------------------------------------------------------------------------------------


def _problems(kind: inspect.Type, value: Any, path: Path, words: str = "") -> Iterator[Problem]:
    """The problems of this value, in the file's order. ``words``: what its type says that it is."""
    match kind:
        case inspect.Metadata():
            schema = cast("dict[str, str]", kind.extra_json_schema or {})  # pyright: ignore[reportUnknownMemberType]
            yield from _problems(kind.type, value, path, schema.get("description", ""))
        case inspect.UnionType():
            yield from _problems_of_union(
                [each for each in kind.types if not isinstance(each, inspect.NoneType)], value, path
            )
        case inspect.StructType() if isinstance(value, dict):
            yield from _problems_of_table([kind], cast("dict[str, Any]", value), path)
        case inspect.DictType() if isinstance(value, dict):
            for key, inner in cast("dict[str, Any]", value).items():
                for _, problem in _problems(kind.key_type, key, path):
                    yield path, f"its keys {problem}".replace("must be", "must each be", 1)
                yield from _problems(kind.value_type, inner, (*path, key))
        case inspect.VarTupleType() | inspect.ListType() if isinstance(value, list) and _fits(
            kind, cast("list[Any]", value)
        ):
            for i, inner in enumerate(cast("list[Any]", value)):
                yield from _problems(kind.item_type, inner, (*path, i))
        case inspect.LiteralType() if type(cast("object", value)) in _types(kind):
            if value not in kind.values:
                yield path, unknown_value(cast("object", value), [str(each) for each in kind.values])
        case _ if not _fits(kind, value):
            yield path, f"must be {words or _expected(kind)}{_shown(kind, value)}"
        case _:
            pass


def _problems_of_union(kinds: Sequence[inspect.Type], value: Any, path: Path) -> Iterator[Problem]:
    tables = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
    if tables and isinstance(value, dict):
        yield from _problems_of_table(tables, cast("dict[str, Any]", value), path)
        return
    found = [list(_problems(kind, value, path)) for kind in kinds]
    if [] in found:
        return
    alike = [problems for kind, problems in zip(kinds, found, strict=True) if type(value) in _types(kind)]
    if alike or len(kinds) == 1:
        yield from (alike or found)[0]
    else:
        yield path, f"must be {' or '.join(dict.fromkeys(map(_expected, kinds)))}, not {_kind_of(value)}"


def _problems_of_table(kinds: Sequence[inspect.StructType], value: dict[str, Any], path: Path) -> Iterator[Problem]:
    """``kinds``: if there are several, the value of their tag says which one it is."""
    tag, tags = kinds[0].tag_field, [str(kind.tag) for kind in kinds]
    if tag and tag not in value:
        yield path, f"the key `{tag}` is missing; it may be {', '.join(tags)}"
        return
    if tag and value[tag] not in tags:
        yield (*path, tag), unknown_value(value[tag], tags)
        return
    [table] = [kind for kind in kinds if not tag or str(kind.tag) == value[tag]]
    fields = {field.encode_name: field for field in table.fields}
    found: list[Problem] = []
    for key, inner in value.items():
        if key in fields:
            found += _problems(fields[key].type, inner, (*path, key))
        elif key != tag and table.forbid_unknown_fields:
            found.append(((*path, key), table))
    found += [
        (path, f"the key `{name}` is missing") for name, field in fields.items() if field.required and name not in value
    ]
    yield from found
    if found:
        return
    try:
        msgspec.convert(value, table.cls)
    except msgspec.ValidationError as e:
        # All else is found above, so this is from `__post_init__`. Its message may begin with the key that it is about.
        key, _, rest = str(e.__cause__ or e).partition(": ")
        yield ((*path, key), rest) if rest and key in fields else (path, str(e.__cause__ or e))


def _fits(kind: inspect.Type, value: Any) -> bool:
    """Whether the value has this kind and is within its bounds. What a table or a list contains is not looked at."""
    if isinstance(kind, inspect.CustomType | inspect.AnyType):
        return True
    if type(value) not in _types(kind):
        return False
    match kind:
        case inspect.IntType() | inspect.FloatType():
            least, most = kind.ge is None or value >= kind.ge, kind.le is None or value <= kind.le
            return least and most and (kind.gt is None or value > kind.gt)
        case inspect.StrType() | inspect.VarTupleType() | inspect.ListType():
            matches = not isinstance(kind, inspect.StrType) or not kind.pattern or re.search(kind.pattern, value)
            return bool(matches) and (kind.min_length or 0) <= len(value) <= (kind.max_length or len(value))
        case _:
            return True


def _types(kind: inspect.Type) -> tuple[type, ...]:
    """The types of TOML's values that this kind may have."""
    match kind:
        case inspect.Metadata():
            return _types(kind.type)
        case inspect.StructType() | inspect.DictType():
            return (dict,)
        case inspect.VarTupleType() | inspect.ListType():
            return (list,)
        case inspect.StrType():
            return (str,)
        case inspect.BoolType():
            return (bool,)
        case inspect.IntType():
            return (int,)
        case inspect.FloatType():
            return (float, int)
        case inspect.DateTimeType():
            return (dt.datetime,)
        case inspect.LiteralType():
            return tuple(dict.fromkeys(map(type, kind.values)))
        case _:
            raise NotImplementedError(kind)


# --- in words ------------------------------------------------------------------------------------------------------


def _expected(kind: inspect.Type) -> str:
    """What a value of this kind is."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            bounds = [f"of at least {kind.ge}"] if kind.ge is not None else []
            bounds += [f"above {kind.gt}"] if kind.gt is not None else []
            bounds += [f"of at most {kind.le}"] if kind.le is not None else []
            return " ".join([_KINDS[_types(kind)[0]], " and ".join(bounds)]).strip()
        case inspect.VarTupleType() | inspect.ListType():
            bounds = [f"at least {kind.min_length}"] if kind.min_length else []
            bounds += [f"at most {kind.max_length}"] if kind.max_length else []
            return _KINDS[list] + (f" of {' and '.join(bounds)}" if bounds else "")
        case inspect.DateTimeType():
            return "a time as 2027-01-31T12:00:00Z"
        case _:
            return " or ".join(_KINDS[each] for each in _types(kind))


def _shown(kind: inspect.Type, value: Any) -> str:
    """What there is instead. Text of the right kind is not shown: it may be a secret in the wrong place."""
    if type(value) not in _types(kind):
        return f", not {_kind_of(value)}"
    return f", not {value}" if isinstance(value, int | float) else ""


def _kind_of(value: object) -> str:
    return _KINDS.get(type(value), "that")


def _unknown_key(path: Path, table: inspect.StructType, root: inspect.Type) -> str:
    """What to say of a key that its table does not have."""
    key = str(path[-1])
    names = [field.encode_name for field in table.fields] + ([table.tag_field] if table.tag_field else [])
    if close := nearest(key, names):
        hint = f"did you mean {close!r}? "
    elif elsewhere := next(_tables_with(root, key, ()), None):
        hint = f"it is a key of [{elsewhere}]. " if elsewhere != "file" else "it is a key of no table. "
    else:
        hint = ""
    return f"unknown key: {hint}Known keys here: {', '.join(sorted(names))}"


def _tables_with(kind: inspect.Type, key: str, path: Path) -> Iterator[str]:
    """The tables of the whole file in which this key is known."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from _tables_with(one, key, path)
        case inspect.StructType():
            for field in kind.fields:
                if field.encode_name == key:
                    yield shown_path(path)
                yield from _tables_with(field.type, key, (*path, field.encode_name))
        case inspect.DictType():
            yield from _tables_with(kind.value_type, key, (*path, _ANY))
        case inspect.VarTupleType() | inspect.ListType():
            yield from _tables_with(kind.item_type, key, path)
        case _:
            pass
