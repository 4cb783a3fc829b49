"""Where in a settings file a value is wrong, with the name of its table, and which values would be right. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
from msgspec import inspect

from tokenbus.core.nearest_name import nearest

_ANY: Final = None
"""A key of a table whose keys are names; msgspec does not say which one."""
_Segment = str | int | None
_SEGMENT = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|(\[\.\.\.\])")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_PATTERN = re.compile(r"Expected `str` matching regex (.*)", re.DOTALL)
_KINDS = {
    "object": "a table",
    "array": "a list",
    "str": "text in quotes",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
}
"""What TOML's readers call the types that msgspec names."""
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")

PATTERN_WORDS: Final[Mapping[str, str]] = {
    r"^https?://[^/?#\s]+[^?#\s]*$(?!\n)": "an address as `https://HOST` or `http://HOST:PORT/PATH`",
    r"^https?://[^/?#\s*]+$(?!\n)": "an origin as `https://HOST` or `https://HOST:PORT`",
    r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$(?!\n)": "the name of an HTTP header",
    r"^[ -~]*$(?!\n)": "text in ASCII on one line",
    r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$(?!\n)": "`module:name`",
    r"^[^/\s]+/\S+$(?!\n)": "`PROVIDER/MODEL`",
    r"^(\*|[a-z]+/(\*|[a-z0-9.+-]+))$(?!\n)": "a media type as `image/png`, `image/*` or `*`",
    r"^[ -z|~]*\{\}[ -z|~]*$(?!\n)": "text with `{}` for the key",
    r"^[0-9a-f]{64}$(?!\n)": "a SHA-256 of 64 hex digits",
    r"^[!-~]([ -~]*[!-~])?$|^$": "ASCII text without blanks at its ends",
    r"^[A-Za-z][A-Za-z0-9_:.-]{0,63}$(?!\n)": "the name of a tag, without its brackets",
}
"""What each pattern of a setting means, for a person."""


def explained(error: msgspec.ValidationError, raw: Mapping[str, Any], kind: type) -> tuple[str, str]:
    """The path of the value or key that is wrong, with every table named, and what is wrong with it."""
    problem, _, where = str(error).partition(" - at `")
    of_key = where.startswith("key` in `")
    path, raw = _resolved(_segments(where.removeprefix("key` in `")), dict(raw), kind, problem)
    root = inspect.type_info(kind)
    if unknown := _UNKNOWN.fullmatch(problem):
        return shown_path([*path, unknown[1]]), _unknown_key(unknown[1], path, _table(root, raw, path), root)
    value = _at(raw, path)
    if problem.startswith(("Invalid enum value", "Invalid value")):
        known = [str(one) for one in _values(root, path)]
        return shown_path(path), unknown_value(value, known)
    if missing := _MISSING.fullmatch(problem):
        values = [str(one) for one in _values(root, [*path, missing[1]])]
        may_be = f"; it may be {', '.join(values)}" if values else ""
        return shown_path(path), f"the key `{missing[1]}` is missing{may_be}"
    if _PATTERN.fullmatch(problem):
        words = PATTERN_WORDS.get(_pattern(problem), problem)
        # The value is not shown: it may be a secret in the wrong place.
        return shown_path(path), f"{'its keys must each be' if of_key else 'must be'} {words}"
    field, _, rest = problem.partition(": ")
    if rest and field in {f.encode_name for f in _fields(_table(root, raw, path))}:
        return shown_path([*path, field]), rest  # what `__post_init__` of a table says
    return shown_path(path), _of_kind(problem)


def unknown_value(value: object, known: Sequence[str], *, what: str = "") -> str:
    """What to say of a value that is none of the known ones: the nearest, and all of them. ``what``: a word for it."""
    close = nearest(value, known) if isinstance(value, str) else None
    meant = f"did you mean {close!r}? " if close else ""
    there = f"it may be {', '.join(known)}" if known else "there are none"
    return f"unknown {f'{what} ' if what else ''}{value!r}: {meant}{there[:1].upper() + there[1:] if meant else there}"


def shown_path(path: Sequence[_Segment]) -> str:
    """The path as one would write it in TOML; `file` for the file as a whole."""
    text = ""
    for segment in path:
        if isinstance(segment, int):
            text += f"[{segment}]"
        else:
            name = segment or "NAME"
            text += f".{name}" if _PLAIN_KEY.fullmatch(name) else f".{msgspec.json.encode(name).decode()}"
    return text.removeprefix(".") or "file"


def _unknown_key(key: str, path: Sequence[_Segment], table: inspect.StructType | None, root: inspect.Type) -> str:
    names = [field.encode_name for field in _fields(table)]
    if table is not None and table.tag_field:
        names.append(table.tag_field)
    close = nearest(key, names)
    elsewhere = [] if close else [one for one in _tables_with(root, key, []) if one != shown_path(path)]
    if close:
        hint = f"did you mean {close!r}? "
    elif elsewhere:
        hint = f"it is a key of [{elsewhere[0]}]. " if elsewhere[0] != "file" else "it is a key of no table. "
    else:
        hint = ""
    return f"unknown key: {hint}Known keys here: {', '.join(sorted(names))}"


def _tables_with(kind: inspect.Type, key: str, path: list[_Segment]) -> Iterator[str]:
    """The tables of the whole file in which this key is known."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from _tables_with(one, key, path)
        case inspect.StructType():
            for field in kind.fields:
                if field.encode_name == key:
                    yield shown_path(path)
                yield from _tables_with(field.type, key, [*path, field.encode_name])
        case inspect.DictType():
            yield from _tables_with(kind.value_type, key, [*path, _ANY])
        case inspect.VarTupleType():
            yield from _tables_with(kind.item_type, key, path)
        case _:
            pass


# --- the path ----------------------------------------------------------------------------------------------------


def _segments(where: str) -> list[_Segment]:
    return [
        _ANY if any_name else int(index) if index else name
        for name, index, any_name in _SEGMENT.findall(where.rstrip("`"))
    ]


def _resolved(
    path: list[_Segment], raw: dict[str, Any], kind: type, problem: str
) -> tuple[list[_Segment], dict[str, Any]]:
    """The path with the names for which msgspec writes `[...]`: found by trying each key alone."""
    for i, segment in enumerate(path):
        if segment is not _ANY:
            continue
        found = _at(raw, path[:i])
        for key in cast("dict[str, Any]", found) if isinstance(found, dict) else ():
            trial = _only(raw, path[:i], key)
            if _fails_alike(trial, kind, problem):
                raw, path = trial, [*path[:i], key, *path[i + 1 :]]
                break
        else:
            return path[:i], raw
    return path, raw


def _at(value: Any, path: Sequence[_Segment]) -> Any:
    for segment in path:
        try:
            value = value[segment]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _only(value: Any, path: Sequence[_Segment], key: str) -> Any:
    """A copy in which the table at the path has this key alone."""
    if not path:
        return {key: value[key]}
    first, *rest = path
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_only(item, rest, key) if i == first else item for i, item in enumerate(items)]
    return {**value, first: _only(value[first], rest, key)}


def _fails_alike(raw: Mapping[str, Any], kind: type, problem: str) -> bool:
    try:
        msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        return str(e).startswith(problem)
    return False


# --- what the settings allow there -------------------------------------------------------------------------------


def _fields(table: inspect.StructType | None) -> Sequence[inspect.Field]:
    return () if table is None else table.fields


def _inside(kind: inspect.Type, segment: _Segment) -> Iterator[inspect.Type]:
    """The types that a value may have at this step into a value of the type ``kind``."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from _inside(one, segment)
        case inspect.StructType():
            yield from (field.type for field in kind.fields if field.encode_name == segment)
        case inspect.DictType():
            yield kind.value_type
        case inspect.VarTupleType() | inspect.ListType():
            yield kind.item_type
        case _:
            pass


def _structs(kind: inspect.Type) -> Iterator[inspect.StructType]:
    if isinstance(kind, inspect.StructType):
        yield kind
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _structs(one)


def _table(root: inspect.Type, raw: Mapping[str, Any], path: Sequence[_Segment]) -> inspect.StructType | None:
    """The table at the path; of several kinds, the one whose tag the file has."""
    kinds = [root]
    for segment in path:
        kinds = [inner for kind in kinds for inner in _inside(kind, segment)]
    found = [struct for kind in kinds for struct in _structs(kind)]
    tagged = [s for s in found if s.tag_field and _at(raw, [*path, s.tag_field]) == s.tag]
    return (tagged or found or [None])[0]


def _values(kind: inspect.Type, path: Sequence[_Segment]) -> Iterator[object]:
    """The values that a choice at this path has."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from _values(one, path)
        case inspect.LiteralType() if not path:
            yield from kind.values
        case inspect.StructType() if len(path) == 1 and path[0] == kind.tag_field:
            yield kind.tag
        case _ if path:
            for inner in _inside(kind, path[0]):
                yield from _values(inner, path[1:])
        case _:
            pass


# --- in words ------------------------------------------------------------------------------------------------------


def _pattern(problem: str) -> str:
    """The pattern that msgspec quotes as Python would."""
    import ast

    try:
        return str(ast.literal_eval(problem.removeprefix("Expected `str` matching regex ")))
    except (ValueError, SyntaxError):
        return ""


def _of_kind(problem: str) -> str:
    """Such as ``Expected `int`, got `str```, in the words of TOML."""

    def words(match: re.Match[str]) -> str:
        return " or ".join(_KINDS.get(name, name) for name in match[1].split(" | ") if name != "null")

    text = re.sub(r"`([a-z |]+)`", words, problem)
    text = text.replace("Invalid RFC3339 encoded datetime", "must be a time as 2027-01-31T12:00:00Z")
    text = (
        text.replace("Expected ", "must be ", 1).replace(", got ", ", not ", 1).replace("of length >=", "of at least")
    )
    return text.replace(">=", "of at least").replace("<=", "of at most").replace(" > ", " above ")
