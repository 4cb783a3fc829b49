"""Problems as OpenAI's clients read them: always nested in `error`, before and within a stream. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus.events.error_info import ErrorClass
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.contract import Answer
from tokenbus_services.gateway.surfaces.json_text import encode_line
from tokenbus_services.gateway.surfaces.openai_errors import type_of

_CODES: Mapping[ErrorClass, str] = {
    "content_filter": "content_filter",
    "rate_limit": "rate_limit_exceeded",
    "overloaded": "overloaded",
    "timeout": "timeout",
    "auth": "upstream_auth",
    "not_found": "model_not_found",
}
"""Codes of failed runs that clients know by name; every other problem has its own."""
_OWN_CODES = ("gateway_", "run_", "idempotency_")
"""How the codes of the gateway's own problems with a run begin."""
_OWN_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "insufficient_quota",
    403: "permission_error",
    429: "rate_limit_error",
}


def error_object(problem: Problem) -> dict[str, object]:
    """The object `error`."""
    of_run = problem.run is not None and not problem.code.startswith(_OWN_CODES)
    code = _CODES.get(problem.kind, problem.code) if of_run else problem.code
    kind = _OWN_TYPES.get(problem.status) or type_of(problem)
    return {"message": problem.message, "type": kind, "param": problem.param, "code": code}


def refusal(problem: Problem) -> Answer:
    """A problem before the first byte."""
    return Answer(status=problem.status, body=msgspec.json.encode({"error": error_object(problem)}))


def error_event(problem: Problem) -> bytes:
    """A problem within a stream. No `[DONE]` follows: it would make the answer look whole."""
    return b"data: " + encode_line({"error": error_object(problem)}) + b"\n\n"
