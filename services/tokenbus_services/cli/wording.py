"""Public events in words, the same for a terminal and for plain lines."""

from __future__ import annotations

import msgspec

from tokenbus.events.failure import ErrorInfo
from tokenbus.events.public import (
    BlockComplete,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    Incomplete,
    PublicEvent,
    Restarted,
    Retrying,
    RunFailedEvent,
    Started,
    Timing,
    UsageReported,
)
from tokenbus.events.usage import Usage


def name(event: PublicEvent) -> str:
    """The event's type, as on the wire."""
    return str(event.__struct_config__.tag)


def details(event: PublicEvent) -> str:
    """What a person wants to know of the event beside its type. Content is quoted as JSON would, on one line."""
    match event:
        case Chunk():
            return f"{event.block} {event.tool_call_part or event.kind} {_quoted(event.text)}"
        case BlockStarted():
            return f"{event.block} {title(event)}"
        case BlockComplete():
            return f"{event.block} {title(event)} {_quoted(content(event))}"
        case Started():
            return f"{event.provider} {event.model}"
        case Retrying():
            return f"attempt {event.next_attempt} in {event.delay_ms} ms, after {error(event.error)}"
        case Restarted():
            after = f"attempt {event.next_attempt} in {event.delay_ms} ms, after {error(event.error)}"
            return f"{after}; blocks from {event.drop_from} on are void"
        case UsageReported():
            return usage(event.usage)
        case Completed():
            return event.finish
        case Incomplete():
            return event.reason
        case RunFailedEvent():
            return error(event.error)
        case Cancelled():
            return event.reason or ""


def title(block: BlockStarted | BlockComplete) -> str:
    """What a block is: its kind, of which tool, and what is wrong with it."""
    words = [block.kind.replace("_", " "), block.tool_name]
    if isinstance(block, BlockComplete):
        words += ["error" if block.is_error else None, "cut" if block.cut else None]
    return " ".join(word for word in words if word)


def content(block: BlockComplete) -> str:
    """A whole block as text."""
    if block.image is not None:
        return " ".join(part for part in (block.image.media_type, block.image.blob_id) if part)
    text = block.arguments if block.kind == "tool_call" else block.content
    return (text or "") + (f" (whole: {block.blob_id})" if block.blob_id else "")


def error(info: ErrorInfo) -> str:
    """An error with its place and HTTP status, where there are any."""
    place = ", ".join(part for part in (info.where, f"HTTP {info.status}" if info.status else None) if part)
    return f"{info.code}: {info.message}" + (f" ({place})" if place else "")


def usage(counts: Usage) -> str:
    """The counts that the provider gave."""
    named = {
        "input": counts.input,
        "output": counts.output,
        "reasoning": counts.reasoning,
        "cache read": counts.cache_read,
        "cache write": counts.cache_write,
        "total": counts.total,
    }
    return ", ".join(f"{name} {count}" for name, count in named.items() if count is not None) or "not told"


def timing(times: Timing) -> str:
    """When the provider began, when the first text came, when the run ended."""
    named = {"first byte": times.first_byte_ms, "first text": times.first_visible_ms, "all": times.total_ms}
    return ", ".join(f"{name} {ms} ms" for name, ms in named.items() if ms is not None)


def one_line(event: PublicEvent) -> str:
    """The whole event on one line."""
    return " ".join(f"{event.run} {event.seq} {name(event)} {details(event)}".split("\n")).rstrip()


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
