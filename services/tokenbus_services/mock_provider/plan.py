"""Plans the response to one request before its first byte is sent. Pure, except for reading recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tokenbus_services.mock_provider import chunking
from tokenbus_services.mock_provider.provider_api import MockApi
from tokenbus_services.mock_provider.reply import Reply
from tokenbus_services.mock_provider.request import Asked, Refused
from tokenbus_services.mock_provider.script import (
    CutOff,
    ErrorEvent,
    Fault,
    HangUp,
    Recording,
    Source,
    Stall,
    Status,
    Turn,
    Wire,
)

Ending = Literal["complete", "stalled", "closed", "reset"]
"""What follows the reads: the end of the body; a stall, then the rest if resumed; a close; or a reset."""

_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One response. ``status`` None: close without sending a head."""

    status: int | None
    headers: dict[str, str] = {}
    reads: list[bytes] = []
    ending: Ending = "complete"
    rest: list[bytes] = []
    """Sent after a resumed stall."""
    delay_s: float = 0.0
    pace: float | None = None


def refusal(dialect: MockApi, refused: Refused) -> Plan:
    """An error caused by the request."""
    return _error(dialect, Status(status=refused.status), refused.message)


def failed(dialect: MockApi, fault: Status) -> Plan:
    """An error from the script."""
    return _error(dialect, fault, f"HTTP {fault.status}, as scripted")


def plan(turn: Turn, asked: Asked, dialect: MockApi, attempt: int) -> Plan:
    """Plan the response to one try (counted from 0) of one turn.

    Raises Refused if the API cannot express the turn, OSError if a recording is unreadable, and ValueError if a fault's
    position is not in the body.
    """
    fault = turn.fault_of(attempt)
    match fault:
        case HangUp():
            answer = Plan(status=None, ending="closed")
        case Status():
            answer = failed(dialect, fault)
        case _:
            answer = _delivered(turn, asked, dialect, fault)
    return msgspec.structs.replace(answer, delay_s=turn.delivery.delay_s, pace=turn.delivery.pace)


def _error(dialect: MockApi, fault: Status, message: str) -> Plan:
    body = dialect.error(fault.status, message) if fault.body is None else fault.body
    return Plan(status=fault.status, headers={"content-type": _JSON, **fault.headers}, reads=chunking.pieces(body, ()))


def _delivered(turn: Turn, asked: Asked, dialect: MockApi, fault: Fault | None) -> Plan:
    body = _stream(turn.says, asked, dialect) if asked.stream else _body(turn.says, asked, dialect)
    headers = {"content-type": _EVENTS if asked.stream else _JSON}
    ends = chunking.ends_of_reads(body, turn.delivery.cuts)
    if not isinstance(fault, ErrorEvent | CutOff | Stall):
        return Plan(status=200, headers=headers, reads=chunking.pieces(body, ends))
    place = chunking.place_of(body, fault)
    before, after = chunking.pieces(body[:place], ends), chunking.pieces(body[place:], (end - place for end in ends))
    match fault:
        case ErrorEvent():
            if not asked.stream:
                raise Refused(501, "a non-streamed response has no error event; use a status")
            event = dialect.error_event(fault.status, "an error in mid-stream, as the replay script says")
            return Plan(status=200, headers=headers, reads=[*before, event])
        case CutOff():
            return Plan(status=200, headers=headers, reads=before, ending="reset" if fault.reset else "closed")
        case Stall():
            return Plan(status=200, headers=headers, reads=before, ending="stalled", rest=after)


def _stream(says: Source, asked: Asked, dialect: MockApi) -> bytes:
    match says:
        case Reply():
            return dialect.stream(_filled(says, asked), asked)
        case Wire():
            return says.stream
        case Recording():
            return Path(says.stream).read_bytes()


def _body(says: Source, asked: Asked, dialect: MockApi) -> bytes:
    match says:
        case Reply():
            return dialect.body(_filled(says, asked), asked)
        case Wire(body=bytes(body)):
            return body
        case Recording(body=str(path)):
            return Path(path).read_bytes()
        case _:
            raise Refused(501, "this recording has no body for a request that does not stream")


def _filled(reply: Reply, asked: Asked) -> Reply:
    if reply.pictures and asked.api in ("anthropic", "openai-chat"):
        raise Refused(501, "this API does not generate images")
    filled = reply.filled(token=asked.token, tool_results=asked.tool_results)
    return filled.continued(asked.prefilled, asked.stops) if asked.prefilled else filled
