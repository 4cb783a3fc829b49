"""Find stop strings in the text of a chat answer, whether or not the provider was given them.

A provider accepts a limited number of stop strings, or none, and does not always report which one it stopped on. Each
text block is scanned on its own. Text that may still become a stop string is held back, so that no part of one is
emitted.
"""

from __future__ import annotations

import msgspec

from tokenbus.core.stop_strings import stops
from tokenbus.events import normalized as n


class _Text(msgspec.Struct):
    """An open text block."""

    state: int = 0
    """Automaton state: the part of a stop string that is held back."""
    begun: bool = False
    """Whether its start was emitted; it is emitted with the first content."""
    phase: str = ""


class StopScan(msgspec.Struct):
    """Filters one attempt's events and cuts the text at a stop string. Its fields are its complete state."""

    strings: tuple[str, ...]
    texts: dict[int, _Text] = {}
    """Open text blocks by the decoder's ordinal."""

    def read(self, event: n.Normalized) -> tuple[list[n.Normalized], str]:
        """Return the filtered events and the stop string that was found, which ends the turn."""
        out: list[n.Normalized] = []
        match event:
            case n.TextDelta():
                text = self.texts[event.block]
                visible, text.state, found = stops(self.strings).take(text.state, event.text)
                if visible:
                    self._emit(event.block, text, visible, out)
                if found:
                    out += self.release()
                return out, found
            case n.BlockStart() if event.kind == "text":
                self.texts[event.block] = _Text(phase=event.phase)
                return out, ""
            case n.BlockStop() if event.block in self.texts:
                text = self.texts[event.block]
                self._release(event.block, text, out)
                del self.texts[event.block]
                if not text.begun:
                    return out, ""
            case n.Extra() if event.block in self.texts:  # with each piece, often: it decides nothing about the text
                self._begin(event.block, self.texts[event.block], out)
            case n.RefusalDelta() | n.Opaque() if event.block in self.texts:
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
        """The attempt has ended: emit held-back text."""
        out: list[n.Normalized] = []
        for block, text in self.texts.items():
            self._release(block, text, out)
        self.texts = {}
        return out

    def _release(self, block: int, text: _Text, out: list[n.Normalized]) -> None:
        if text.state:
            held, text.state = stops(self.strings).held(text.state), 0
            self._emit(block, text, held, out)

    def _emit(self, block: int, text: _Text, visible: str, out: list[n.Normalized]) -> None:
        self._begin(block, text, out)
        out.append(n.TextDelta(block, visible))

    def _begin(self, block: int, text: _Text, out: list[n.Normalized]) -> None:
        if not text.begun:
            text.begun = True
            out.append(n.BlockStart(block, "text", phase=text.phase))
