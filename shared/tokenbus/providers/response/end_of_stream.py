"""Tells when a stream's last event is complete, for whoever holds its connection and does not decode it.

A line of server-sent events that begins with ``data:`` is data, whatever it says, and JSON holds no line end: so the
beginning of a line tells an event's type for sure, where the provider puts the type first. A text that holds such a
line is no such line. An event that is written in another way is not seen, which costs a connection and no content.
"""

from __future__ import annotations

import re

_HEAD = 64
"""Bytes of a line's beginning that are looked at: more than any mark has, and its blanks."""
_LINE_END = re.compile(rb"[\r\n]")


def _words(mark: bytes) -> bytes:
    """The part of a mark that has no blanks anywhere: what to look for before lines are looked at."""
    return max(re.split(rb"[\"{}:]", mark), key=len)


class LastEvent:
    """Feed all that is read of one stream. ``marks``: how the line of a last event begins, without blanks."""

    def __init__(self, marks: tuple[bytes, ...]) -> None:
        self.seen = False
        """The last event is complete; what follows says nothing."""
        self._marks = marks
        self._words = tuple({_words(mark) for mark in marks})
        self._head = b""
        """The beginning of the line whose end has not come."""

    def feed(self, data: bytes) -> bool:
        """Whether the last event is complete by now."""
        if self.seen or not self._marks:
            return self.seen
        text = self._head + data if self._head else data
        for word in self._words:  # in most reads there is none, so this is all that they cost
            if word in text:
                *lines, rest = _LINE_END.split(text)
                self.seen = any(self._is_last(line) for line in lines)
                self._head = rest[:_HEAD]
                return self.seen
        if text.endswith(b"\n"):
            self._head = b""
        else:
            start = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            self._head = text[start : start + _HEAD]
        return False

    def _is_last(self, line: bytes) -> bool:
        return line[:_HEAD].translate(None, b" \t").startswith(self._marks)
