"""OpenAI's error shape, which Responses and Images share; Chat Completions has codes of its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus.events.error_info import ErrorClass
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.contract import Answer

_TYPES: Mapping[ErrorClass, str] = {
    "invalid_request": "invalid_request_error",
    "content_filter": "invalid_request_error",
    "not_found": "invalid_request_error",
    "rate_limit": "rate_limit_error",
    "limit": "rate_limit_error",
}


def type_of(problem: Problem) -> str:
    """The field `type` of an error."""
    return _TYPES.get(problem.kind, "server_error")


def error_object(problem: Problem) -> dict[str, object]:
    """The object `error`."""
    return {"message": problem.message, "type": type_of(problem), "param": problem.param, "code": problem.code}


def refusal(problem: Problem) -> Answer:
    """A problem before the first byte."""
    return Answer(status=problem.status, body=msgspec.json.encode({"error": error_object(problem)}))
