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
import re
from collections.abc import Mapping
from typing import cast

import msgspec

from tokenbus.core.request.json_values import check_plain, too_deep
from tokenbus.core.request.known_fields import check_known, notes_of
from tokenbus.core.request.validate import check_request
from tokenbus.errors import Malformed, RequestInvalid, RequestTooLarge
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

    With it the run can end as `failed` where its publisher looks for it. Returns None for a rejected cancel, which must
    not end the run that it names, for an append, and for an id that only a session gives.
    """
    try:
        name = _name_of(_unwrap(_value(fields)))
    except (Malformed, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if name.type in ("cancel", "append") or is_reserved(name.id or "") else name.id


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
