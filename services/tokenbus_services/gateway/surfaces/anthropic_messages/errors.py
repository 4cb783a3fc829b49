"""Problems in the form of the Messages API: https://docs.anthropic.com/en/api/errors."""

from __future__ import annotations

from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.json_text import encode_line

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def status_of(problem: Problem) -> int:
    """The HTTP status: this API uses 529 for overload."""
    return 529 if problem.status == 503 and problem.kind == "overloaded" else problem.status


def error_body(problem: Problem) -> bytes:
    """The body of an error response, and the data of an error event.

    The API has no field for the parameter at fault, so the message begins with it.
    """
    fallback = "invalid_request_error" if problem.status < 499 else "api_error"
    message = f"{problem.param}: {problem.message}" if problem.param else problem.message
    error: dict[str, object] = {
        "type": _TYPES.get(problem.status, fallback),
        "message": message,
        "code": problem.code,
        "param": problem.param,
    }
    return encode_line({"type": "error", "error": error, "request_id": problem.request})
