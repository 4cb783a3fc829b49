"""Reads a client's JSON body field by field, so that every refusal names its parameter. Pure."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, TypeVar, cast

import msgspec

from tokenbus.core.request.bounds import MAX_MESSAGES
from tokenbus.events.requests import Extra
from tokenbus.providers.api import ApiName
from tokenbus_services.gateway.problem import UNSUPPORTED, Problem, Refusal, invalid, unsupported

Json = dict[str, Any]
T = TypeVar("T")
MAX_DIGITS = 18
"""Digits of a whole number in a text. Python refuses to convert thousands of them."""
MAX_VALUES = 100_000
"""Objects, arrays, and values in them, of one body."""
MAX_REFUSED = 16
"""Different values of one field, whose objects are left out. The body is read once for each."""
_INDEX = re.compile(r"\[\d+\]")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d{1,6})\]")
_SELECTORS = ("type", "role")
"""Fields that say what their object is."""
_GONE = object()
_decode = msgspec.json.Decoder().decode


def json_body(body: bytes) -> Json:
    """Decode a body that must be a JSON object. Raises Refusal."""
    value = json_value(body)
    if not isinstance(value, dict):
        raise invalid(None, "the body must be a JSON object")
    return cast("Json", value)


def json_value(body: bytes) -> object:
    """Decode a body of any JSON. Raises Refusal."""
    check_size(body)
    with json_errors():
        return _decode(body)


@contextmanager
def json_errors() -> Generator[None]:
    """Raise Refusal for what is no JSON."""
    try:
        yield
    except UnicodeDecodeError:
        raise not_json("it is not UTF-8") from None
    except RecursionError:
        raise not_json("it is nested too deeply") from None
    except msgspec.DecodeError as e:
        raise not_json(str(e)) from None


def check_size(body: bytes) -> None:
    """Raise Refusal for JSON with more than `MAX_VALUES` values, which would take a second to decode and translate."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= MAX_VALUES:
        return
    # Some of these may be in strings. Each value has at most two strings: a name and itself.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') <= 4 * MAX_VALUES:
        bare = b"".join(bare.split(b'"')[::2])
        if bare.count(b",") + bare.count(b"[") + bare.count(b"{") <= MAX_VALUES:
            return
    why = f"the body has more than {MAX_VALUES} values"
    raise Refusal(Problem(status=413, code="request_too_large", message=why, kind="invalid_request"))


def not_json(why: str) -> Refusal:
    message = f"the body is not JSON: {why}"
    return Refusal(Problem(status=400, code="invalid_json", message=message, kind="invalid_request"))


def is_whole(text: str) -> bool:
    """Whether ``int`` reads the text: a whole number without a sign, of a size that anything here may have."""
    return len(text) <= MAX_DIGITS and text.isascii() and text.isdigit()


class Removals:
    """What of a body is left out, since its reader refuses it and the deployment drops it.

    A refused field is left out of every object that has it at this path. If an object cannot be without it, the objects
    with a refused value go instead, and the others keep theirs: those with a `type` or `role` that is refused, and
    those that are refused again without the field.
    """

    def __init__(self, body: Json, spelling: Callable[[str], str] | None = None) -> None:
        self._whole = body
        self._spelling = spelling
        self._refused: dict[str, list[object]] = {}
        self._needed: set[str] = set()
        self.body = body
        """What is left."""

    @property
    def paths(self) -> list[str]:
        """Those that were refused, without indices."""
        return [*self._refused]

    def add(self, param: str) -> bool:
        """Leave out what was refused, by its path. False if that cannot help."""
        path, value = Reading.plain(param), self._at(param)
        if path not in self._refused:
            self._refused[path] = [value]
            if path.rpartition(".")[2] in _SELECTORS:
                return self._hold(path)
        elif path not in self._needed or value in self._refused[path] or len(self._refused[path]) == MAX_REFUSED:
            return False
        else:
            self._refused[path].append(value)
        self._leave_out()
        return True

    def missed(self, param: str) -> bool:
        """Leave out what cannot be without a field that was left out, by the field's path. False if it was not."""
        path = Reading.plain(param)
        if self._at(param) is not None or path in self._needed:
            return False
        if path not in self._refused:
            if not any(each.startswith(path + ".") for each in self._refused):
                return False
            self._refused[path] = [None]
        return self._hold(path)

    def _hold(self, path: str) -> bool:
        self._needed.add(path)
        self._leave_out()
        return "." in path

    def _leave_out(self) -> None:
        left: object = self._whole
        for path, values in self._refused.items():
            left = self._left(left, path.split("."), values if path in self._needed else None)
        self.body = cast("Json", left)

    def _at(self, param: str) -> object:
        """The value at a path; None if there is none."""
        value: Any = self.body
        for name, index in _STEP.findall(param):
            if index and isinstance(value, list):
                items = cast("list[object]", value)
                value = items[int(index)] if int(index) < len(items) else None
            elif name and isinstance(value, dict):
                fields = cast("Json", value)
                value = next((each for key, each in fields.items() if self._is(key, name)), None)
            else:
                return None
        return value

    def _is(self, key: str, name: str) -> bool:
        return name in (key, self._spelling(key) if self._spelling else key)

    def _left(self, value: object, names: Sequence[str], refused: Sequence[object] | None) -> object:
        """The value without the field; `_GONE` for an object that has a refused value there."""
        if isinstance(value, list):
            left = [self._left(each, names, refused) for each in cast("list[object]", value)]
            return [each for each in left if each is not _GONE]
        if not isinstance(value, dict):
            return value
        kept: Json = {}
        found: object = None
        for key, each in cast("Json", value).items():
            left = each
            if self._is(key, names[0]):
                found = each
                left = self._left(each, names[1:], refused) if names[1:] else _GONE if refused is None else each
            if left is not _GONE:
                kept[key] = left
        return _GONE if refused and not names[1:] and found in refused else kept


class Reading:
    """What the objects of one body share while they are read."""

    def __init__(self, drop: Collection[str] = (), spelling: Callable[[str], str] | None = None) -> None:
        """``drop``: fields that are dropped instead of refused, as paths without indices (`metadata.user_id`).
        ``spelling`` maps each name to the one under which it is read, for an API that allows several spellings.
        """
        self.drop = drop
        self.spelling = spelling
        self.passes = False
        """The provider speaks the client's own API, so it gets what nothing here has read."""
        self.left_out: dict[str, None] = {}
        """Paths of the fields that have no effect, without indices."""

    @staticmethod
    def plain(path: str) -> str:
        """A path without indices."""
        return _INDEX.sub("", path)

    def leave_out(self, path: str) -> None:
        """Note a field that has no effect."""
        self.left_out[self.plain(path)] = None


class Fields:
    """One JSON object of a request. `end` refuses every field that nothing has read, here and in the objects inside.

    A field that is null counts as absent. If the request `passes`, unread fields are its `rest`; not those of objects
    in lists, whose readers decide about the whole object (see `each_read`).
    """

    def __init__(self, value: Json, at: str = "", reading: Reading | None = None, *, listed: bool = False) -> None:
        self.reading = reading or Reading()
        spelling = self.reading.spelling
        self._left = {spelling(name) if spelling else name: each for name, each in value.items() if each is not None}
        self.value = value
        """The whole object, as the client sent it."""
        self._at = at
        self._listed = listed
        self._inside: dict[str, Fields] = {}

    def path(self, name: str) -> str:
        """The field's place in the body."""
        return f"{self._at}.{name}" if self._at else name

    def has(self, name: str) -> bool:
        """Whether the field is there and was not read yet."""
        return name in self._left

    def is_text(self, name: str) -> bool:
        """Whether the field is there, was not read yet, and is a string."""
        return isinstance(self._left.get(name), str)

    def peek(self, name: str) -> Any:
        """Return the field's value of any type without reading it; None if absent."""
        return self._left.get(name)

    def take(self, name: str) -> Any:
        """Return the field's value of any type; None if absent."""
        return self._left.pop(name, None)

    def put(self, name: str, value: object) -> None:
        """Put a field back, or in."""
        self._left[name] = value

    def text(self, name: str) -> str | None:
        """Return a string. Raises Refusal if the field has another type, as do the functions below."""
        return self._typed(name, str, "a string")

    def flag(self, name: str) -> bool | None:
        return self._typed(name, bool, "true or false")

    def whole(self, name: str, least: int | None = 0, most: int | None = None) -> int | None:
        """Return a whole number from ``least`` to ``most``."""
        value = self.number(name)
        if value is None:
            return None
        if not float(value).is_integer():
            raise invalid(self.path(name), "must be a whole number")
        if least is not None and value < least:
            raise invalid(self.path(name), f"must be at least {least}")
        if most is not None and value > most:
            raise invalid(self.path(name), f"must be at most {most}")
        return int(value)

    def share(self, name: str) -> float | None:
        """Return a number from 0 to 1."""
        value = self.number(name)
        if value is not None and not 0 <= value <= 1:
            raise invalid(self.path(name), "must be from 0 to 1")
        return value

    def penalty(self, name: str) -> float | None:
        """Return a number from -2 to 2."""
        value = self.number(name)
        if value is not None and not -2 <= value <= 2:
            raise invalid(self.path(name), "must be -2 to 2")
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise invalid(self.path(name), "must be a number")
        return value

    def one_of(self, name: str, values: Collection[str]) -> str | None:
        """Return a string of a fixed set. Raises Refusal with the code `unsupported_parameter` for another."""
        value = self.text(name)
        if value is not None and value not in values:
            known = ", ".join(repr(each) for each in sorted(values))
            raise unsupported(self.path(name), f"{value[:100]!r} is not supported; supported: {known}")
        return value

    def json(self, name: str) -> Json | None:
        return cast("Json | None", self._typed(name, dict, "an object"))

    def fields(self, name: str) -> Fields | None:
        """Return an object to be read field by field. What it leaves unread is refused with what this one does."""
        value = self.json(name)
        if value is None:
            return None
        self._inside[name] = inside = Fields(value, self.path(name), self.reading, listed=self._listed)
        return inside

    def texts(self, name: str) -> list[str]:
        """Return a list of strings; empty if absent."""
        values = self._list(name)
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise invalid(f"{self.path(name)}[{i}]", "must be a string")
        return cast("list[str]", values)

    def each(self, name: str) -> Iterator[Fields]:
        """Yield the objects of a list, each to be read field by field. Refuses what each leaves unread."""
        for i, value in enumerate(self._list(name)):
            at = f"{self.path(name)}[{i}]"
            if not isinstance(value, dict):
                raise invalid(at, "must be an object")
            fields = Fields(cast("Json", value), at, self.reading, listed=True)
            yield fields
            fields.end()

    def each_read(self, name: str, read: Callable[[Fields], T], raw: Callable[[Json], T | None] | None) -> list[T]:
        """Read the objects of a list. If the request passes, ``raw`` makes what stands for an object that ``read`` does
        not support, or not all of; None: nothing can.
        """
        found: list[T] = []
        for fields in self.each(name):
            try:
                value = read(fields)
                fields.end()
            except Refusal as e:
                passed = raw(fields.value) if raw and self.reading.passes and e.problem.code == UNSUPPORTED else None
                if passed is None:
                    raise
                fields.clear()
                value = passed
            found.append(value)
        return found

    def take_rest(self) -> Json:
        """Return the fields that nothing has read, and count them as read."""
        rest = self.rest()
        self.clear()
        return rest

    def own(self, api: ApiName) -> Extra | None:
        """The fields that nothing has read, if the request passes: further ones of this object for the provider. They
        count as read.
        """
        rest = self.take_rest() if self.reading.passes else {}
        return {api: rest} if rest else None

    def clear(self) -> None:
        """Count everything as read."""
        self._left.clear()
        self._inside.clear()

    def needed(self, name: str, value: T | None) -> T:
        """Return ``value``. Raises Refusal, naming the field, if it is None."""
        if value is None:
            raise invalid(self.path(name), "this field is required")
        return value

    def only(self, name: str, *values: object, why: str = "is not supported by this gateway") -> None:
        """Accept a field that has one of these values, which change nothing. Raises Refusal for any other."""
        if not self._is_neutral(name, values) and not self._handled(name):
            raise unsupported(self.path(name), f"{name!r} {why}")

    def hint(self, name: str, *values: object) -> None:
        """Leave out a field that changes no answer's meaning and has no place at the provider; one of these values is
        what the provider does anyway.
        """
        if self._is_neutral(name, values):
            return
        if self.reading.passes:
            self.refuse("is not known here", name)
            return
        self._left.pop(name)
        self.reading.leave_out(self.path(name))

    def refuse(self, why: str, *names: str) -> None:
        """Raise Refusal if one of these fields is present, unless it is passed or dropped."""
        for name in names:
            if name in self._left and not self._handled(name):
                raise unsupported(self.path(name), f"{name[:100]!r} {why}")

    def end(self) -> None:
        """Raise Refusal if there is a field that nothing has read."""
        for inside in self._inside.values():
            inside.end()
        self.refuse("is not supported by this gateway", *list(self._left))

    def rest(self) -> Json:
        """The fields that nothing has read, of a request that passes: each at its place."""
        inside = {name: rest for name, fields in self._inside.items() if (rest := fields.rest())}
        return {**self._left, **inside}

    @property
    def _passes(self) -> bool:
        return self.reading.passes and not self._listed

    def _is_neutral(self, name: str, values: Collection[object]) -> bool:
        value = self._left.get(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in values):
            return False
        if not self._passes:
            self._left.pop(name, None)
        return True

    def _handled(self, name: str) -> bool:
        """Whether an unsupported field needs no refusal: it is passed, or dropped."""
        if self._passes:
            return True
        if self.reading.plain(self.path(name)) not in self.reading.drop:
            return False
        self._left.pop(name, None)
        self.reading.leave_out(self.path(name))
        return True

    def _list(self, name: str) -> list[object]:
        values = cast("list[object] | None", self._typed(name, list, "a list")) or []
        if len(values) > MAX_MESSAGES:
            raise invalid(self.path(name), f"has {len(values)} entries; at most {MAX_MESSAGES} are accepted")
        return values

    def _typed(self, name: str, kind: type[T], what: str) -> T | None:
        value = self.take(name)
        if value is not None and not isinstance(value, kind):
            raise invalid(self.path(name), f"must be {what}")
        return value


def _is_finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


_OPAQUE_MARK = b"tokenbus1."
_MAX_OPAQUE = 16
ITEMS, LAST_ITEMS = "items", "last_items"
"""Fields with the provider's items before a block, and after all: lists of `hosted.original`, as JSON."""
_decode_opaque = msgspec.json.Decoder(dict[str, str])


def pack_opaque(opaque: Mapping[str, str]) -> str:
    """Return what a provider wants back with a block as text, for clients that know one signature only.

    It is packed with its origin: the bus returns it to the provider that made it, and to no other. A signature of the
    client's own protocol goes as it is, so that a conversation may move between provider and gateway.
    """
    return b64encode(_OPAQUE_MARK + msgspec.json.encode(dict(opaque))).decode()


def unpack_opaque(signature: str) -> dict[str, str] | None:
    """Return the packed values; None if the text was made by someone else."""
    try:
        data = b64decode(signature, altchars=b"-_" if "-" in signature or "_" in signature else None)
        opaque = _decode_opaque.decode(data.removeprefix(_OPAQUE_MARK)) if data.startswith(_OPAQUE_MARK) else None
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError):
        return None
    return opaque if opaque and len(opaque) <= _MAX_OPAQUE else None
