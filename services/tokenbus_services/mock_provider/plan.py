"""Plans the response to one request before its first byte is sent. Pure, except for reading recordings."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import msgspec

from tokenbus_services.mock_provider.apis.provider_api import FramedApi, MockApi
from tokenbus_services.mock_provider.reply import Reply
from tokenbus_services.mock_provider.request import HttpError, ModelRequest
from tokenbus_services.mock_provider.script import (
    CutOff,
    Cuts,
    ErrorEvent,
    Fault,
    Fixed,
    HangUp,
    Offsets,
    Random,
    Recording,
    Source,
    Stall,
    Status,
    Turn,
    Whole,
    Wire,
)

Ending = Literal["complete", "stalled", "closed", "reset"]
"""What follows the reads: the end of the body; a stall, then the rest if resumed; a close; or a reset."""

_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"


class ResponsePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One response. ``status`` None: close without sending a head."""

    status: int | None
    headers: dict[str, str] = {}
    reads: list[bytes] = []
    ending: Ending = "complete"
    rest: list[bytes] = []
    """Sent after a resumed stall."""
    delay_s: float = 0.0
    pace: float | None = None


def plan_rejection(mock_api: MockApi, rejected: HttpError) -> ResponsePlan:
    """An error caused by the request."""
    return _error(mock_api, Status(status=rejected.status), rejected.message)


def plan_scripted_error(mock_api: MockApi, fault: Status) -> ResponsePlan:
    return _error(mock_api, fault, f"HTTP {fault.status}, as scripted")


def plan_response(turn: Turn, request: ModelRequest, mock_api: MockApi, attempt: int) -> ResponsePlan:
    """Plan the response to one try (counted from 0) of one turn.

    Raises Rejected if the API cannot express the turn, OSError if a recording is unreadable, and ValueError if the
    position of a fault is not in the body.
    """
    fault = turn.fault_of(attempt)
    body = b"" if isinstance(fault, HangUp | Status) else said(turn.says, request, mock_api)
    return delivered(body, turn, fault, mock_api, stream=request.stream)


def _error(mock_api: MockApi, fault: Status, message: str) -> ResponsePlan:
    body = mock_api.error(fault.status, message) if fault.body is None else fault.body
    return ResponsePlan(status=fault.status, headers={"content-type": _JSON, **fault.headers}, reads=split_at(body, ()))


def answer_of(body: bytes) -> ResponsePlan:
    """An answer of JSON, at once."""
    return ResponsePlan(status=200, headers={"content-type": _JSON}, reads=[body])


def said(says: Source, request: ModelRequest, mock_api: MockApi) -> bytes:
    """The whole body with which a request is answered."""
    return _stream(says, request, mock_api) if request.stream else _body(says, request, mock_api)


def delivered(
    body: bytes, turn: Turn, fault: Fault | None, mock_api: MockApi, *, stream: bool, content_type: str | None = None
) -> ResponsePlan:
    """Send a body as the turn's delivery says, up to the fault. ``content_type``: None for JSON or events."""
    match fault:
        case HangUp():
            answer = ResponsePlan(status=None, ending="closed")
        case Status():
            answer = plan_scripted_error(mock_api, fault)
        case _:
            answer = _reads(body, turn, fault, mock_api, stream=stream)
    if content_type and answer.status == 200:
        answer = msgspec.structs.replace(answer, headers={**answer.headers, "content-type": content_type})
    return msgspec.structs.replace(answer, delay_s=turn.delivery.delay_s, pace=turn.delivery.pace)


def _reads(
    body: bytes, turn: Turn, fault: ErrorEvent | CutOff | Stall | None, mock_api: MockApi, *, stream: bool
) -> ResponsePlan:
    headers = {"content-type": _EVENTS if stream else _JSON}
    whole = event_ends(body)
    if stream and isinstance(mock_api, FramedApi):
        events = split_at(body, whole)
        if fault is not None and (text := fault.after_text) is not None:
            at = next(n for n, event in enumerate(events) if text.encode() in event)
            fault = msgspec.structs.replace(fault, after_text=None, after_events=at + 1)
        frames = [mock_api.frame(event) for event in events]
        body, whole = b"".join(frames), list(accumulate(map(len, frames)))
        headers = {"content-type": mock_api.stream_type}
    ends = read_ends(body, turn.delivery.cuts, whole)
    if fault is None:
        return ResponsePlan(status=200, headers=headers, reads=split_at(body, ends))
    place = fault_offset(body, fault, whole)
    before, after = (
        split_at(body[:place], ends),
        split_at(body[place:], (end - place for end in ends)),
    )
    match fault:
        case ErrorEvent():
            if not stream:
                raise HttpError(501, "a non-streamed response has no error event; use a status")
            event = mock_api.error_event(fault.status, "an error in mid-stream, as scripted")
            return ResponsePlan(status=200, headers=headers, reads=[*before, event])
        case CutOff():
            return ResponsePlan(status=200, headers=headers, reads=before, ending="reset" if fault.reset else "closed")
        case Stall():
            return ResponsePlan(status=200, headers=headers, reads=before, ending="stalled", rest=after)


def _stream(says: Source, request: ModelRequest, mock_api: MockApi) -> bytes:
    match says:
        case Reply():
            return mock_api.stream(_filled(says, request), request)
        case Wire():
            return says.stream
        case Recording():
            return Path(says.stream).read_bytes()


def _body(says: Source, request: ModelRequest, mock_api: MockApi) -> bytes:
    match says:
        case Reply():
            return mock_api.body(_filled(says, request), request)
        case Wire(body=bytes(body)):
            return body
        case Recording(body=str(path)):
            return Path(path).read_bytes()
        case _:
            raise HttpError(501, "this recording has no body for a request that does not stream")


def _filled(reply: Reply, request: ModelRequest) -> Reply:
    if reply.pictures and request.api in ("anthropic", "openai-chat"):
        raise HttpError(501, "this API does not generate images")
    filled = reply.with_marks_filled(token=request.token, tool_results=request.tool_results)
    return filled.continue_text(request.prefill, request.stop_strings) if request.prefill else filled


# Splits a body into network reads. Pure: offsets in, pieces out.

# An event ends with an empty line; LF, CR and CRLF all end a line, and CRLF is never two of them.
# Source: "Parsing an event stream", WHATWG HTML, server-sent events.
_EMPTY_LINE = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")


def event_ends(body: bytes) -> list[int]:
    """Offsets at which an event of the body is complete."""
    return [match.end() for match in _EMPTY_LINE.finditer(body)]


def read_ends(body: bytes, cuts: Cuts, whole: list[int] | None = None) -> list[int]:
    """Offsets at which a read ends, in order; the end of the body may be missing. ``whole``: the ends of its events."""
    match cuts:
        case Whole():
            return (event_ends(body) if whole is None else whole)[cuts.events - 1 :: cuts.events]
        case Fixed():
            return list(range(cuts.size, len(body), cuts.size))
        case Random():
            return _random_ends(random.Random(cuts.seed), cuts.largest, len(body))
        case Offsets():
            return sorted(cuts.at)


def split_at(body: bytes, ends: Iterable[int]) -> list[bytes]:
    """Split the body at these offsets; no piece is empty. Offsets outside the body are ignored."""
    places = sorted({0, len(body), *(end for end in ends if 0 < end < len(body))})
    return [body[start:end] for start, end in pairwise(places)]


def fault_offset(body: bytes, fault: ErrorEvent | CutOff | Stall, ends: list[int] | None = None) -> int:
    """The offset of a fault, at most the end of the body. ``ends``: those of its events. Raises ValueError if its text
    is missing.
    """
    ends = event_ends(body) if ends is None else ends
    if fault.after_bytes is not None:
        return min(fault.after_bytes, len(body))
    if fault.after_text is not None:
        found = body.find(fault.after_text.encode())
        if found < 0:
            raise ValueError(f"after_text: the body does not hold {fault.after_text!r}")
        return next((end for end in ends if end > found), len(body))
    if not fault.after_events:
        return 0
    return ends[fault.after_events - 1] if fault.after_events <= len(ends) else len(body)


def _random_ends(dice: random.Random, largest: int, length: int) -> list[int]:
    ends: list[int] = []
    end = dice.randint(1, largest)
    while end < length:
        ends.append(end)
        end += dice.randint(1, largest)
    return ends
