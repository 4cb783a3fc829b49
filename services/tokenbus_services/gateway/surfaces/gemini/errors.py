"""Problems in Gemini's form: https://google.aip.dev/193. Pure."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from tokenbus_services.gateway.problem import Problem

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    402: "FAILED_PRECONDITION",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_BY_KIND = {"content_filter": "FAILED_PRECONDITION", "auth": "INTERNAL"}
_TYPE = "type.googleapis.com/google.rpc."


def error_object(problem: Problem) -> dict[str, object]:
    """The object that a response or a chunk holds in place of candidates."""
    fallback = "INTERNAL" if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "INVALID_ARGUMENT"
    status = _STATUSES.get(problem.status, fallback)
    if problem.status in (400, 502):
        status = _BY_KIND.get(problem.kind, status)
    details: list[dict[str, object]] = [
        {"@type": f"{_TYPE}ErrorInfo", "reason": problem.code, "domain": "tokenbus"},
    ]
    message = problem.message
    if problem.param:
        message = f"{problem.param}: {message}"
        violations = [{"field": problem.param, "description": problem.message}]
        details.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": violations})
    return {"error": {"code": problem.status, "message": message, "status": status, "details": details}}


def error_body(problem: Problem) -> bytes:
    """The body of an error response."""
    return msgspec.json.encode(error_object(problem))
