"""From an entry of the inbound stream to a sound request, or to a named error: nothing else comes out.

The field ``__data__`` holds one of

- a JSON object: ``{"type": "generate", …}`` or ``{"type": "cancel", …}``;
- the same as a msgpack map;
- a FastStream message around either: its binary format 1 (a magic header, two offsets, the headers, the body;
  faststream/redis/parser/binary.py), or the JSON envelope ``{"data": "…", "headers": {…}}`` of its older releases.

All of them become plain values first, are walked once for what not every reader takes, and only then become
structs: so all forms, and a request that the client checks before it is sent, obey the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tokenbus.core.request.broken_json import read_broken, top_texts
from tokenbus.core.request.json_values import check_plain, too_deep
from tokenbus.core.request.known_fields import check_known, notes_of
from tokenbus.core.request.validate import check_request
from tokenbus.errors import Malformed, RequestInvalid, RequestTooLarge
from tokenbus.events.requests import Request, RunId

__all__ = ["MAX_REQUEST_BYTES", "check_request", "decode_request", "rejected_run_id", "request_from"]

MAX_REQUEST_BYTES = 4 * 2**20

_FIELD = b"__data__"
_MAGIC = b"\x89BIN\r\n\x1a\n"
_VERSION = b"\x00\x01"
_OFFSETS = len(_MAGIC) + len(_VERSION)
"""Where the offsets of headers and body stand, four bytes each, big-endian."""


class _Envelope(msgspec.Struct):
    """FastStream's JSON envelope. Its headers are of no use here; a request has a type, and no data."""

    data: str
    type: object = None


class _Name(msgspec.Struct):
    """Just enough of a request to name its run."""

    type: str = ""
    id: RunId | None = None


_MISSING = re.compile(r"missing required field `([^`]+)`")


def decode_request(fields: Mapping[bytes, bytes], *, limit: int = MAX_REQUEST_BYTES) -> Request:
    """The request in an entry's fields, checked whole: types, ranges and `check_request`.

    ``limit`` bounds the entry's value, in bytes. Unknown fields of the request are ignored, and so are other
    fields of the entry. Raises Malformed (no ``__data__``, or bytes in none of the forms), RequestTooLarge, and
    RequestInvalid, whose ``where`` is a path such as ``messages[0].content``.
    """
    return decode_with_notes(fields, limit=limit)[0]


def decode_with_notes(
    fields: Mapping[bytes, bytes], *, limit: int = MAX_REQUEST_BYTES
) -> tuple[Request, tuple[str, ...]]:
    """The same, and a sentence for each field that is ignored because this version does not know it."""
    data = _value(fields)
    if len(data) > limit:
        raise RequestTooLarge(len(data), limit)
    value = _plain(_unwrap(data))
    check_plain(value)
    notes = notes_of(value)
    return _converted(value), tuple(notes)


def request_from(value: object) -> Request:
    """The request that plain values (dicts, lists, text, numbers) describe, checked whole. Raises RequestInvalid, also
    for a field that this version does not know, with the name that was probably meant."""
    check_plain(value)
    check_known(value)
    return _converted(value)


def _converted(value: object) -> Request:
    try:
        request = msgspec.convert(value, Request)
    except msgspec.ValidationError as e:
        raise _invalid(str(e)) from None
    check_request(request)
    return request


def rejected_run_id(fields: Mapping[bytes, bytes]) -> str | None:
    """The run id in a request that `decode_request` refused, where one can be read; never raises.

    With it the run can end `failed` where its publisher looks for it. A refused cancel gives None: it must not
    end the run that it names.
    """
    try:
        name = _name_of(_unwrap(_value(fields)))
    except (Malformed, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if name.type == "cancel" else name.id


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
    """msgspec's ``… - at `$.messages[0].content` `` as an error with a path; without one it is the whole request."""
    problem, at, where = message.rpartition(" - at `")
    problem = problem if at else message
    path = where.removesuffix("`").removeprefix("$").removeprefix(".") if at else ""
    if missing := _MISSING.search(problem):
        # msgspec tells the object that lacks a field; whoever sent it looks for the field.
        path = f"{path}.{missing[1]}".removeprefix(".")
    return RequestInvalid(path or "$", problem)


def _value(fields: Mapping[bytes, bytes]) -> bytes:
    data = fields.get(_FIELD)
    if data is None:
        found = ", ".join(name.decode(errors="replace") for name in list(fields)[:8])
        raise Malformed("request", f"the entry's fields are {found}; expected __data__ with one JSON object in it")
    return data


def _unwrap(data: bytes) -> bytes:
    """The request's own bytes, out of a FastStream message where there is one. Raises Malformed."""
    if data.startswith(_MAGIC):
        version, body = data[len(_MAGIC) : _OFFSETS], int.from_bytes(data[_OFFSETS + 4 : _OFFSETS + 8], "big")
        if version != _VERSION or not _OFFSETS + 8 <= body <= len(data):
            raise Malformed("request", "a FastStream message that is cut short, or not of format 1")
        return data[body:]
    if _is_json(data) and b'"data"' in data:
        try:
            envelope = msgspec.json.decode(data, type=_Envelope)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return data  # no envelope; read as a request it shows what it is
        if envelope.type is None:
            return envelope.data.encode()
    return data


def _is_json(data: bytes) -> bool:
    """Whether to read these bytes as JSON: all that do not begin as a msgpack map."""
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
    """Raises RequestInvalid with its path, if all that is wrong with the JSON is a NaN or half of a character."""
    try:
        value = read_broken(data)
    except RecursionError:
        raise too_deep() from None
    except ValueError:
        return  # it is no JSON at all
    check_plain(value)
