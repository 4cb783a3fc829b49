"""What a run of a session asks a person: how that reads, and what a typed line decides about it. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from tokenbus.client.publishing import new_run_id
from tokenbus.errors import RequestInvalid
from tokenbus.events.public import Resumed, Waiting
from tokenbus.events.requests import Answer, Approval, ToolResult, WaitDecision
from tokenbus.events.waits import Verdict, WaitKind
from tokenbus_services.cli.render.event_text import shortened
from tokenbus_services.terminal_text import visible

HINTS: dict[WaitKind, str] = {
    "approval": "yes, no REASON, or yes {…} with other arguments",
    "answer": "/answer {…}, or /decline",
    "tool_result": "/answer RESULT, or /decline REASON",
}
ANSWER, DECLINE = "/answer", "/decline"
_QUESTIONS: dict[WaitKind, str] = {
    "approval": "may this run?",
    "answer": "a question",
    "tool_result": "what is the result of this?",
}
_DECIDED: dict[Verdict, str] = {
    "allow": "allowed",
    "deny": "denied",
    "accept": "answered",
    "decline": "declined",
    "cancel": "left without an answer",
    "result": "the result came",
}
_MOST_CHARS = 4000


def text_of(ask: Waiting) -> str:
    """All that a person must read to decide: what is asked, the call, and until when."""
    lines = [ask.text or _QUESTIONS[ask.what], *((ask.url,) if ask.url else ())]
    shown = shortened(call(ask), _MOST_CHARS, ask.run)
    until = datetime.fromtimestamp(ask.deadline_ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M")
    return "\n".join([*map(visible, lines), shown, f"until {until}, then {ask.on_deadline}"])


def call(ask: Waiting) -> str:
    """The tool and its arguments."""
    return visible(f"{ask.tool_name} {ask.arguments or ''}".rstrip())


def fate_of(event: Resumed) -> str:
    """How it was decided, and by whom."""
    if event.door == "deadline":
        return visible(f"{event.tool_name}: nobody decided in time; {event.reason or _DECIDED[event.decision]}")
    by = f" by {event.by}" if event.by else ""
    more = "".join(f": {part}" for part in (event.reason, event.arguments) if part)
    return visible(f"{event.tool_name} {_DECIDED[event.decision]}{by}, over {event.door}{more}")


def decided(ask: Waiting | None, line: str, by: str) -> WaitDecision | None:
    """The decision that a line is, about what was asked when it was typed; None: it decides nothing.

    Raises RequestInvalid if it decides, and says it in another way than `HINTS` do.
    """
    command, _, rest = line.partition(" ")
    word, rest = command.lower().rstrip(",.;:!"), rest.strip()
    if word in (ANSWER, DECLINE):
        if ask is None or ask.what == "approval":
            raise RequestInvalid(word, "nothing asks for it")
    elif ask is None or ask.what != "approval" or word not in ("yes", "y", "no", "n"):
        return None
    known: dict[str, Any] = {"run": ask.run, "wait": ask.wait, "by": by, "door": "chat", "decision_id": new_run_id()}
    match ask.what:
        case "approval" if word in ("no", "n"):
            return Approval(decision="deny", reason=rest or None, **known)
        case "approval":
            return Approval(decision="allow", arguments=_object(command, rest) if rest else None, **known)
        case "answer" if word == DECLINE:
            return Answer(decision="decline", **known)
        case "answer":
            return Answer(content=_object(command, rest) if rest or ask.url is None else None, **known)
        case "tool_result":
            return ToolResult(content=_value(rest) if ask.schema else rest, is_error=word == DECLINE, **known)


def _object(command: str, text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as e:
        raise RequestInvalid(command, f"what follows is no JSON object: {e}") from None


def _value(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
