"""Elements of a JSON text while it is written: each array element or field at a path, once it is complete. Pure.

The text is read once, in any pieces: the time is linear in its length. Only the value that is being read at the path is
kept, and the names of fields on the way to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar, cast

import msgspec

from tokenbus.errors import Malformed, TooLarge, undecodable
from tokenbus.events.public import Chunk, Completed, PublicEvent, Restarted, Retrying

T = TypeVar("T")
V = TypeVar("V")
ANY = "*"
"""Step of a path: every element of an array, or every field of an object."""
MOST_CHARACTERS = 2**20
MOST_DEPTH = 128

_State = Literal[
    "value",
    "first value",
    "name",
    "first name",
    "colon",
    "comma",
    "string",
    "string of a name",
    "word",
    "inside",
    "end",
]
_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_FLAT = re.compile(r'[^"\[\]{}]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_decode_name = msgspec.json.Decoder(str).decode
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


class JsonElement(msgspec.Struct, Generic[T], frozen=True):
    """A complete value of a JSON text."""

    path: tuple[str | int, ...]
    """Where it is: names of fields, and places in arrays from 0."""
    value: T


class _Container(msgspec.Struct):
    """An array or object that is open."""

    is_object: bool
    on_path: bool
    at: str | int = -1
    """The name of the field, or the place of the element."""
    names: set[str] = msgspec.field(default_factory=set[str])
    """Fields so far, of an object on the path."""


class JsonElements(Generic[T]):
    """Reads one JSON text. Call `feed` with its pieces, then `end`.

    Each value at the path is returned once, in the order of the text, by the piece that completes it.
    """

    def __init__(
        self,
        path: str | Sequence[str] = ANY,
        as_type: type[T] | type[object] = object,
        *,
        most_characters: int = MOST_CHARACTERS,
        most_depth: int = MOST_DEPTH,
    ) -> None:
        """``path``: steps separated by dots, or a sequence of them: names of fields, places in arrays, or ``*`` for
        each of either (``items.*``, ``title``). ``*`` alone: each element or field of the whole; an empty path: the
        whole.

        ``as_type``: a dataclass, a `msgspec.Struct` or another type to which values are converted.

        ``most_characters``: of a value at the path, a number or a name; ``most_depth``: of arrays and objects. Beyond
        them `feed` raises TooLarge.
        """
        self._path = tuple(path.split(".") if isinstance(path, str) and path else path)
        self._decode: Callable[[str], T] = msgspec.json.Decoder(cast("type[T]", as_type)).decode
        self._most_characters = most_characters
        self._most_depth = most_depth
        self._state: _State = "value"
        self._open: list[_Container] = []
        self._kept: Literal["value", "word", "name"] | None = None
        """What is kept until it is complete: the value at the path, another number or literal, a name on the path."""
        self._pieces: list[str] = []
        self._size = 0
        self._rest = ""
        """The beginning of an escape."""
        self._inside = 0
        """Open arrays and objects within the value at the path: its parser checks what else is in it."""
        self._error: Malformed | TooLarge | None = None

    def feed(self, text: str) -> list[JsonElement[T]]:
        """Add text. Return the values that it completes. Raises Malformed if it is not JSON, if a value is not of the
        type, or if a field on the path is there twice; TooLarge. Values before such a place are returned first.
        """
        if self._error:
            raise self._error
        out: list[JsonElement[T]] = []
        try:
            self._read(self._rest + text, out)
        except (Malformed, TooLarge) as e:
            self._error = e
            if not out:
                raise
        return out

    def end(self) -> list[JsonElement[T]]:
        """End the text. Return the value that only its end completes: a number that is the whole text. Raises Malformed
        if the text is not complete, and the errors of `feed`.
        """
        out = self.feed("\n")
        if self._state != "end":
            raise self._error or Malformed(self._where, "the text ends early")
        return out

    def _read(self, text: str, out: list[JsonElement[T]]) -> None:
        at = begun = 0
        while at < len(text):
            if self._state in ("string", "string of a name"):
                at, ended = self._string(text, at)
                if not ended:
                    break
                if self._state == "string of a name":
                    self._named(text[begun:at])
                elif self._inside:
                    self._state = "inside"
                else:
                    self._complete(text[begun:at], out)
            elif self._state == "inside":
                if (at := self._flat(text, at)) and not self._inside:
                    self._complete(text[begun:at], out)
            elif self._state == "word":
                at = _end_of(_WORD, text, at)
                if at < len(text):
                    self._complete(text[begun:at], out)
            elif (at := _end_of(_BLANK, text, at)) < len(text):
                kept, closed = self._kept, self._token(text[at])
                if self._kept != kept:
                    begun = at
                at += not self._in_word
                if closed:
                    self._complete(text[begun:at], out)
        if self._kept:
            self._keep(text[begun:at])
        self._rest = text[at:]

    def _string(self, text: str, at: int) -> tuple[int, bool]:
        """Read on in a string: where it stops, and whether the string ends there."""
        while (at := _end_of(_PLAIN, text, at)) < len(text):
            if text[at] == '"':
                return at + 1, True
            if escape := _ESCAPE.match(text, at):
                at = escape.end()
            elif _BEGUN_ESCAPE.match(text, at):
                break
            else:
                raise Malformed(self._where, "a string with a control character or an unknown escape")
        return at, False

    def _flat(self, text: str, at: int) -> int:
        """Read on within the value at the path, to its end or to a string; where that is."""
        while (at := _end_of(_FLAT, text, at)) < len(text):
            at += 1
            match text[at - 1]:
                case '"':
                    self._state = "string"
                    break
                case "[" | "{":
                    self._inside += 1
                    self._check_depth(len(self._open) + self._inside)
                case _:
                    self._inside -= 1
                    if not self._inside:
                        break
        return at

    def _check_depth(self, depth: int) -> None:
        if depth > self._most_depth:
            raise TooLarge(self._where, depth, self._most_depth, unit="levels")

    def _token(self, character: str) -> bool:
        """Apply the first character of a token; whether it ends an array or object."""
        last = self._open[-1] if self._open else None
        match self._state:
            case "name" | "first name" if character == '"':
                self._state = "string of a name"
                if last and last.on_path:
                    self._kept = "name"
            case "colon" if character == ":":
                self._state = "value"
            case "comma" if character == "," and last:
                self._state = "name" if last.is_object else "value"
                if not last.is_object:
                    last.at = int(last.at) + 1
            case "first name" | "comma" if character == "}" and last and last.is_object:
                return True
            case "first value" | "comma" if character == "]" and last and not last.is_object:
                return True
            case "value" | "first value":
                self._begin(character, last)
            case _:
                raise Malformed(self._where, f"{character!r} is not expected")
        return False

    def _begin(self, character: str, parent: _Container | None) -> None:
        """A value begins."""
        depth = len(self._open)
        on_path = parent is None or (parent.on_path and self._path[depth - 1] in (ANY, str(parent.at)))
        if on_path and depth == len(self._path):
            self._kept, on_path = "value", False
        match character:
            case "[" | "{" if self._kept:
                self._check_depth(depth + 1)
                self._inside, self._state = 1, "inside"
            case "[" | "{":
                self._check_depth(depth + 1)
                is_object = character == "{"
                self._open.append(_Container(is_object, on_path, "" if is_object else 0))
                self._state = "first name" if is_object else "first value"
            case '"':
                self._state = "string"
            case _ if _WORD.fullmatch(character):
                self._state = "word"
                self._kept = self._kept or "word"
            case _:
                raise Malformed(self._where, f"{character!r} is not expected")

    def _named(self, tail: str) -> None:
        """A name is complete."""
        self._state = "colon"
        if self._kept != "name":
            return
        parent = self._open[-1]
        parent.at = name = self._read_as(_decode_name, self._taken(tail))
        if name in parent.names:
            raise Malformed(self._where, "the field is there twice")
        parent.names.add(name)

    def _complete(self, tail: str, out: list[JsonElement[T]]) -> None:
        """A value is complete; ``tail``: the last piece of what is kept."""
        if self._state not in ("string", "word", "inside"):
            self._open.pop()
        self._state = "comma" if self._open else "end"
        if self._kept == "word" and not _SCALAR.fullmatch(word := self._taken(tail)):
            raise Malformed(self._where, f"{word[:40]!r} is no number and no literal")
        if self._kept == "value":
            value = self._read_as(self._decode, self._taken(tail))
            out.append(JsonElement(tuple(container.at for container in self._open), value))

    def _read_as(self, decode: Callable[[str], V], text: str) -> V:
        try:
            return decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as e:
            raise Malformed(self._where, undecodable(e)) from None

    def _keep(self, piece: str) -> None:
        self._size += len(piece)
        if self._size > self._most_characters:
            raise TooLarge(self._where, self._size, self._most_characters, unit="characters")
        self._pieces.append(piece)

    def _taken(self, tail: str) -> str:
        self._keep(tail)
        whole = "".join(self._pieces)
        self._pieces, self._size, self._kept = [], 0, None
        return whole

    @property
    def _in_word(self) -> bool:
        return self._state == "word"

    @property
    def _where(self) -> str:
        return "the JSON at " + (".".join(str(container.at)[:40] for container in self._open[:8]) or "its beginning")


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found
    return found.end()


class RunElement(JsonElement[T], Generic[T], frozen=True, kw_only=True):
    """A complete value of a run's answer."""

    number: int
    """Counts the run's elements from 0."""
    seq: int
    """Of the chunk that completed it."""
    turn: int
    attempt: int
    """With `on_failure` ``restart``, a text may be void: its elements come again, of a higher attempt."""


class RunElements(Generic[T]):
    """Reads the answer of a run from its events: its JSON is the text of its last turn, as in `Response.parsed`.

    Pass all of the run's events to `add`, in order from the first. Events that were passed already are ignored.
    """

    def __init__(
        self, path: str | Sequence[str] = ANY, as_type: type[T] | type[object] = object, **bounds: int
    ) -> None:
        """``path``, ``as_type`` and ``bounds`` as of `JsonElements`."""
        self._new = lambda: JsonElements[T](path, as_type, **bounds)
        self._text = self._new()
        self._block = -1
        """The last block of the turn's text."""
        self._turn = 0
        self._seq = -1
        self._number = 0
        self._problem: Malformed | TooLarge | None = None

    def add(self, event: PublicEvent) -> list[RunElement[T]]:
        """Add an event. Return the values that it completes.

        Raises Malformed or TooLarge with the event that ends the run, if its answer is not such a JSON. The text of an
        earlier turn may be anything.
        """
        if event.seq <= self._seq:
            return []
        self._seq = event.seq
        if event.turn != self._turn:
            self._turn = event.turn
            self._begin()
        match event:
            case Chunk(kind="text"):
                self._block = event.block
                return self._numbered(self._read(event.text), event)
            case Retrying() | Restarted() if event.drop_from <= self._block:
                self._begin()  # all of the turn's text is void, or none
            case Completed():
                found = self._numbered(self._read(None), event)
                if self._problem:
                    raise self._problem
                return found
            case _:
                pass
        return []

    def _begin(self) -> None:
        self._text, self._block, self._problem = self._new(), -1, None

    def _read(self, text: str | None) -> list[JsonElement[T]]:
        if self._problem:
            return []
        try:
            return self._text.end() if text is None else self._text.feed(text)
        except (Malformed, TooLarge) as e:
            self._problem = e
            return []

    def _numbered(self, found: list[JsonElement[T]], event: PublicEvent) -> list[RunElement[T]]:
        first, self._number = self._number, self._number + len(found)
        at = {"seq": event.seq, "turn": event.turn, "attempt": event.attempt}
        return [RunElement(each.path, each.value, number=n, **at) for n, each in enumerate(found, first)]
