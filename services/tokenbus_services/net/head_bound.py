"""Limits response heads before the HTTP library parses them: number of headers and of interim responses.

The library limits only a head's bytes. 100 KB hold 25,000 headers, and interim responses (1xx) may repeat without end.
Parsing either blocks all other calls of the process.
"""

from __future__ import annotations

import re

import httpcore

MAX_HEADERS = 256
"""Maximum headers of one response. Providers send 20 to 60."""
MAX_INTERIM = 16
"""Maximum interim responses before the final one."""

_END = re.compile(rb"\n\r?\n")
_STATUS = len(b"HTTP/1.1 ")


class HeadRefused(httpcore.RemoteProtocolError):
    """A response head exceeds a limit."""


class HeadBound:
    """Checks the response heads of one connection. Call `begin` with each request and `feed` with all data read."""

    def __init__(self) -> None:
        self._head: bytearray | None = None
        self._interim = 0

    def begin(self) -> None:
        """Expect a response."""
        self._head = bytearray()
        self._interim = 0

    @property
    def is_open(self) -> bool:
        """Whether the response's head has not ended."""
        return self._head is not None

    def feed(self, data: bytes) -> int:
        """Check data that was read; return how much of it belongs to heads. Raises HeadRefused."""
        if self._head is None:
            return 0
        before = len(self._head)
        self._head += data
        while len(self._head) > _STATUS:
            end = _END.search(self._head)
            if self._head.count(b"\n", 0, end.end() if end else len(self._head)) > MAX_HEADERS + 2:
                raise HeadRefused(f"over {MAX_HEADERS} headers")
            if not self._head.startswith(b"1", _STATUS):
                if end:
                    self._head = None
                    return max(0, end.end() - before)
                break
            if end is None:
                break
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise HeadRefused(f"over {MAX_INTERIM} interim responses")
            del self._head[: end.end()]
            before -= end.end()
        return len(data)
