"""Finds the fields of a provider's JSON that no struct names, at every level. Costs nothing where there are none.

Structs derive from `Known`, and name also the fields that are dropped on purpose. JSON with another field does not
decode; then it is walked along the structs, and decoded without the fields that they lack.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import Raw

from tokenbus.errors import Malformed
from tokenbus.providers.response.json_decode import read, tag_of

T = TypeVar("T")

_NO_VALUE = (b"null", b'""', b"[]", b"{}")
_object = msgspec.json.Decoder(dict[str, Raw])
_array = msgspec.json.Decoder(list[Raw])


class Known(msgspec.Struct, forbid_unknown_fields=True):
    """Base of structs that name every field of their object that is known."""


NOTHING = Raw(b"")
"""An absent field of raw JSON."""


def dropping(names: str) -> type[Known]:
    """A base of structs with these fields, which are dropped."""
    fields = [(name, Raw, NOTHING) for name in names.split()]
    return cast("type[Known]", msgspec.defstruct("Dropping", fields, bases=(Known,), kw_only=True))


class UnknownField(msgspec.Struct, frozen=True):
    path: tuple[str | int, ...]
    """Names and list indexes from the outermost object to the field."""
    json: str

    @property
    def name(self) -> str:
        """The names of the path."""
        return ".".join(step for step in self.path if isinstance(step, str))


def read_known(decoder: msgspec.json.Decoder[T], of: Any, data: bytes, what: str) -> tuple[T, list[UnknownField]]:
    """Decode like `read` into the type ``of``, and return the fields that it does not name; null and empty values say
    nothing. Raises Malformed.
    """
    try:
        return read(decoder, data, what), []
    except Malformed as malformed:
        unknown: list[UnknownField] = []
        try:
            stripped = _strip(Raw(data), of, (), unknown)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise malformed from None
        if bytes(stripped) == data:
            raise
        return read(decoder, bytes(stripped), what), [field for field in unknown if field.json]


def has_value(raw: Raw) -> bool:
    """Whether a field is present, and neither null nor empty."""
    return bytes(raw) not in (b"", *_NO_VALUE)


def _strip(raw: Raw, of: Any, path: tuple[str | int, ...], unknown: list[UnknownField]) -> Raw:
    """Remove the fields that the type does not name, and collect them."""
    data = bytes(raw)
    if data[:1] == b"[" and (item := _item_of(of)) is not None:
        items = _array.decode(data)
        left = [_strip(inner, item, (*path, i), unknown) for i, inner in enumerate(items)]
        return raw if all(map(_same, left, items)) else Raw(msgspec.json.encode(left))
    if data[:1] != b"{" or not (struct := _struct_of(of, data)):
        return raw
    known = _fields_of(struct)
    if known is None:
        return raw
    kept: dict[str, Raw] = {}
    fields = _object.decode(data)
    for name, value in fields.items():
        if name in known:
            kept[name] = _strip(value, known[name], (*path, name), unknown)
        else:
            unknown.append(UnknownField((*path, name), bytes(value).decode() if has_value(value) else ""))
    unchanged = len(kept) == len(fields) and all(map(_same, kept.values(), fields.values()))
    return raw if unchanged else Raw(msgspec.json.encode(kept))


def _same(one: Raw, other: Raw) -> bool:
    return one is other


@lru_cache(256)
def _members(of: Any) -> tuple[Any, ...]:
    return get_args(of) if get_origin(of) in (Union, UnionType) else (of,)


@lru_cache(256)
def _item_of(of: Any) -> Any:
    """The type of a list's items, if a value of this type may be a list of structs."""
    return next((get_args(member)[0] for member in _members(of) if get_origin(member) is list), None)


def _struct_of(of: Any, data: bytes) -> type[msgspec.Struct] | None:
    """The struct that an object is decoded into."""
    structs = _structs(of)
    if len(structs) < 2:
        return structs[0] if structs else None
    tag = tag_of(data, structs[0].__struct_config__.tag_field or "type")
    return next((struct for struct in structs if struct.__struct_config__.tag == tag), None)


@lru_cache(256)
def _structs(of: Any) -> tuple[type[msgspec.Struct], ...]:
    return tuple(member for member in _members(of) if isinstance(member, type) and issubclass(member, msgspec.Struct))


@lru_cache(256)
def _fields_of(struct: type[msgspec.Struct]) -> dict[str, Any] | None:
    """The types of a struct's fields by their names on the wire; None if it takes any field."""
    config = struct.__struct_config__
    if not config.forbid_unknown_fields:
        return None
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    return fields | ({config.tag_field: str} if config.tag_field else {})


def named(api: str, unknown: Iterable[UnknownField], event: msgspec.Struct | str = "") -> dict[str, str]:
    """Fields as they are published: the API and their path, and their JSON. The type of the ``event``, or what it is,
    precedes its own fields.
    """
    of = event if isinstance(event, str) else str(event.__struct_config__.tag or "").removeprefix("response.")
    own = f"{of}." if of else ""
    return {f"{api}.{own if len(field.path) == 1 else ''}{field.name}": field.json for field in unknown}
