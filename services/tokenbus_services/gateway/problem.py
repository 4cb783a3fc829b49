"""A refused or failed request, before a surface writes it in its client's own shape. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus import errors
from tokenbus.events.error_info import ErrorClass, ErrorInfo, stream_cut
from tokenbus.events.public import Cancelled, Incomplete, RunFailedEvent

RESTARTING = "gateway_restarting"
UNSUPPORTED = "unsupported_parameter"
NO_THREAD = "thread_unsupported_request"
"""The code at which Anthropic's SDK continues without a thread by itself."""
DROPPABLE = (UNSUPPORTED, NO_THREAD)
"""Codes of refusals whose parameter `drop_unsupported` can leave out."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused or a run failed, as a client may know it: no provider's raw error, no account."""

    status: int
    """HTTP status, if no byte of the answer was sent."""
    code: str
    """Stable name for programs."""
    message: str
    kind: ErrorClass
    param: str | None = None
    """The parameter at fault, as the client named it (`tools[0].function.name`)."""
    retry_after_s: float | None = None
    should_retry: bool = False
    """Whether the client's own retry can help. The bus has already retried everything it can."""
    run: str | None = None
    request: str | None = None
    """Id of the HTTP request, if the problem is the whole answer to it."""
    headers: Mapping[str, str] = {}
    """Further headers of the answer."""


class Refusal(Exception):
    """The request is not taken; nothing was published."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def unsupported(param: str, why: str) -> Refusal:
    """A parameter or value that this gateway or the provider does not support."""
    return Refusal(Problem(status=400, code=UNSUPPORTED, message=why, kind="invalid_request", param=param))


def invalid(param: str | None, why: str) -> Refusal:
    """A value that is wrong in any case."""
    return Refusal(Problem(status=400, code="invalid_value", message=why, kind="invalid_request", param=param))


def tool_not_open(name: str) -> str:
    """Why a client may not name this tool of the deployment, and what its operator sets to open it."""
    return (
        f"the tool {name[:100]!r} of the deployment is not open to this client: the setting gateway.tools lists those "
        "that are, and `tools` of a key can restrict them further"
    )


def extra_not_open(param: str) -> Refusal:
    """A field of the provider's body that clients may not set."""
    why = "clients may set only the fields that the setting gateway.allow_extra, or `allow_extra` of their key, lists"
    return unsupported(param, why)


def restarting(run: str | None = None) -> Problem:
    """The server stops before the answer is complete."""
    message = "the gateway is restarting" + (f"; run {run} continues" if run else "")
    return Problem(
        status=503, code=RESTARTING, message=message, kind="overloaded", retry_after_s=1.0, should_retry=True, run=run
    )


def defect(run: str | None = None) -> Problem:
    """The gateway has a defect; its log names it."""
    message = "the gateway failed; its log has the cause, under the id of this request"
    return Problem(status=500, code="gateway_error", message=message, kind="internal", run=run)


def overloaded(code: str, what: str, *, of_key: bool) -> Refusal:
    """What the gateway shares among its clients is in use. ``of_key``: this client has its part of it."""
    why = f"this key's requests {what}, as much as one key may" if of_key else f"the gateway's requests {what}"
    status, kind = (429, "rate_limit") if of_key else (503, "overloaded")
    problem = Problem(status=status, code=code, message=why, kind=kind, retry_after_s=1.0, should_retry=True)
    return Refusal(problem)


STATUSES: Mapping[ErrorClass, int] = {
    "invalid_request": 400,
    "content_filter": 400,
    "not_found": 404,
    "rate_limit": 429,
    "limit": 429,
    "overloaded": 503,
    "timeout": 504,
    # The provider's key is the operator's, so a client must not take it for its own.
    "auth": 502,
    "network": 502,
    "protocol": 502,
    "server": 502,
    "unknown": 502,
    "internal": 500,
    "tool": 500,
}


_KEPT = (413, 422)
"""A provider's statuses that say more about a request than 400."""


def of_run(error: ErrorInfo, run: str | None) -> Problem:
    """The problem of a run that failed or was cut, or of a call that is no run. `ErrorInfo.raw` is left out: it may
    name the operator's account.
    """
    known_wait = error.kind in ("limit", "rate_limit") and error.retry_after_s is not None
    return Problem(
        status=error.status if error.status in _KEPT and error.kind == "invalid_request" else STATUSES[error.kind],
        code=error.code,
        message=f"{error.code}: {error.message}",
        kind=error.kind,
        param=error.where if error.kind == "invalid_request" else None,
        retry_after_s=error.retry_after_s,
        should_retry=known_wait,
        run=run,
    )


def of_end(event: Incomplete | RunFailedEvent | Cancelled) -> Problem:
    """The problem of a run that did not complete. Every surface reports it as an error."""
    match event:
        case RunFailedEvent():
            return of_run(event.error, event.run)
        case Incomplete():
            return of_run(event.error or stream_cut(event.reason), event.run)
        case Cancelled():
            why = f": {event.reason}" if event.reason else ""
            message = f"cancelled: the run was cancelled{why}"
            return Problem(status=499, code="cancelled", message=message, kind="unknown", run=event.run)


def of_exception(error: errors.TokenbusError) -> Problem:
    """The problem of a call of the bus that failed."""
    status, kind, param = 500, "internal", None
    match error:
        case errors.RequestTooLarge():
            status, kind = 413, "invalid_request"
        case errors.RequestInvalid():
            status, kind = 400, "invalid_request"
            param = getattr(error, "where", None) or None
        case errors.RunNotFound() | errors.BlobNotFound() | errors.SessionNotFound() | errors.WaitNotFound():
            status, kind = 404, "not_found"
        case errors.CursorAhead():
            status, kind, param = 400, "invalid_request", "after"
        case errors.CursorTrimmed() | errors.SessionReplaced():
            status, kind, param = 410, "not_found", "after"
        case errors.RunLost():
            status, kind = 503, "server"
        case errors.RunOpen() | errors.AlreadyDecided():
            status, kind = 409, "invalid_request"
        case errors.RunNotRepeatable():
            status, kind = 422, "invalid_request"
        case errors.ServerFull() | errors.ServerError() | errors.AppendPending() | errors.DecisionPending():
            status, kind = 503, "overloaded"
        case _:
            pass
    return Problem(
        status=status,
        code=error.code,
        message=error.told or str(error),
        kind=kind,
        param=param,
        retry_after_s=1.0 if status == 503 else None,
        should_retry=status == 503,
    )
