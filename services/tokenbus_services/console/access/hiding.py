"""Public events without their content, for viewers who may see runs but not their content. Pure.

Only fields that are listed here pass. A field that a newer version adds counts as content until it is listed.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import PublicEvent, UnknownEvent
from tokenbus.events.sessions import SessionEvent, SessionInfo
from tokenbus.events.topics import type_of
from tokenbus.events.usage import Usage
from tokenbus.events.waits import WaitInfo

_EVENT = frozenset({"type", "run", "seq", "turn", "attempt"})
_END = frozenset({"finish", "timing", "usage", "provider", "model", "response_id"})
SHOWN: dict[str, frozenset[str]] = {
    "chunk": frozenset({"block", "kind", "visible", "depth", "tool_call_part", "tool_id", "tool_name"}),
    "block_start": frozenset({"block", "kind", "tool_id", "tool_name"}),
    "image_preview": frozenset({"block", "kind", "index", "image"}),
    "block_progress": frozenset({"block", "kind", "tool_id", "tool_name", "status"}),
    "block_complete": frozenset({"block", "kind", "tool_id", "tool_name", "is_error", "image", "images", "cut"}),
    "tool_progress": frozenset({"block", "tool_id", "tool_name", "progress", "total"}),
    "child_started": frozenset({"block", "tool_id", "tool_name", "child"}),
    "child_ended": frozenset({"block", "tool_id", "tool_name", "child", "status", "error"}),
    "started": frozenset({"provider", "model", "fallback"}),
    "answering": frozenset({"model", "response_id", "provider"}),
    "retrying": frozenset({"error", "next_attempt", "delay_ms", "drop_from", "continues", "fallback"}),
    "restarted": frozenset({"error", "next_attempt", "delay_ms", "drop_from"}),
    "waiting": frozenset({"wait", "what", "block", "tool_id", "tool_name", "deadline_ms", "on_deadline"}),
    "resumed": frozenset({"wait", "what", "block", "tool_id", "tool_name", "decision"}),
    "usage": frozenset({"usage", "total", "model", "response_id", "provider"}),
    "completed": _END,
    "incomplete": _END | {"error"},
    "failed": _END | {"error"},
    "cancelled": _END | {"heard_through"},
    "unknown": frozenset(),
}
"""By type of event: fields that are not content. Names of tools, models and providers count as none; what a client, a
model, a tool or a provider wrote does, an error's message and the reason of a cancel included.
"""
SHOWN_OF_IMAGE = frozenset({"media_type", "size_bytes", "width", "height", "draft"})
SHOWN_OF_ERROR = frozenset({"code", "class", "retryable", "retry_after_s", "status"})
SHOWN_OF_USAGE = frozenset(set(Usage.__struct_fields__) - {"raw"})
_SHOWN_OF_PART = {
    "image": SHOWN_OF_IMAGE,
    "error": SHOWN_OF_ERROR,
    "usage": SHOWN_OF_USAGE,
    "total": SHOWN_OF_USAGE,
}


def hidden(event: PublicEvent) -> dict[str, Any]:
    """The event as JSON, with ``hidden``: how many characters of content it has."""
    if isinstance(event, UnknownEvent):
        known = {"type": event.event_type, "run": event.run, "seq": event.seq}
        known |= {"turn": event.turn, "attempt": event.attempt}
        return {**known, "hidden": _characters({k: v for k, v in event.fields.items() if k not in _EVENT})}
    fields: dict[str, Any] = msgspec.to_builtins(event)
    shown = SHOWN.get(fields["type"], frozenset()) | _EVENT
    count = 0
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in shown:
            count += _characters(value)
            continue
        kept[name], more = _reduced(name, value)
        count += more
    return {**kept, "hidden": count}


def hidden_error(error: ErrorInfo) -> dict[str, Any]:
    """An error without what it quotes."""
    return _only(msgspec.to_builtins(error), SHOWN_OF_ERROR)[0]


_OF_SESSION = frozenset({"type", "session_seq", "at_ms", "run", "run_seq", "append", "turn", "reason", "status"})
_OF_ITEM = frozenset({"type", "when_busy", "together", "heard_through", "heard_characters", "append", "run"})


def hidden_of_session(event: SessionEvent) -> dict[str, Any]:
    """An event of a session as JSON, with ``hidden`` as above. Of a configuration, provider and model are shown."""
    fields: dict[str, Any] = {**msgspec.to_builtins(event), "type": type_of(event)}
    kept, count = _only(fields, _OF_SESSION)
    if item := fields.get("item"):
        count -= _characters(item)
        kept["item"], more = _only(item, _OF_ITEM)
        count += more
        asked = item.get("request", {})
        if model := {name: asked[name] for name in ("provider", "model") if isinstance(asked.get(name), str)}:
            kept["item"]["request"] = model
    return {**kept, "hidden": count}


def session_row(info: SessionInfo, *, content: bool) -> dict[str, Any]:
    """A session in a list; without ``content`` neither its metadata nor how it begins."""
    row: dict[str, Any] = msgspec.to_builtins(info)
    return row if content else {name: value for name, value in row.items() if name not in ("metadata", "begins")}


_OF_WAIT = frozenset(
    {"run", "wait", "what", "tool_id", "tool_name", "since_ms", "deadline_ms", "on_deadline", "tenant"}
)


def wait_row(info: WaitInfo, *, content: bool) -> dict[str, Any]:
    """What a run waits for; without ``content`` neither arguments nor question, but ``hidden`` as above."""
    row: dict[str, Any] = msgspec.to_builtins(info)
    if content:
        return row
    kept, count = _only(row, _OF_WAIT)
    return {**kept, "hidden": count}


def _reduced(name: str, value: Any) -> tuple[Any, int]:
    """A field that is shown, without its parts that are content, and how many characters those have."""
    if name == "images":
        parts = [_only(one, SHOWN_OF_IMAGE) for one in value]
        return [part for part, _ in parts], sum(count for _, count in parts)
    shown = _SHOWN_OF_PART.get(name)
    return (value, 0) if shown is None or not isinstance(value, dict) else _only(cast("dict[str, Any]", value), shown)


def _only(fields: dict[str, Any], shown: frozenset[str]) -> tuple[dict[str, Any], int]:
    kept = {name: value for name, value in fields.items() if name in shown}
    return kept, sum(_characters(value) for name, value in fields.items() if name not in shown)


def _characters(value: Any) -> int:
    """Characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return sum(len(name) + _characters(each) for name, each in fields.items())
    if isinstance(value, list):
        return sum(_characters(each) for each in cast("list[Any]", value))
    return 0
