"""The object `response`: the request's settings, the state of the run, its output and usage. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from tokenbus.events.error_info import ErrorClass
from tokenbus.events.public import Cancelled, Completed, Incomplete, RunFailedEvent, TerminalEvent
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.contract import GatewayNote
from tokenbus_services.gateway.surfaces.hosted import late_citations
from tokenbus_services.gateway.surfaces.openai_responses.parts import response_id
from tokenbus_services.gateway.surfaces.surface import Echo

STEERED = "steered"
"""Reason of a cancel whose response another one continues."""
MAX_ECHO_BYTES = 16 * 1024
"""Bound of the settings that are kept with a run to be repeated: every subscriber of the bus gets them."""
SHED = ("instructions", "tools", "text")
"""Settings that are left out first if they are too large."""

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ErrorCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
Json = dict[str, Any]

DEFAULTS: Mapping[str, object] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "truncation": "disabled",
    "user": None,
    "metadata": {},
}
"""Settings that a response repeats, as they are if the request does not set them."""


class ResponseSettings(Echo, frozen=True, kw_only=True, omit_defaults=True):
    """What the note keeps of a request: what a response repeats, and how its run is shown."""

    response: dict[str, object] = msgspec.field(default_factory=dict[str, object])
    """Fields of `DEFAULTS` that the request set to another value."""
    background: bool = False
    show_tools: bool = False
    """Calls that the bus runs are output items too."""
    client: list[str] = msgspec.field(default_factory=list[str])
    """Tools of the deployment whose calls the client runs."""
    namespaces: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """The namespace of each tool that is in one, by its name on the bus."""


def settings_of(note: GatewayNote) -> ResponseSettings:
    """The settings in a run's note; those of an unknown request if they cannot be read."""
    try:
        return msgspec.convert(note.echo, ResponseSettings)
    except msgspec.ValidationError:
        return ResponseSettings()


def bounded(response: Mapping[str, object]) -> dict[str, object]:
    """The settings to keep, within `MAX_ECHO_BYTES`."""
    kept = dict(response)
    for name in SHED:
        if len(msgspec.json.encode(kept)) <= MAX_ECHO_BYTES:
            break
        kept.pop(name, None)
    return kept


class ResponseObject:
    """Builds the object at each point of the run."""

    def __init__(self, note: GatewayNote, run: str, part: int = 0) -> None:
        """``part``: of a run that waited, see `Parts`."""
        self._note = note
        self._run = run
        self._part = part
        self._settings = settings = settings_of(note)
        self.status: Status = "queued" if settings.background else "in_progress"
        self.usage: Usage | None = None
        self._error: Json | None = None
        self._incomplete: Json | None = None
        self._completed_at: int | None = None
        self._beside: Json = {}

    def answered_by(self, provider: str | None, model: str | None) -> None:
        """Note which provider and model speak; None: unchanged."""
        self._beside |= {k: v for k, v in (("provider", provider), ("model", model)) if v}

    def answered_as(self, other: ResponseObject) -> None:
        """The same provider and model speak."""
        self._beside |= {k: v for k, v in other._beside.items() if k in ("provider", "model")}

    def end(self, event: TerminalEvent) -> str:
        """Apply the run's end; return the type of the event that reports it."""
        if not self._part:
            self.usage = event.usage or self.usage
        self._completed_at = self._note.created + event.timing.total_ms // 1000
        self.answered_by(event.provider, event.model)
        self._beside |= late_citations(event)
        match event:
            case Completed(finish="length"):
                return self._incompleted("incomplete", "max_output_tokens")
            case Completed(finish="content_filter"):
                return self._incompleted("incomplete", "content_filter")
            case Completed():
                self.status = "completed"
                return "response.completed"
            case Cancelled(reason="steered"):
                return self._incompleted("incomplete", STEERED)
            case Cancelled():
                return self._incompleted("cancelled", "cancelled")
            case Incomplete(error=error, reason=reason):
                code = error.code if error else "stream_cut"
                return self.fail(error.kind if error else "network", f"{code}: {error.message if error else reason}")
            case RunFailedEvent(error=error):
                return self.fail(error.kind, f"{error.code}: {error.message}")

    def asks(self) -> str:
        """The run waits for its client, which goes on with another response."""
        self.status = "completed"
        self._completed_at = self._note.created
        return "response.completed"

    def count(self, usage: Usage, total: Usage | None) -> None:
        """Count what a turn took: of the whole run so far, or of this part of it."""
        self.usage = (self.usage.plus(usage) if self.usage else usage) if self._part else total

    def broken(self, problem: Problem) -> str:
        """End the response because of the gateway."""
        code = f"{problem.code}: "
        return self.fail(problem.kind, problem.message if problem.message.startswith(code) else code + problem.message)

    def fail(self, kind: ErrorClass, message: str) -> str:
        self.status = "failed"
        self._error = {"code": error_code(kind), "message": message}
        return "response.failed"

    @property
    def is_broken_off(self) -> bool:
        """Whether a call that is not done must not be run."""
        return self.status in ("failed", "cancelled") or self._incomplete == {"reason": STEERED}

    def build(self, output: Sequence[Json]) -> Json:
        """The object as it is now, with these items."""
        repeated = {**DEFAULTS, **self._settings.response}
        if self._part:
            repeated["previous_response_id"] = response_id(self._run, self._part - 1)
        return {
            "id": response_id(self._run, self._part),
            "object": "response",
            "created_at": self._note.created,
            "completed_at": self._completed_at if self.status == "completed" else None,
            "status": self.status,
            "background": self._settings.background,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "model": self._note.model,
            "output": output,
            **repeated,
            "usage": usage_object(self.usage) if self.usage else None,
            "tokenbus": {"run": self._run, **self._beside},
        }

    def _incompleted(self, status: Status, reason: str) -> str:
        self.status = status
        self._incomplete = {"reason": reason}
        return "response.incomplete"


def error_code(kind: ErrorClass) -> ErrorCode:
    """The API's own code: its set is closed, so the bus's code is in the message."""
    match kind:
        case "rate_limit" | "limit":
            return "rate_limit_exceeded"
        case "invalid_request" | "content_filter":
            return "invalid_prompt"
        case _:
            return "server_error"


def usage_object(usage: Usage) -> Json:
    """Token counts; what the provider did not report is 0."""
    given, written = usage.input or 0, usage.output or 0
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": usage.cache_read or 0, "cache_write_tokens": usage.cache_write or 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": given + written if usage.total is None else usage.total,
    }
