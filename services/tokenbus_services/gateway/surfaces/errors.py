"""Problems in the words of each protocol: one table, so that one cause has one name on each surface. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from tokenbus.events.error_info import ErrorClass
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.contract import Answer, encode_line


class Words(NamedTuple):
    """What each protocol calls the problems of one status."""

    openai: str
    """`error.type`."""
    anthropic: str
    """`error.type`."""
    gemini: str
    """`error.status`."""
    sentence: str | None = None
    """For the user of a chat; None: that of the problem's class."""


_REQUEST = Words("invalid_request_error", "invalid_request_error", "INVALID_ARGUMENT")
_SERVER = Words("server_error", "api_error", "INTERNAL")
_TABLE: Mapping[int, Words] = {
    401: Words("authentication_error", "authentication_error", "UNAUTHENTICATED"),
    402: Words("insufficient_quota", "billing_error", "FAILED_PRECONDITION", "The budget for this chat is spent."),
    403: Words("permission_error", "permission_error", "PERMISSION_DENIED"),
    404: Words("invalid_request_error", "not_found_error", "NOT_FOUND"),
    405: Words("invalid_request_error", "invalid_request_error", "UNIMPLEMENTED"),
    409: Words("invalid_request_error", "invalid_request_error", "ABORTED"),
    413: Words("invalid_request_error", "request_too_large", "INVALID_ARGUMENT", "The request was too large."),
    429: Words("rate_limit_error", "rate_limit_error", "RESOURCE_EXHAUSTED"),
    499: Words("server_error", "api_error", "CANCELLED", "The answer was cancelled."),
    502: Words("server_error", "api_error", "UNAVAILABLE"),
    503: Words("server_error", "overloaded_error", "UNAVAILABLE"),
    504: Words("server_error", "timeout_error", "DEADLINE_EXCEEDED"),
}
_OPENAI_CODES: Mapping[ErrorClass, str] = {
    "content_filter": "content_filter",
    "rate_limit": "rate_limit_exceeded",
    "overloaded": "overloaded",
    "timeout": "timeout",
    "auth": "upstream_auth",
    "not_found": "model_not_found",
}
"""Codes of failed runs that clients of OpenAI know by name; every other problem has its own."""
_OWN_CODES = ("gateway_", "run_", "response_", "idempotency_")
"""How the codes of the gateway's own problems with a run begin."""
_GEMINI_CLASSES: Mapping[ErrorClass, str] = {"content_filter": "FAILED_PRECONDITION", "auth": "INTERNAL"}
_GOOGLE = "type.googleapis.com/google.rpc."
SENTENCES: Mapping[ErrorClass, str] = {
    "invalid_request": "The request was not accepted.",
    "content_filter": "The provider's content filter stopped the answer.",
    "not_found": "The model is not available.",
    "rate_limit": "Too many requests. Try again in a moment.",
    "limit": "Too many requests. Try again in a moment.",
    "overloaded": "The model is overloaded. Try again in a moment.",
    "timeout": "The answer took too long.",
    "auth": "The model's provider refused the request.",
    "network": "The connection to the model's provider failed.",
    "protocol": "The model's provider gave an answer that could not be read.",
    "server": "The model's provider failed.",
    "unknown": "The answer failed.",
    "internal": "The answer failed.",
    "tool": "A tool failed.",
}
"""What the user of a chat reads: `useChat` shows the text as it is, so it names no account and no inner address."""


def words_of(problem: Problem) -> Words:
    return _TABLE.get(problem.status) or (_REQUEST if problem.status < 500 else _SERVER)


def sentence_of(problem: Problem) -> str:
    """What the user of a chat reads."""
    return words_of(problem).sentence or SENTENCES[problem.kind]


def openai_error(problem: Problem) -> dict[str, object]:
    """OpenAI's object `error`, for all of its APIs."""
    of_run = problem.run is not None and not problem.code.startswith(_OWN_CODES)
    code = _OPENAI_CODES.get(problem.kind, problem.code) if of_run else problem.code
    return {"message": problem.message, "type": words_of(problem).openai, "param": problem.param, "code": code}


def openai_refusal(problem: Problem) -> Answer:
    """A problem before the first byte."""
    return Answer(status=problem.status, body=msgspec.json.encode({"error": openai_error(problem)}))


def anthropic_error(problem: Problem) -> bytes:
    """The body of an error response, and the data of an error event: https://docs.anthropic.com/en/api/errors.

    The API has no field for the parameter at fault, so the message begins with it.
    """
    error: dict[str, object] = {
        "type": words_of(problem).anthropic,
        "message": f"{problem.param}: {problem.message}" if problem.param else problem.message,
        "code": problem.code,
        "param": problem.param,
        "details": {"error_code": problem.code},
    }
    return encode_line({"type": "error", "error": error, "request_id": problem.request})


def anthropic_refusal(problem: Problem) -> Answer:
    """A problem before the first byte. This API uses 529 for overload."""
    overloaded = problem.status == 503 and problem.kind == "overloaded"
    return Answer(status=529 if overloaded else problem.status, body=anthropic_error(problem))


def gemini_error(problem: Problem) -> dict[str, object]:
    """The object that a response or a chunk holds in place of candidates: https://google.aip.dev/193."""
    status = words_of(problem).gemini
    if problem.status in (400, 502):
        status = _GEMINI_CLASSES.get(problem.kind, status)
    details: list[dict[str, object]] = [{"@type": f"{_GOOGLE}ErrorInfo", "reason": problem.code, "domain": "tokenbus"}]
    message = problem.message
    if problem.param:
        message = f"{problem.param}: {message}"
        violations = [{"field": problem.param, "description": problem.message}]
        details.append({"@type": f"{_GOOGLE}BadRequest", "fieldViolations": violations})
    return {"error": {"code": problem.status, "message": message, "status": status, "details": details}}


def gemini_refusal(problem: Problem) -> Answer:
    """A problem before the first byte."""
    return Answer(status=problem.status, body=msgspec.json.encode(gemini_error(problem)))
