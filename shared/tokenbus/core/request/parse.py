"""Decode an entry of the inbound stream to a valid request, or raise a specific error.

The field ``__data__`` holds one of

- a JSON object: ``{"type": "generate", …}`` or ``{"type": "cancel", …}``;
- the same as a msgpack map;
- a FastStream message around either: its binary format 1 (a magic header, two offsets, the headers, the body;
  faststream/redis/parser/binary.py), or the JSON envelope ``{"data": "…", "headers": {…}}`` of its older releases.

All forms are decoded to plain values, checked once for values that not every reader accepts, and then converted to
structs. The same rules therefore apply to all forms, and to a request that the client checks before it is sent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TypeGuard, cast

import msgspec

from tokenbus.core.nearest_name import nearest, unknown_name
from tokenbus.core.request.validate import check_request
from tokenbus.errors import Malformed, RequestInvalid, RequestTooLarge
from tokenbus.events.child_runs import parent_call
from tokenbus.events.requests import Append, Request, RunId
from tokenbus.events.sessions import is_reserved

__all__ = ["MAX_REQUEST_BYTES", "check_request", "decode_request", "rejected_run_id", "request_from"]

MAX_REQUEST_BYTES = 4 * 2**20

_FIELD = b"__data__"
_MAGIC = b"\x89BIN\r\n\x1a\n"
_VERSION = b"\x00\x01"
_OFFSETS = len(_MAGIC) + len(_VERSION)
"""Position of the offsets of headers and body, four bytes each, big-endian."""


class _Envelope(msgspec.Struct):
    """FastStream's JSON envelope; its headers are ignored. A request has a type and no data."""

    data: str
    type: object = None


class _Name(msgspec.Struct):
    """The fields of a request that identify its run."""

    type: str = ""
    id: RunId | None = None


_NO_RUN = ("cancel", "append", "approval", "answer", "tool_result")
"""Types of requests that begin no run."""
_MISSING = re.compile(r"missing required field `([^`]+)`")


def decode_request(fields: Mapping[bytes, bytes], *, limit: int = MAX_REQUEST_BYTES) -> Request:
    """Decode and check the request in an entry's fields: types, ranges and `check_request`.

    ``limit`` is the maximum size of the value in bytes. Unknown fields of the request and other fields of the entry are
    ignored. Raises Malformed (no ``__data__``, or bytes in none of the forms), RequestTooLarge, and RequestInvalid,
    whose ``where`` is a path such as ``messages[0].content``.
    """
    return decode_with_notes(fields, limit=limit)[0]


def decode_with_notes(
    fields: Mapping[bytes, bytes], *, limit: int = MAX_REQUEST_BYTES
) -> tuple[Request, tuple[str, ...]]:
    """Like `decode_request`, plus one sentence for each ignored field that this version does not know."""
    data = _value(fields)
    if len(data) > limit:
        raise RequestTooLarge(len(data), limit)
    return request_with_notes(_plain(_unwrap(data)))


def request_from(value: object) -> Request:
    """Build and check a request from plain values (dicts, lists, text, numbers).

    Raises RequestInvalid, also for a field that this version does not know, with the name that was probably meant.
    """
    check_plain(value)
    check_known(value)
    return _converted(value)


def request_with_notes(value: object) -> tuple[Request, tuple[str, ...]]:
    """Like `request_from`, but with a sentence for each field that this version does not know."""
    check_plain(value)
    notes = notes_of(value)
    return _converted(value), tuple(notes)


def _converted(value: object) -> Request:
    try:
        request = msgspec.convert(value, Request)
    except msgspec.ValidationError as e:
        raise _invalid(str(e)) from None
    check_request(request)
    return request


def rejected_run_id(fields: Mapping[bytes, bytes]) -> str | None:
    """Run id of a request that `decode_request` rejected, if it can be read; never raises.

    With it the run can end as `failed` where its publisher looks for it. Returns None for a rejected cancel or
    decision, which must not end the run that it names, for an append, and for an id that only a session gives.
    """
    try:
        name = _name_of(_unwrap(_value(fields)))
    except (Malformed, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    only_given = is_reserved(name.id or "") and parent_call(name.id or "") is None
    return None if name.type in _NO_RUN or only_given else name.id


def rejected_append(fields: Mapping[bytes, bytes]) -> Append | None:
    """The session, id and metadata of an append that `decode_request` rejected, if they can be read; never raises."""
    try:
        value = _plain(_unwrap(_value(fields)))
        if not isinstance(value, dict) or cast("dict[str, object]", value).get("type") != "append":
            return None
        sent = cast("dict[str, object]", value)
        kept = {name: sent[name] for name in ("type", "session", "id", "metadata") if name in sent}
        request = _converted({**kept, "item": {"type": "interrupt"}})
    except (Malformed, RequestInvalid):
        return None
    return request if isinstance(request, Append) else None


def _name_of(data: bytes) -> _Name:
    if not _is_json(data):
        return msgspec.msgpack.decode(data, type=_Name)
    try:
        return msgspec.json.decode(data, type=_Name)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.convert(top_texts(data, "type", "id"), _Name)


def _invalid(message: str) -> RequestInvalid:
    """Convert msgspec's ``… - at `$.messages[0].content` `` to an error with a path; `$` if it has none."""
    problem, at, where = message.rpartition(" - at `")
    problem = problem if at else message
    path = where.removesuffix("`").removeprefix("$").removeprefix(".") if at else ""
    if missing := _MISSING.search(problem):
        # msgspec names the object that lacks the field; the sender needs the path of the field.
        path = f"{path}.{missing[1]}".removeprefix(".")
    return RequestInvalid(path or "$", problem)


def _value(fields: Mapping[bytes, bytes]) -> bytes:
    data = fields.get(_FIELD)
    if data is None:
        found = ", ".join(name.decode(errors="replace") for name in list(fields)[:8])
        raise Malformed("request", f"the entry's fields are {found}; expected __data__ with one JSON object in it")
    return data


def _unwrap(data: bytes) -> bytes:
    """The request's own bytes, extracted from a FastStream message if there is one. Raises Malformed."""
    if data.startswith(_MAGIC):
        version, body = data[len(_MAGIC) : _OFFSETS], int.from_bytes(data[_OFFSETS + 4 : _OFFSETS + 8], "big")
        if version != _VERSION or not _OFFSETS + 8 <= body <= len(data):
            raise Malformed("request", "a FastStream message that is cut short, or not of format 1")
        return data[body:]
    if _is_json(data) and b'"data"' in data:
        try:
            envelope = msgspec.json.decode(data, type=_Envelope)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return data  # no envelope; decode it as a request to get the right error
        if envelope.type is None:
            return envelope.data.encode()
    return data


def _is_json(data: bytes) -> bool:
    """Whether to decode these bytes as JSON: everything that does not start like a msgpack map."""
    return not data or not (0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF))


def _plain(data: bytes) -> object:
    try:
        return msgspec.json.decode(data) if _is_json(data) else msgspec.msgpack.decode(data)
    except RecursionError:
        raise too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        if _is_json(data):
            _name_what_is_not_plain(data)
        raise Malformed("request", f"neither a JSON object, a msgpack map nor a FastStream message: {e}") from None


def _name_what_is_not_plain(data: bytes) -> None:
    """Raise RequestInvalid with the path if NaN or a lone surrogate is the only problem of the JSON."""
    try:
        value = read_broken(data)
    except RecursionError:
        raise too_deep() from None
    except ValueError:
        return  # not JSON at all
    check_plain(value)


# Diagnose the invalid JSON of a rejected request, and find its run id.
#
# Some writers put NaN or a lone surrogate into what they call JSON. msgspec then rejects the whole text and names a
# byte. `read_broken` accepts both, so that the check of plain values can name the path. `top_texts` finds the id in any
# text, so that the run can end where its publisher looks for it.

MAX_TOKENS = 100_000
"""Limit of the search for an id: some hundredths of a second."""

_TOKEN = re.compile(r'"((?:[^"\\]++|\\.)*+)"|([{}\[\]:,])|(")|[^"{}\[\]:,\s]++', re.DOTALL)


def read_broken(data: bytes) -> object:
    """Decode JSON in which numbers may be NaN or infinite and text may contain lone surrogates.

    Raises ValueError for any other invalid JSON, and RecursionError.
    """
    return json.loads(data.decode())


def top_texts(data: bytes, *names: str) -> dict[str, str]:
    """Text fields with these names at the top level of a JSON object, unparsed; never raises.

    They are found despite errors elsewhere, if brackets and quotes before them are balanced.
    """
    found: dict[str, str] = {}
    depth = 0
    key: str | None = None
    """The field whose value comes next; None: a key follows, or nothing of interest."""
    last: str | None = None
    for number, token in enumerate(_TOKEN.finditer(data.decode(errors="replace"))):
        text, mark, unclosed = token.groups()
        if unclosed or number >= MAX_TOKENS:
            break
        if mark in ("{", "["):
            depth += 1
        elif mark in ("}", "]"):
            depth -= 1
        elif depth != 1:
            continue
        elif mark == ":":
            key = last
        elif mark == ",":
            key = None
        elif text is not None:
            if key in names:
                found[key] = text
            last = text
    return found


MAX_DEPTH = 100
"""Maximum nesting levels; far below the limit of any decoder involved."""
MAX_VALUES = 200_000
"""Maximum values on all levels: each is only a few bytes on the wire, but costs time and memory to walk."""


def too_deep(where: str = "$") -> RequestInvalid:
    """The error for a value nested deeper than `MAX_DEPTH`."""
    return RequestInvalid(where, f"nested deeper than {MAX_DEPTH} levels")


def check_plain(value: object) -> None:
    """Raise RequestInvalid, with the path, for a part of ``value`` that is not plain.

    Plain values are objects with text keys, lists, Unicode text, booleans, null, integers of 64 bits and finite
    numbers, nested at most `MAX_DEPTH` deep, at most `MAX_VALUES` in all. Not recursive, because hostile values are
    deeply nested.
    """
    todo: list[tuple[object, str, int]] = [(value, "", 0)]
    values = 1
    while todo:
        item, where, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise too_deep(where)
        if _is_dict(item) or _is_list(item):
            values += len(item)
            if values > MAX_VALUES:
                raise RequestInvalid(where or "$", f"more than {MAX_VALUES} values in all")
        if _is_dict(item):
            for key, inner in item.items():
                if not isinstance(key, str):
                    raise RequestInvalid(where or "$", f"a key is {type(key).__name__}, not text")
                if problem := _text_problem(key):
                    raise RequestInvalid(where or "$", f"a key is {problem}")
                todo.append((inner, f"{where}.{key}" if where else key, depth + 1))
        elif _is_list(item):
            todo.extend((inner, f"{where}[{i}]", depth + 1) for i, inner in enumerate(item))
        elif problem := _scalar_problem(item):
            raise RequestInvalid(where or "$", problem)


def _scalar_problem(item: object) -> str | None:
    match item:
        case None | bool():
            return None
        case str():
            return _text_problem(item)
        case int():
            return None if -(2**63) <= item < 2**64 else "an integer of more than 64 bits"
        case float():
            return None if math.isfinite(item) else "a number that is not finite"
        case _:
            return f"a value of type {type(item).__name__}, which JSON does not have"


def _text_problem(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "text with half of a surrogate pair"
    return None


def _is_dict(item: object) -> TypeGuard[dict[object, object]]:
    return isinstance(item, dict)


def _is_list(item: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    return isinstance(item, list | tuple)


# A client of this version gets an error for a misspelt name before the request is sent. Intake must accept requests of
# newer versions, so it only notes an unknown field, unless the name that was meant is one of `SAFETY`.


MAX_NOTES = 16
"""Maximum notes about unknown fields per request."""
SAFETY = ("policies", "input_policies", "visible")
"""Fields that keep text from being published, or sent to a provider. A request with a misspelt one is refused, never
run without it.
"""
_FEW = 8
"""If no known name is close, list the known names only if there are at most this many."""
_NAME_CHARS = 64


class UnknownField(msgspec.Struct, frozen=True):
    """A field that this version ignores."""

    where: str
    """Path of the object that holds it; empty: the request."""
    name: str
    known: tuple[str, ...]
    """The fields that exist there."""

    @property
    def path(self) -> str:
        """Path of the field in the request."""
        return _at(self.where, self.name[:_NAME_CHARS])

    @property
    def problem(self) -> str:
        """What is wrong, and the name that was probably meant."""
        if close := nearest(self.name, self.known):
            return f"there is no such field; did you mean {close!r}?"
        if len(self.known) <= _FEW:
            return f"there is no such field, only {', '.join(map(repr, self.known))}"
        return "there is no such field"


class _Shape(msgspec.Struct):
    """Names that are valid at one place of a request: an object, one of several objects by tag, a list, or a word."""

    fields: dict[str, _Shape | None] | None = None
    """Fields of an object; None: any member name."""
    tag_field: str = ""
    by_tag: dict[str, _Shape] = {}
    items: _Shape | None = None
    words: tuple[str, ...] | None = None
    """None: any text."""


def unknown_fields(value: object) -> Iterator[UnknownField]:
    """Fields of a plain request that this version does not know, in order.

    Raises RequestInvalid for a text that must be one of certain words and is not.
    """
    return _walk(value, _request(), "")


def check_known(value: object) -> None:
    """Raise RequestInvalid for the first field or word of a plain request that this version does not know."""
    for field in unknown_fields(value):
        raise RequestInvalid(field.path, field.problem)


def notes_of(value: object) -> list[str]:
    """One sentence for each ignored field, at most `MAX_NOTES`. Raises like `unknown_fields`, and for a misspelt one
    of `SAFETY`.
    """
    notes: list[str] = []
    for field in unknown_fields(value):  # walk to the end: an invalid word anywhere is an error
        if nearest(field.name, field.known) in (("approval",) if field.where else SAFETY):
            raise RequestInvalid(field.path, f"{field.problem} A run without it could publish what it is to keep back")
        if len(notes) < MAX_NOTES:
            notes.append(f"{field.path} has no effect: {field.problem}")
    return notes


def _walk(value: object, shape: _Shape, where: str) -> Iterator[UnknownField]:
    match value:
        case str() if shape.words is not None and value not in shape.words:
            raise RequestInvalid(where or "$", unknown_name(value[:_NAME_CHARS], shape.words))
        case dict():
            yield from _members(cast("Mapping[str, object]", value), shape, where)
        case list() | tuple() if shape.items is not None:
            for i, item in enumerate(cast("list[object]", value)):
                yield from _walk(item, shape.items, f"{where}[{i}]")
        case _:
            pass


def _members(value: Mapping[str, object], shape: _Shape, where: str) -> Iterator[UnknownField]:
    if shape.tag_field:
        tag = value.get(shape.tag_field)
        if not isinstance(tag, str):
            return  # the conversion reports what is wrong with it
        if tag not in shape.by_tag:
            raise RequestInvalid(_at(where, shape.tag_field), unknown_name(tag[:_NAME_CHARS], shape.by_tag))
        shape = shape.by_tag[tag]
    if shape.fields is None:
        return
    for name, inner in value.items():
        if name not in shape.fields:
            yield UnknownField(where, name, tuple(shape.fields))
        elif of_field := shape.fields[name]:
            yield from _walk(inner, of_field, _at(where, name))


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


@cache
def _request() -> _Shape:
    from msgspec import inspect  # only needed to write or accept requests

    made: dict[type, _Shape] = {}

    def of(kind: inspect.Type) -> _Shape | None:
        """None if it contains no names to check."""
        match kind:
            case inspect.StructType():
                return of_struct(kind)
            case inspect.UnionType():
                return of_union(kind)
            case inspect.ListType() | inspect.VarTupleType():
                items = of(kind.item_type)
                return _Shape(items=items) if items else None
            case inspect.LiteralType():
                return _Shape(words=tuple(str(word) for word in kind.values))
            case _:
                return None

    def of_struct(kind: inspect.StructType) -> _Shape:
        if kind.cls not in made:
            shape = made[kind.cls] = _Shape(fields={})
            fields = {kind.tag_field: None} if kind.tag_field else {}
            shape.fields = {**fields, **{field.encode_name: of(field.type) for field in kind.fields}}
        return made[kind.cls]

    def of_union(kind: inspect.UnionType) -> _Shape | None:
        shape = _Shape()
        structs = [one for one in kind.types if isinstance(one, inspect.StructType)]
        for one in kind.types:
            if isinstance(one, inspect.ListType | inspect.LiteralType) and (found := of(one)):
                shape.items, shape.words = found.items or shape.items, found.words or shape.words
        if len(structs) == 1:
            shape.fields = of_struct(structs[0]).fields
        elif structs:
            shape.tag_field = structs[0].tag_field or ""
            shape.by_tag = {str(one.tag): of_struct(one) for one in structs}
        return shape if shape != _Shape() else None

    request = of(inspect.type_info(Request))
    assert request
    return request
