"""What is wrong with a request, or with a dead entry that should become one again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenbus.errors.base import TokenbusError

if TYPE_CHECKING:
    from tokenbus.events.requests import Generate


class RequestError(TokenbusError):
    """The request is at fault and was not accepted."""

    code = "request_error"
    request: Generate | Mapping[str, object] | None = None
    """Set by `Client.publish`: the given request, with its id."""


class RequestInvalid(RequestError):
    """A request field is missing, has the wrong type or is out of range."""

    code = "request_invalid"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"invalid request at {where}: {problem}")
        self.where = where
        self.problem = problem


class RequestTooLarge(RequestError):
    """The encoded request exceeds its limit, in bytes."""

    code = "request_too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the request has {size} bytes, the limit is {limit}; send media by blob id or url")
        self.size = size
        self.limit = limit


class PoisonRequest(RequestError):
    """Several workers crashed while accepting the request. It is not retried."""

    code = "poison"

    def __init__(self, workers: int) -> None:
        super().__init__(f"{workers} workers crashed while accepting the request")
        self.workers = workers


class DeadNotFound(TokenbusError):
    """The dead stream has no such entry: it was retried, dropped or trimmed, or never existed."""

    code = "dead_not_found"

    def __init__(self, entry: str) -> None:
        super().__init__(f"no dead entry {entry}")
        self.entry = entry


class CannotRetry(TokenbusError):
    """This dead entry cannot be turned into a request; it stays in the dead stream."""

    code = "cannot_retry"

    def __init__(self, entry: str, problem: str) -> None:
        super().__init__(f"dead entry {entry}: {problem}")
        self.entry = entry
        self.problem = problem
