"""Offsets, cursors, headers and bodies of the protocol. Pure.

An offset is the number of events before it, in 16 digits, so offsets compare as texts. The log of a run that is over is
a closed stream.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from tokenbus.events.public import PublicEvent, UnknownEvent, encode
from tokenbus_services.gateway.problem import Problem, invalid
from tokenbus_services.gateway.surfaces.contract import Answer

START, NOW = "-1", "now"
CURSOR_EPOCH_S = 1_728_432_000
"""9 October 2024: cursors count intervals from there."""
CURSOR_INTERVAL_S = 20
MAX_PAGE = 1000
"""Events in one answer."""
SAFE_HEADERS = {"x-content-type-options": "nosniff", "cross-origin-resource-policy": "same-origin"}

Live = Literal["long-poll", "sse"]
_OFFSET = re.compile(r"[0-9]{1,16}")
_encode = msgspec.json.Encoder().encode


class Ask(msgspec.Struct, frozen=True):
    offset: int | None
    """None: the current tail."""
    live: Live | None
    cursor: int | None


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    start: int
    events: Sequence[PublicEvent]
    tail: int
    """Number of events on the log."""
    closed: bool
    """The log has its last event."""

    @property
    def next(self) -> int:
        """The offset after these events."""
        return self.start + len(self.events)

    @property
    def up_to_date(self) -> bool:
        """Whether they reach the log's end."""
        return self.next >= self.tail

    @property
    def ended(self) -> bool:
        """Whether no event can follow."""
        return self.closed and self.up_to_date


def asked(query: Sequence[tuple[str, str]]) -> Ask:
    """Read the query's parameters. Raises Refusal."""
    offsets = [value for name, value in query if name == "offset"]
    named = dict(query)
    if len(offsets) > 1:
        raise invalid("offset", "must be given once")
    live = named.get("live")
    if live not in (None, "long-poll", "sse"):
        raise invalid("live", "must be long-poll or sse")
    if live is not None and not offsets:
        raise invalid("offset", f"live={live} needs an offset")
    cursor = named.get("cursor", "")
    known = int(cursor) if re.fullmatch(r"[0-9]{1,15}", cursor) else None
    return Ask(_offset(offsets[0]) if offsets else 0, live, known)


def _offset(value: str) -> int | None:
    if value == START:
        return 0
    if value == NOW:
        return None
    if not _OFFSET.fullmatch(value):
        raise invalid("offset", "must be -1, now, or an offset of this stream")
    return int(value)


def cursor_of(now_s: float, known: int | None) -> int:
    """The cursor of a live answer: always above the one that the reader has, so that no cache repeats an answer."""
    current = int(now_s - CURSOR_EPOCH_S) // CURSOR_INTERVAL_S
    return current if known is None or known < current else known + 1


def headers_of(page: LogPage, *, etag: str | None = None, cursor: int | None = None) -> dict[str, str]:
    """The headers of an answer. Logs belong to tenants, so no cache that several share may keep one."""
    headers = {**SAFE_HEADERS, "cache-control": "no-store", "stream-next-offset": _offset_text(page.next)}
    if page.up_to_date:
        headers["stream-up-to-date"] = "true"
    if page.ended:
        headers["stream-closed"] = "true"
    if etag:
        headers["etag"] = etag
    if cursor is not None and not page.ended:
        headers["stream-cursor"] = str(cursor)
    return headers


def etag_of(run: str, page: LogPage) -> str:
    """Changes with what the answer would hold."""
    return f'"{run}:{page.start}:{page.next}{":c" if page.ended else ""}"'


def body_of(events: Sequence[PublicEvent]) -> bytes:
    """The events as a JSON array."""
    return b"[" + b",".join(_json(event) for event in events) + b"]"


def sse_of(page: LogPage, cursor: int) -> bytes:
    """The events, if there are any, and the control event that follows them. There is no blank after `data:`: the
    protocol's conformance suite reads only that form.
    """
    control: dict[str, object] = {"streamNextOffset": _offset_text(page.next)}
    if not page.ended:
        control["streamCursor"] = str(cursor)
    if page.up_to_date:
        control["upToDate"] = True
    if page.ended:
        control["streamClosed"] = True
    data = b"event: data\ndata:" + body_of(page.events) + b"\n\n" if page.events else b""
    return data + b"event: control\ndata:" + _encode(control) + b"\n\n"


def broken(problem: Problem) -> bytes:
    """The end of a stream that the gateway cannot continue: the protocol has no event for it, so it is a comment. Its
    readers resume from their offset.
    """
    return f": {problem.code}\n\n".encode()


def refusal(problem: Problem) -> Answer:
    fields = {"code": problem.code, "message": problem.message}
    return Answer(status=problem.status, body=_encode({"error": fields}), headers=SAFE_HEADERS)


def _offset_text(offset: int) -> str:
    return f"{offset:016d}"


def _json(event: PublicEvent) -> bytes:
    # An event of a newer version goes out as it was written.
    return _encode(event.fields) if isinstance(event, UnknownEvent) else encode(event)
