"""Detects the last event of a stream without decoding it, for the code that owns the connection.

A server-sent-event line that begins with ``data:`` is always data, and JSON contains no raw line ends. So if the
provider writes the event type first, the beginning of the line identifies it. Text content cannot produce such a line.
An event written in another layout is missed; that costs a reusable connection but no content.
"""

from __future__ import annotations

import re

_HEAD = 64
"""How many bytes at the start of a line to check: more than any mark plus its whitespace."""
_LINE_END = re.compile(rb"[\r\n]")


def _words(mark: bytes) -> bytes:
    """The longest part of a mark that contains no whitespace: a cheap test before splitting lines."""
    return max(re.split(rb"[\"{}:]", mark), key=len)


class LastEvent:
    """Watches all bytes read from one stream. ``marks``: prefixes of the last event's line, without whitespace."""

    def __init__(self, marks: tuple[bytes, ...]) -> None:
        self.seen = False
        """The last event is complete; nothing meaningful follows."""
        self._marks = marks
        self._words = tuple({_words(mark) for mark in marks})
        self._head = b""
        """The beginning of the incomplete line."""

    def feed(self, data: bytes) -> bool:
        """Add bytes. Return True once the last event is complete."""
        if self.seen or not self._marks:
            return self.seen
        text = self._head + data if self._head else data
        for word in self._words:  # most reads contain none, so this test is their whole cost
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
