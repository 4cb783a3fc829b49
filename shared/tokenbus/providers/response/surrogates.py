"""Halves of a character: some providers cut text between the halves of a surrogate pair, and escape each alone.

JSON allows that (`"\\ud83d"` here, `"\\ude00"` in the next event), text does not. So a half that stands alone is read
as a stand-in, a character of the last private-use plane that nobody writes, and two stand-ins that meet in one block
are the character that was meant. One that never meets its other half is U+FFFD.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from tokenbus.events.normalized import (
    BlockStop,
    Normalized,
    RefusalDelta,
    Start,
    Terminal,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
)

_FIRST = 0x10F800
"""The stand-in of the half U+D800; the 2048 halves fill the plane up to its end."""
_LOST = "\ufffd"
_STAND_IN = re.compile("[\U0010f800-\U0010ffff]")
_PAIR = re.compile("([\U0010f800-\U0010fbff])([\U0010fc00-\U0010ffff])")
_MAY_BE_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_TAKEN = re.compile(rb"\xf4\x8f[\xa0-\xbf]|\\u[dD][bB][fF][eEfF]")
"""A stand-in that the provider itself wrote."""
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a surrogate pair: as it should be
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"  # half of one
    rb"|\\."
)

_Delta = TextDelta | ThinkingDelta | RefusalDelta | ToolCallDelta
E = TypeVar("E", bound=msgspec.Struct)


def stand_ins(data: bytes) -> tuple[bytes, bool]:
    """JSON with a stand-in for each escaped half that is alone, and whether there was one."""
    if not _MAY_BE_HALF.search(data):
        return data, False
    whole = _ESCAPE.sub(lambda m: _stand_in(m[1]) if m[1] else m[0], data)
    if whole == data:
        return data, False
    if _TAKEN.search(data):  # not to be told from the provider's own: no half is joined in this event
        return without(data), False
    return whole, True


def without(data: bytes) -> bytes:
    """JSON with U+FFFD for each escaped half that is alone."""
    return _ESCAPE.sub(lambda m: _LOST.encode() if m[1] else m[0], data)


def _stand_in(escape: bytes) -> bytes:
    return chr(_FIRST + int(escape[2:], 16) - 0xD800).encode()


def to_units(text: str) -> bytes:
    """The text in UTF-16, a stand-in as the half that it stands for."""
    if not text.isascii() and _STAND_IN.search(text):
        text = _STAND_IN.sub(lambda m: chr(ord(m[0]) - _FIRST + 0xD800), text)
    return text.encode("utf-16-le", "surrogatepass")


def from_units(units: bytes) -> str:
    """The text of such units, a half as its stand-in."""
    text = units.decode("utf-16-le", "surrogatepass")
    return re.sub("[\ud800-\udfff]", lambda m: chr(ord(m[0]) + _FIRST - 0xD800), text)


class Halves(msgspec.Struct):
    """Events of one attempt in, the same with their halves joined. Its fields are its whole state."""

    waiting: dict[int, tuple[str, str]] = {}
    """By block: the kind of the delta that ended in half a character, and that half's stand-in."""

    def join(self, events: list[Normalized]) -> list[Normalized]:
        """The events as their reader gets them."""
        out: list[Normalized] = []
        for event in events:
            match event:
                case TextDelta() | ThinkingDelta() | RefusalDelta() | ToolCallDelta():
                    self._delta(event, out)
                    continue
                case BlockStop() | ToolCallDone():
                    self._give_up(event.block, out)
                case Start():
                    self.waiting.clear()
                case _ if isinstance(event, Terminal):
                    for block in list(self.waiting):
                        self._give_up(block, out)
                case _:
                    pass
            out.append(_cleaned(event))
        return out

    def _delta(self, event: _Delta, out: list[Normalized]) -> None:
        kind = type(event).__name__
        before = self.waiting.pop(event.block, None)
        if before and before[0] != kind:
            out.append(_DELTAS[before[0]](event.block, _LOST))
            before = None
        said = event.fragment if isinstance(event, ToolCallDelta) else event.text
        text = _PAIR.sub(_joined, (before[1] if before else "") + said)
        if "\U0010f800" <= text[-1] <= "\U0010fbff":
            self.waiting[event.block] = (kind, text[-1])
            text = text[:-1]
        if text:
            out.append(_DELTAS[kind](event.block, _STAND_IN.sub(_LOST, text)))

    def _give_up(self, block: int, out: list[Normalized]) -> None:
        if before := self.waiting.pop(block, None):
            out.append(_DELTAS[before[0]](block, _LOST))


_DELTAS: dict[str, type[_Delta]] = {
    delta.__name__: delta for delta in (TextDelta, ThinkingDelta, RefusalDelta, ToolCallDelta)
}


def _joined(pair: re.Match[str]) -> str:
    return chr(0x10000 + ((ord(pair[1]) - _FIRST) << 10) + (ord(pair[2]) - _FIRST - 0x400))


def _cleaned(event: E) -> E:
    """Any other event without a stand-in."""
    changed: dict[str, object] = {}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, str) and not value.isascii() and _STAND_IN.search(value):
            changed[name] = _STAND_IN.sub(_LOST, _PAIR.sub(_joined, value))
        elif isinstance(value, msgspec.Struct) and (cleaned := _cleaned(value)) is not value:
            changed[name] = cleaned
    return msgspec.structs.replace(event, **changed) if changed else event
