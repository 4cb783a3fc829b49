"""Offsets, cursors, headers and bodies of the protocol. Pure.

An offset of a run's log is the number of events before it, in 16 digits, so offsets compare as texts; the log of a run
that is over is a closed stream. An offset of a session is its cursor in digits that compare as texts; it never closes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec

from tokenbus.events.public import PublicEvent, UnknownEvent, encode
from tokenbus.events.sessions import AnySessionEvent
from tokenbus.events.topics import as_written
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.gateway.surfaces.contract import Answer
from tokenbus_services.gateway.surfaces.fields import is_whole, json_value

START, NOW = "-1", "now"
CURSOR_EPOCH_S = 1_728_432_000
"""9 October 2024: cursors count intervals from there."""
CURSOR_INTERVAL_S = 20
MAX_PAGE = 1000
"""Events in one answer."""
MAX_PRODUCER_CHARS = 256
SAFE_HEADERS = {"x-content-type-options": "nosniff", "cross-origin-resource-policy": "same-origin"}

Live = Literal["long-poll", "sse"]
_OFFSET = re.compile(r"[0-9]{1,16}")
_encode = msgspec.json.Encoder().encode


class Ask(msgspec.Struct, frozen=True):
    offset: str
    """`START`, `NOW`, or one of the stream."""
    live: Live | None
    cursor: int | None


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of a stream from one offset to another."""

    start: str
    next: str
    items: Sequence[bytes]
    """Each as JSON."""
    up_to_date: bool = False
    """They reach the stream's end."""
    ended: bool = False
    """No message can follow."""


def log_page(start: int, events: Sequence[PublicEvent], *, tail: int, closed: bool) -> Page:
    """Events of a run's log. ``tail``: how many it has. ``closed``: it has its last one."""
    up_to_date = start + len(events) >= tail
    return Page(
        start=offset_text(start),
        next=offset_text(start + len(events)),
        items=[_json(event) for event in events],
        up_to_date=up_to_date,
        ended=closed and up_to_date,
    )


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
    return Ask(offsets[0] if offsets else START, live, known)


def position(offset: str) -> int | None:
    """The number of events before an offset of a run's log; None: the current tail. Raises Refusal."""
    if offset == START:
        return 0
    if offset == NOW:
        return None
    if not _OFFSET.fullmatch(offset):
        raise wrong_offset()
    return int(offset)


def wrong_offset() -> Refusal:
    """It is no offset of this stream."""
    return invalid("offset", "must be -1, now, or an offset of this stream")


class Producer(msgspec.Struct, frozen=True):
    """Who appends, so that it is done once."""

    id: str
    epoch: int
    seq: int


def producer_in(headers: Mapping[str, str]) -> Producer | None:
    """The idempotent producer of a request. Raises Refusal."""
    given = [headers.get(f"producer-{name}") for name in ("id", "epoch", "seq")]
    if given == [None] * 3:
        return None
    name, epoch, seq = (each or "" for each in given)
    if not 0 < len(name) <= MAX_PRODUCER_CHARS or not is_whole(epoch) or not is_whole(seq):
        why = "Producer-Id, Producer-Epoch and Producer-Seq are given together: a name and two whole numbers"
        raise invalid("Producer-Id", why)
    return Producer(name, int(epoch), int(seq))


Verdict = Literal["new", "known"]


def judged(asked: Producer, epoch: int, seq: int) -> Verdict:
    """Whether an append is the producer's next one, after its last accepted one (-1: none). Raises Refusal."""
    if asked.epoch < epoch:
        raise _fenced(403, "stale_epoch", "another producer has taken over with a newer epoch", epoch=epoch)
    if asked.epoch > epoch and asked.seq != 0:
        raise invalid("Producer-Seq", "a new epoch begins with 0")
    if asked.epoch == epoch and asked.seq <= seq:
        return "known"
    if asked.epoch == epoch and asked.seq != seq + 1:
        expected = {"expected_seq": seq + 1, "received_seq": asked.seq}
        raise _fenced(409, "sequence_gap", "an append of this producer is missing before this one", **expected)
    return "new"


def _fenced(status: int, code: str, why: str, **told: int) -> Refusal:
    headers = {f"producer-{name.replace('_', '-')}": str(number) for name, number in told.items()}
    kind = "auth" if status == 403 else "invalid_request"
    return Refusal(Problem(status=status, code=code, message=why, kind=kind, headers=headers))


def messages_in(body: bytes) -> list[object]:
    """The messages of an append: the elements of an array, or the value itself. Raises Refusal."""
    if not body:
        raise invalid(None, "the body is empty")
    value = json_value(body)
    found = cast("list[object]", value) if isinstance(value, list) else [value]
    if not found:
        raise invalid(None, "an empty array has no message")
    return found


def cursor_of(now_s: float, known: int | None) -> int:
    """The cursor of a live answer: always above the one that the reader has, so that no cache repeats an answer."""
    current = int(now_s - CURSOR_EPOCH_S) // CURSOR_INTERVAL_S
    return current if known is None or known < current else known + 1


def headers_of(page: Page, *, etag: str | None = None, cursor: int | None = None) -> dict[str, str]:
    """The headers of an answer. Logs belong to tenants, so no cache that several share may keep one."""
    headers = {**SAFE_HEADERS, "cache-control": "no-store", "stream-next-offset": page.next}
    if page.up_to_date:
        headers["stream-up-to-date"] = "true"
    if page.ended:
        headers["stream-closed"] = "true"
    if etag:
        headers["etag"] = etag
    if cursor is not None and not page.ended:
        headers["stream-cursor"] = str(cursor)
    return headers


def etag_of(stream: str, page: Page) -> str:
    """Changes with what the answer would hold."""
    return f'"{stream}:{page.start}:{page.next}{":c" if page.ended else ""}"'


def body_of(page: Page) -> bytes:
    """The messages as a JSON array."""
    return b"[" + b",".join(page.items) + b"]"


def sse_of(page: Page, cursor: int) -> bytes:
    """The messages, if there are any, and the control event that follows them. There is no blank after `data:`: the
    protocol's conformance suite reads only that form.
    """
    control: dict[str, object] = {"streamNextOffset": page.next}
    if not page.ended:
        control["streamCursor"] = str(cursor)
    if page.up_to_date:
        control["upToDate"] = True
    if page.ended:
        control["streamClosed"] = True
    data = b"event: data\ndata:" + body_of(page) + b"\n\n" if page.items else b""
    return data + b"event: control\ndata:" + _encode(control) + b"\n\n"


def broken(problem: Problem) -> bytes:
    """The end of a stream that the gateway cannot continue: the protocol has no event for it, so it is a comment. Its
    readers resume from their offset.
    """
    return f": {problem.code}\n\n".encode()


def refusal(problem: Problem) -> Answer:
    fields = {"code": problem.code, "message": problem.message}
    return Answer(status=problem.status, body=_encode({"error": fields}), headers={**SAFE_HEADERS, **problem.headers})


def offset_text(offset: int) -> str:
    return f"{offset:016d}"


def session_item(event: AnySessionEvent | PublicEvent) -> bytes:
    """An event of a session or of one of its runs, as JSON."""
    return _encode(as_written(event))


def _json(event: PublicEvent) -> bytes:
    # An event of a newer version goes out as it was written.
    return _encode(event.fields) if isinstance(event, UnknownEvent) else encode(event)
