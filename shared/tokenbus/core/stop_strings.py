"""Match stop strings in streamed text: the first to complete wins; of those that end at the same place, the longest.

An Aho-Corasick automaton (1975), so that the cost does not depend on the number of strings. A state is a number that
stands for the held-back text: the longest prefix of a stop string at the end of the text.
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache

import msgspec

from tokenbus.events import normalized as n


class Stops:
    """A set of non-empty stop strings."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._of: list[tuple[str, int]] = [("", 0)]
        """For each state: a string with this prefix, and the length of the prefix."""
        self._hit = [""]
        for string in strings:
            node = 0
            for size, char in enumerate(string, 1):
                if char not in self._next[node]:
                    self._next[node][char] = len(self._next)
                    self._next.append({})
                    self._of.append((string, size))
                    self._hit.append("")
                node = self._next[node][char]
            self._hit[node] = string
        self._fall = [0] * len(self._next)
        self._link()
        self._first = re.compile("[" + "".join(re.escape(char) for char in self._next[0]) + "]")

    def held(self, state: int) -> str:
        """The text that this state holds back."""
        string, size = self._of[state]
        return string[:size]

    def take(self, state: int, text: str) -> tuple[str, int, str]:
        """Consume text: return the text to emit, the new state, and the stop string that was found, which ends the
        matching.
        """
        at = 0 if state else self._candidate(text, 0)
        if at == len(text):
            return text, 0, ""
        held = self.held(state)
        while at < len(text):
            char = text[at]
            while state and char not in self._next[state]:
                state = self._fall[state]
            state = self._next[state].get(char, 0)
            at += 1
            if hit := self._hit[state]:
                return (held + text[:at])[: -len(hit)], 0, hit
            if not state:
                at = self._candidate(text, at)
        whole = held + text
        return whole[: len(whole) - self._of[state][1]], state, ""

    def _candidate(self, text: str, start: int) -> int:
        found = self._first.search(text, start)
        return found.start() if found else len(text)

    def _link(self) -> None:
        """Link each state to the state of its longest proper suffix that is also a prefix."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                fall = self._fall[node]
                while fall and char not in self._next[fall]:
                    fall = self._fall[fall]
                self._fall[child] = self._next[fall].get(char, 0)
                queue.append(child)
            self._hit[node] = self._hit[node] or self._hit[self._fall[node]]


@lru_cache(64)
def stops(strings: tuple[str, ...]) -> Stops:
    """The automaton of these strings (cached)."""
    return Stops(strings)


# A provider accepts a limited number of stop strings, or none, and does not always report which one it stopped on. Each
# text block is scanned on its own. Text that may still become a stop string is held back, so that no part of one is
# emitted.


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
