"""Checkpoint of a run's state: a small head, and its long texts as numbered pieces that are written once.

State grows by text that is only appended to: the open block, and finished blocks that the next turn sends back. Each
checkpoint writes only the new pieces, so all checkpoints of a run together cost about as much as its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec

from tokenbus.core.run.state import RunState

LONG = 1024
"""Texts longer than this many characters are stored in pieces."""
PIECE = 128 * 1024
"""Maximum characters of one piece."""

Path: TypeAlias = tuple[str | int, ...]
"""Path of a text in the state: names of fields, keys and list indexes."""

_HOLDERS: tuple[type, ...] = (str, list, dict, msgspec.Struct)
_GROWING = frozenset({"pieces", "raw"})
"""Fields of structs that hold one text as an append-only list of parts. A dict may have such a key, too: a tool's
arguments, for example.
"""


class Snapshot(msgspec.Struct, frozen=True):
    head: bytes
    needs: list[int]
    """Numbers of all its pieces."""
    new: dict[int, bytes]
    """The pieces that earlier checkpoints did not write."""


class _Head(msgspec.Struct, array_like=True):
    state: RunState
    texts: list[tuple[Path, list[int]]]
    next: int


class _Text(msgspec.Struct):
    """A text that is stored in pieces."""

    segments: list[str]
    size: int
    numbers: list[int]


class Checkpoints:
    """Successive checkpoints of one run."""

    def __init__(self) -> None:
        self._next = 0
        self._kept: dict[Path, _Text] = {}
        """By path at the last checkpoint."""
        self._by_id: dict[int, _Text] = {}
        """The texts that are a single string, by the identity of that string."""
        self._growing: list[_Text] = []
        """Texts that are still appended to. A block that has ended since starts with one of them."""
        self._found: dict[Path, _Text] = {}
        self._new: dict[int, bytes] = {}

    def save(self, state: RunState) -> Snapshot | None:
        """Checkpoint the state; None if it has no long text. Joins parts of growing texts; changes nothing else in the
        state.
        """
        self._found, self._new = {}, {}
        light = self._light(state, ())
        self._keep(self._found)
        if not self._found:
            return None
        texts = [(path, text.numbers) for path, text in self._found.items()]
        head = msgspec.msgpack.encode(_Head(light, texts, self._next))
        needs = sorted({number for _, numbers in texts for number in numbers})
        return Snapshot(head, needs, self._new)

    @classmethod
    def load(cls, head: bytes, pieces: Mapping[int, bytes]) -> tuple[RunState, Checkpoints]:
        """Restore a saved state and the checkpoints to continue with.

        Raises KeyError if a piece is missing, MsgspecError if the head is invalid.
        """
        saved = msgspec.msgpack.decode(head, type=_Head)
        self = cls()
        self._next = saved.next
        found: dict[Path, _Text] = {}
        for path, numbers in saved.texts:
            text = "".join([pieces[number].decode() for number in numbers])
            _put(saved.state, path, text)
            found[path] = _Text([text], len(text), numbers)
        self._keep(found)
        return saved.state, self

    def _keep(self, found: dict[Path, _Text]) -> None:
        self._kept = found
        self._by_id = {id(text.segments[0]): text for text in found.values() if len(text.segments) == 1}
        self._growing = [text for path, text in found.items() if len(path) > 1 and path[-2] in _GROWING]

    # --- the state without its long texts -------------------------------------------------------------------------

    def _light(self, value: Any, path: Path) -> Any:
        if isinstance(value, str):
            if len(value) <= LONG:
                return value
            self._found[path] = self._text_of(value, path)
            return ""
        changed: dict[Any, Any] = {}
        of_struct = isinstance(value, msgspec.Struct)
        for key, inner in _inside(value):
            if of_struct and key in _GROWING and isinstance(inner, list):
                light: Any = self._light_parts(cast("list[Any]", inner), (*path, key))
            else:
                light = self._light(inner, (*path, key))
            if light is not inner:
                changed[key] = light
        if not changed:
            return value
        if of_struct:
            return msgspec.structs.replace(value, **changed)
        if isinstance(value, dict):
            return {**cast("dict[Any, Any]", value), **changed}
        return [changed.get(i, inner) for i, inner in enumerate(value)]

    def _light_parts(self, parts: list[str], path: Path) -> list[str]:
        """Store the long parts at the start of a growing text as one text; keep the later parts in place."""
        long = next((i for i, part in enumerate(parts) if len(part) <= LONG), len(parts))
        rest = "".join(parts[long:])
        if len(rest) > LONG:
            parts[long:] = [rest]
            long += 1
        if not long:
            return parts
        path = (*path, 0)
        segments, before = parts[:long], self._kept.get(path)
        grown = before and len(before.segments) <= long and all(map(_same, before.segments, segments))
        start, numbers = (len(before.segments), before.numbers) if before and grown else (0, [])
        numbers = numbers + [number for segment in segments[start:] for number in self._write(segment)]
        self._found[path] = _Text(segments, sum(map(len, segments)), numbers)
        return ["", *parts[long:]]

    def _text_of(self, text: str, path: Path) -> _Text:
        known = self._by_id.get(id(text))
        if known and known.segments[0] is text:
            return known
        candidates = [self._kept[path]] if path in self._kept else self._growing
        fitting = [kept for kept in candidates if kept.size <= len(text) and _begins(text, kept.segments)]
        begun = max(fitting, key=lambda kept: kept.size, default=_Text([], 0, []))
        written = _Text([text], len(text), begun.numbers + self._write(text[begun.size :]))
        self._by_id[id(text)] = written
        return written

    def _write(self, text: str) -> list[int]:
        first = self._next
        for at in range(0, len(text), PIECE):
            self._new[self._next] = text[at : at + PIECE].encode()
            self._next += 1
        return list(range(first, self._next))


def _inside(value: Any) -> Iterable[tuple[str | int, Any]]:
    """The members of the value that may hold text, each with its field, key or index."""
    if isinstance(value, msgspec.Struct):
        inside: Iterable[tuple[Any, Any]] = [(name, getattr(value, name)) for name in value.__struct_fields__]
    elif isinstance(value, dict):
        inside = cast("dict[Any, Any]", value).items()
    elif isinstance(value, list):
        inside = enumerate(cast("list[Any]", value))
    else:
        return ()
    return [(key, inner) for key, inner in inside if inner and isinstance(inner, _HOLDERS)]


def _same(one: str, other: str) -> bool:
    return one is other


def _begins(text: str, segments: Sequence[str]) -> bool:
    at = 0
    for segment in segments:
        if not text.startswith(segment, at):
            return False
        at += len(segment)
    return True


def _put(state: Any, path: Path, text: str) -> None:
    *way, last = path
    for key in way:
        state = getattr(state, cast("str", key)) if isinstance(state, msgspec.Struct) else state[key]
    if isinstance(state, msgspec.Struct):
        msgspec.structs.force_setattr(state, cast("str", last), text)
    else:
        state[last] = text
