"""Match stop strings in streamed text: the first to complete wins; of those that end at the same place, the longest.

An Aho-Corasick automaton (1975), so that the cost does not depend on the number of strings. A state is a number that
stands for the held-back text: the longest prefix of a stop string at the end of the text.
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache


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
