"""Stop strings in the text of a chat answer, found here whether its provider was told of them or not.

A provider takes only so many, or none, and does not always say which one it stopped on. Each text block is looked
through by itself; what may still become a stop string is held back, so that nothing of one is ever heard.
"""

from __future__ import annotations

import msgspec

from tokenbus.core.stop_strings import stops
from tokenbus.events import normalized as n


class _Text(msgspec.Struct):
    """An open text block."""

    state: int = 0
    """How much of a stop string is held back."""
    begun: bool = False
    """Its start was told, for it has content."""


class StopScan(msgspec.Struct):
    """One attempt's events in, the same without what a stop string ends. Its fields are its whole state."""

    strings: tuple[str, ...]
    texts: dict[int, _Text] = {}
    """Open text blocks by the decoder's ordinal."""

    def read(self, event: n.Normalized) -> tuple[list[n.Normalized], str]:
        """What the event means, and the stop string that was found: with one the turn is over."""
        out: list[n.Normalized] = []
        match event:
            case n.TextDelta():
                text = self.texts[event.block]
                said, text.state, found = stops(self.strings).take(text.state, event.text)
                if said:
                    self._say(event.block, text, said, out)
                if found:
                    out += self.release()
                return out, found
            case n.BlockStart() if event.kind == "text":
                self.texts[event.block] = _Text()
                return out, ""
            case n.BlockStop() if event.block in self.texts:
                text = self.texts[event.block]
                self._release(event.block, text, out)
                del self.texts[event.block]
                if not text.begun:
                    return out, ""
            case n.RefusalDelta() | n.Opaque() | n.Extra() if event.block in self.texts:
                text = self.texts[event.block]
                self._release(event.block, text, out)
                self._begin(event.block, text, out)
            case n.Start():
                self.texts.clear()
            case n.Done():
                out += self.release()
            case _:
                pass
        out.append(event)
        return out, ""

    def release(self) -> list[n.Normalized]:
        """No more comes of the attempt: what is held back is text."""
        out: list[n.Normalized] = []
        for block, text in self.texts.items():
            self._release(block, text, out)
        self.texts = {}
        return out

    def _release(self, block: int, text: _Text, out: list[n.Normalized]) -> None:
        if text.state:
            held, text.state = stops(self.strings).held(text.state), 0
            self._say(block, text, held, out)

    def _say(self, block: int, text: _Text, said: str, out: list[n.Normalized]) -> None:
        self._begin(block, text, out)
        out.append(n.TextDelta(block, said))

    def _begin(self, block: int, text: _Text, out: list[n.Normalized]) -> None:
        if not text.begun:
            text.begun = True
            out.append(n.BlockStart(block, "text"))
