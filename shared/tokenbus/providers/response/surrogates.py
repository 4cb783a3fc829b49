"""Rejoins surrogate pairs that a provider split: each half arrives as a lone escape in its own text.

JSON allows that (`"\\ud83d"` here, `"\\ude00"` in the next event), text does not. A lone half is therefore decoded as a
placeholder, an unused character of the last private-use plane. Two placeholders that meet in one block become
the intended character. A half that never meets its other half becomes U+FFFD.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from tokenbus.events import normalized as n

_FIRST = 0x10F800
"""The placeholder for U+D800; the 2048 halves fill the plane to its end."""
_LOST = "\ufffd"
_PLACEHOLDER = re.compile("[\U0010f800-\U0010ffff]")
_PAIR = re.compile("([\U0010f800-\U0010fbff])([\U0010fc00-\U0010ffff])")
_MAY_BE_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_OWN_PLACEHOLDER = re.compile(rb"\xf4\x8f[\xa0-\xbf]|\\u[dD][bB][fF][eEfF]")
"""A placeholder character that the provider itself wrote."""
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a complete surrogate pair
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"  # a lone half
    rb"|\\."
)

_Delta = n.TextDelta | n.TranscriptDelta | n.ThinkingDelta | n.RefusalDelta | n.ToolCallDelta
E = TypeVar("E", bound=msgspec.Struct)


def with_placeholders(data: bytes) -> tuple[bytes, bool]:
    """Replace each lone escaped half in JSON with a placeholder. Also return whether there was one."""
    if not _MAY_BE_HALF.search(data):
        return data, False
    whole = _ESCAPE.sub(lambda m: _placeholder(m[1]) if m[1] else m[0], data)
    if whole == data:
        return data, False
    if _OWN_PLACEHOLDER.search(data):  # indistinguishable from the provider's own: join nothing in this event
        return replace_lone_surrogates(data), False
    return whole, True


def replace_lone_surrogates(data: bytes) -> bytes:
    """Replace each lone escaped half in JSON with U+FFFD."""
    return _ESCAPE.sub(lambda m: _LOST.encode() if m[1] else m[0], data)


def _placeholder(escape: bytes) -> bytes:
    return chr(_FIRST + int(escape[2:], 16) - 0xD800).encode()


def to_units(text: str) -> bytes:
    """Encode text as UTF-16, turning placeholders back into the halves they stand for."""
    if not text.isascii() and _PLACEHOLDER.search(text):
        text = _PLACEHOLDER.sub(lambda m: chr(ord(m[0]) - _FIRST + 0xD800), text)
    return text.encode("utf-16-le", "surrogatepass")


def from_units(units: bytes) -> str:
    """Decode UTF-16 units, turning lone halves into placeholders."""
    text = units.decode("utf-16-le", "surrogatepass")
    return re.sub("[\ud800-\udfff]", lambda m: chr(ord(m[0]) + _FIRST - 0xD800), text)


class SurrogateJoiner(msgspec.Struct):
    """Takes the events of one attempt and joins split surrogate pairs. Its fields are its whole state."""

    waiting: dict[int, tuple[str, str]] = {}
    """By block: the kind of the delta that ended in a first half, and that half's placeholder."""

    def join(self, events: list[n.Normalized]) -> list[n.Normalized]:
        """Process events and return the result."""
        out: list[n.Normalized] = []
        for event in events:
            match event:
                case n.TextDelta() | n.TranscriptDelta() | n.ThinkingDelta() | n.RefusalDelta() | n.ToolCallDelta():
                    self._delta(event, out)
                    continue
                case n.BlockStop() | n.ToolCallDone():
                    self._flush(event.block, out)
                case n.Start():
                    self.waiting.clear()
                case _ if isinstance(event, n.Terminal):
                    for block in list(self.waiting):
                        self._flush(block, out)
                case _:
                    pass
            out.append(_cleaned(event))
        return out

    def _delta(self, event: _Delta, out: list[n.Normalized]) -> None:
        kind = type(event).__name__
        before = self.waiting.pop(event.block, None)
        if before and before[0] != kind:
            out.append(_DELTAS[before[0]](event.block, _LOST))
            before = None
        fragment = event.fragment if isinstance(event, n.ToolCallDelta) else event.text
        text = _PAIR.sub(_joined, (before[1] if before else "") + fragment)
        if "\U0010f800" <= text[-1] <= "\U0010fbff":
            self.waiting[event.block] = (kind, text[-1])
            text = text[:-1]
        if text:
            out.append(_DELTAS[kind](event.block, _PLACEHOLDER.sub(_LOST, text)))

    def _flush(self, block: int, out: list[n.Normalized]) -> None:
        if before := self.waiting.pop(block, None):
            out.append(_DELTAS[before[0]](block, _LOST))


_DELTAS: dict[str, type[_Delta]] = {
    delta.__name__: delta
    for delta in (n.TextDelta, n.TranscriptDelta, n.ThinkingDelta, n.RefusalDelta, n.ToolCallDelta)
}


def _joined(pair: re.Match[str]) -> str:
    return chr(0x10000 + ((ord(pair[1]) - _FIRST) << 10) + (ord(pair[2]) - _FIRST - 0x400))


def _cleaned(event: E) -> E:
    """Remove placeholders from any other event."""
    changed: dict[str, object] = {}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, str) and not value.isascii() and _PLACEHOLDER.search(value):
            changed[name] = _PLACEHOLDER.sub(_LOST, _PAIR.sub(_joined, value))
        elif isinstance(value, msgspec.Struct) and (cleaned := _cleaned(value)) is not value:
            changed[name] = cleaned
    return msgspec.structs.replace(event, **changed) if changed else event
