"""A run's state as a checkpoint: a small head, and its long texts as numbered pieces that are written once.

What makes a state large is text that only grows: the open block, finished blocks that the next turn sends back. Each
checkpoint adds the pieces that are new since the one before. So all checkpoints of a run together cost about what its
input does, however long it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec

from tokenbus.core.run.state import RunState

LONG = 1024
"""Characters from which on a text is kept in pieces."""
PIECE = 128 * 1024
"""Most characters of one piece."""

Path: TypeAlias = tuple[str | int, ...]
"""Where in the state a text stands: fields, keys and places in lists."""

_HOLDERS: tuple[type, ...] = (str, list, dict, msgspec.Struct)
_GROWING = frozenset({"pieces", "raw"})
"""Fields that hold one text as a list of its parts, which is added to at its end alone."""


class Snapshot(msgspec.Struct, frozen=True):
    """One checkpoint."""

    head: bytes
    needs: list[int]
    """The pieces that belong to it."""
    new: dict[int, bytes]
    """Those of them that no checkpoint before this one had."""


class _Head(msgspec.Struct, array_like=True):
    state: RunState
    texts: list[tuple[Path, list[int]]]
    next: int


class _Text(msgspec.Struct):
    """A text that is kept."""

    segments: list[str]
    size: int
    numbers: list[int]


class Checkpoints:
    """The checkpoints of one run, from `save` to `save`."""

    def __init__(self) -> None:
        self._next = 0
        self._kept: dict[Path, _Text] = {}
        """By where it stood at the last checkpoint."""
        self._by_id: dict[int, _Text] = {}
        """The same where the text is one string, by that string's identity."""
        self._growing: list[_Text] = []
        """Those that are added to: a block that ended since begins with one of them."""
        self._found: dict[Path, _Text] = {}
        self._new: dict[int, bytes] = {}

    def save(self, state: RunState) -> Snapshot | None:
        """A checkpoint of the state; None where it holds no long text, and is small as it is. Parts of growing texts
        are joined in it; nothing else of it is changed."""
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
        """The state that was saved, and how to go on. Raises KeyError for a piece that is missing, MsgspecError for a
        head that is none."""
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

    # --- a state without its long texts ---------------------------------------------------------------------------

    def _light(self, value: Any, path: Path) -> Any:
        if isinstance(value, str):
            if len(value) <= LONG:
                return value
            self._found[path] = self._text_of(value, path)
            return ""
        changed: dict[Any, Any] = {}
        for key, inner in _inside(value):
            if isinstance(inner, list) and key in _GROWING:
                light: Any = self._light_parts(cast("list[Any]", inner), (*path, key))
            else:
                light = self._light(inner, (*path, key))
            if light is not inner:
                changed[key] = light
        if not changed:
            return value
        if isinstance(value, msgspec.Struct):
            return msgspec.structs.replace(value, **changed)
        if isinstance(value, dict):
            return {**cast("dict[Any, Any]", value), **changed}
        return [changed.get(i, inner) for i, inner in enumerate(value)]

    def _light_parts(self, parts: list[str], path: Path) -> list[str]:
        """The long parts of a growing text are kept as one; what is after them stays."""
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
    """What of the value may hold text, under its field, key or place."""
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
    """Set what stands at this place."""
    *way, last = path
    for key in way:
        state = getattr(state, cast("str", key)) if isinstance(state, msgspec.Struct) else state[key]
    if isinstance(state, msgspec.Struct):
        msgspec.structs.force_setattr(state, cast("str", last), text)
    else:
        state[last] = text
