"""What streamed and whole answers of Chat Completions have in common: identity, finish reasons, usage. Pure."""

from __future__ import annotations

import msgspec

from tokenbus.events.normalized import FinishReason
from tokenbus.events.requests import OnFailure
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.surfaces.contract import GatewayNote


class ChatEcho(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What encoders know of the request, in `GatewayNote.echo`."""

    usage: bool = False
    """The stream ends with a chunk of token counts."""
    reasoning: bool = True
    """Thinking is sent as `reasoning_content`."""
    bus_tools: bool = False
    """The bus runs the calls, so the client does not see them: it would run them again."""
    on_failure: OnFailure | None = None


def echo_of(note: GatewayNote) -> ChatEcho:
    """Read the note. A part that cannot be read counts as not requested."""
    try:
        return msgspec.convert(note.echo, ChatEcho)
    except msgspec.ValidationError:
        return ChatEcho()


def finish_of(finish: FinishReason, *, calls: bool) -> str:
    """The finish reason. ``calls``: the client has seen tool calls."""
    match finish:
        case "length":
            return "length"
        case "content_filter":
            return "content_filter"
        case _:
            return "tool_calls" if calls else "stop"


def usage_object(usage: Usage | None) -> dict[str, object]:
    """Token counts. A count that the provider did not report is 0, because clients require numbers."""
    counts = usage or Usage()
    read, written = counts.input or 0, counts.output or 0
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": counts.total if counts.total is not None else read + written,
        "prompt_tokens_details": {"cached_tokens": counts.cache_read or 0},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning or 0},
    }
