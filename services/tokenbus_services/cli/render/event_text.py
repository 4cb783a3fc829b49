"""Describes public events in words, the same for terminals and plain lines."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from tokenbus.bus.activity import Failure
from tokenbus.events import public, sessions
from tokenbus.events.decisions import Decided
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.topics import TopicEvent, type_of
from tokenbus.events.usage import Usage

NoPublic = Decided | sessions.SessionEvent
"""Events that are in no run's log."""


def shortened(text: str, most: int, run: str) -> str:
    """What a run waits for, cut to ``most`` characters: then it says how many there are, and what shows them."""
    if len(text) <= most:
        return text
    return f"{text[:most]}… ({len(text)} characters; `tokenbus waiting {run} --json` has them all)"


def details(event: TopicEvent) -> str:
    """Describe the event beyond its type. Content is quoted as JSON, on one line."""
    match event:
        case public.Chunk():
            return f"{event.block} {event.tool_call_part or event.kind} {_quoted(event.text)}"
        case public.BlockStarted():
            return f"{event.block} {title(event)}"
        case public.BlockComplete():
            return f"{event.block} {title(event)} {_quoted(content(event))}"
        case public.ImagePreview():
            return f"{event.block} preview {event.index} {image(event.image)}"
        case public.BlockProgress():
            return f"{event.block} {event.tool_name or event.kind} {event.status}"
        case public.ToolProgress():
            return f"{event.block} {event.tool_name} {progress(event)}"
        case public.Started():
            return f"{event.provider} {event.model}"
        case public.Answering():
            return " ".join(word for word in (event.provider, event.model, event.response_id) if word)
        case public.Retrying():
            by = f" by {event.fallback.provider} {event.fallback.model}" if event.fallback else ""
            return f"attempt {event.next_attempt}{by} in {event.delay_ms} ms, after {error(event.error)}"
        case public.Restarted():
            after = f"attempt {event.next_attempt} in {event.delay_ms} ms, after {error(event.error)}"
            return f"{after}; blocks from {event.drop_from} on are void"
        case public.Waiting():
            return f"{event.wait} {event.what} {event.tool_name} {_quoted(event.text or event.arguments or '')}"
        case public.Resumed():
            why = f" {_quoted(event.reason)}" if event.reason else ""
            return f"{event.wait} {event.decision} by {event.by or event.door}{why}"
        case public.ChildStarted():
            return f"{event.tool_name} {event.child}"
        case public.ChildEnded():
            return f"{event.child} {event.status}" + (f" {error(event.error)}" if event.error else "")
        case public.UsageReported():
            return usage(event.usage)
        case public.Completed():
            return event.finish
        case public.Incomplete():
            return event.reason
        case public.RunFailedEvent():
            return error(event.error)
        case public.Cancelled():
            return event.reason or ""
        case Decided():
            return decision(event)
        case sessions.Configured() | sessions.Appended():
            return f"{event.append} {event.item.__struct_config__.tag}"
        case sessions.Delivered():
            return f"{event.append} {event.run or ''}"
        case sessions.Returned():
            return f"{event.append} {event.reason}"
        case sessions.RunEnded():
            return f"{event.run} {event.status}"
        case sessions.Deleted():
            return event.append
        case public.UnknownEvent() | sessions.UnknownSessionEvent():
            return "of a newer tokenbus"


def decision(event: Decided) -> str:
    """Describe a policy's decision: action, subject, reason. Withheld content is not shown."""
    of = " ".join(str(word) for word in (event.block, event.tool_name) if word is not None)
    words = [event.action, "by", event.policy, f"of {of}" if of else "", f"({event.reason})" if event.reason else ""]
    return " ".join(word for word in words if word)


def title(block: public.BlockStarted | public.BlockComplete) -> str:
    """Describe a block: its kind, its tool, and whether it failed or was cut."""
    words = [block.kind.replace("_", " "), block.tool_name]
    if isinstance(block, public.BlockComplete):
        words += ["error" if block.is_error else None, "cut" if block.cut else None]
    return " ".join(word for word in words if word)


def progress(event: public.ToolProgress) -> str:
    """Describe a tool call's progress, with the tool's message."""
    far = f"{event.progress:g}" + (f" of {event.total:g}" if event.total is not None else "")
    return f"{far} {_quoted(event.message)}" if event.message else far


def content(block: public.BlockComplete) -> str:
    if block.image is not None:
        return image(block.image)
    text = block.arguments if block.kind == "tool_call" else block.content
    return (text or "") + (f" (whole: {block.blob_id})" if block.blob_id else "")


def image(ref: public.ImageRef) -> str:
    """Describe an image by its metadata; its bytes are not shown."""
    known = [ref.media_type, ref.size, ref.quality, ref.model, size(ref.size_bytes) if ref.size_bytes else None]
    known += ["draft" if ref.draft else None, ref.blob_id or ("inline" if ref.base64 else None)]
    prompt = _quoted(ref.revised_prompt or ref.prompt or "") if ref.revised_prompt or ref.prompt else None
    return " ".join(word for word in [*known, prompt] if word)


def error(info: ErrorInfo) -> str:
    """Describe an error, with its place, unless the message names it, and HTTP status if there are any."""
    where = info.where if info.where and info.where not in info.message else None
    place = ", ".join(part for part in (where, f"HTTP {info.status}" if info.status else None) if part)
    return f"{info.code}: {info.message}" + (f" ({place})" if place else "")


def usage(counts: Usage) -> str:
    """Describe the token counts that the provider reported."""
    named = {
        "input": counts.input,
        "output": counts.output,
        "reasoning": counts.reasoning,
        "cache read": counts.cache_read,
        "cache write": counts.cache_write,
        "total": counts.total,
    }
    return ", ".join(f"{name} {count}" for name, count in named.items() if count is not None) or "unknown"


def timing(times: public.Timing) -> str:
    """Describe the run's timing: first byte, first text, end."""
    named = {"first byte": times.first_byte_ms, "first text": times.first_visible_ms, "all": times.total_ms}
    return ", ".join(f"{name} {ms} ms" for name, ms in named.items() if ms is not None)


def one_line(event: TopicEvent) -> str:
    """Describe the whole event on one line."""
    of = event.session if isinstance(event, sessions.SessionEvent) else event.run
    return " ".join(f"{of} {event.seq} {type_of(event)} {details(event)}".split("\n")).rstrip()


def moment(entry_id: str) -> str:
    """Return when a stream entry was written, in UTC."""
    try:
        at = datetime.fromtimestamp(int(entry_id.partition("-")[0]) / 1000, UTC)
    except (OverflowError, ValueError):  # an arbitrary id
        return "?"
    return at.strftime("%Y-%m-%d %H:%M:%S")


def size(count: float) -> str:
    """Format a number of bytes with a suitable unit."""
    power = min(4, max(0, int(count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def per_second(rate: float | None, unit: Callable[[float], str] = lambda rate: f"{rate:.1f}") -> str:
    """Format a rate; a question mark if it is unknown."""
    return "?" if rate is None else f"{unit(rate)}/s"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


# Describes providers and a blob store that fail, in words: for `doctor` and `top`.


def failure(found: Failure) -> str:
    """How a call failed: class, code and status."""
    code = f", {found.code}" if found.code != found.kind else ""
    return f"{found.kind}{code}" + (f", HTTP {found.status}" if found.status else "")


def time_span(ms: int) -> str:
    """A time in seconds, or in minutes if it is long."""
    return f"{ms // 1000} s" if ms < 120_000 else f"{ms // 60_000} min"
