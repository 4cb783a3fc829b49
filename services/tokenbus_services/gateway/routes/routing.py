"""What routes of several client protocols share: paths that a header assigns to a protocol, and plain answers."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from tokenbus_services.gateway.gateway import GuardedEndpoint
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.surfaces.contract import Answer


class HeaderRoute(Route):
    """A route for GET that matches only requests with this header (in lower case)."""

    def __init__(self, path: str, endpoint: GuardedEndpoint, *, header: str) -> None:
        super().__init__(path, endpoint, methods=["GET"])
        self.header = header.encode()

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, Any]:
        """See `Route.matches`."""
        if scope["type"] == "http" and any(name == self.header for name, _ in scope["headers"]):
            return super().matches(scope)
        return Match.NONE, {}


def answered(answer: Answer) -> Response:
    """A whole answer as a response."""
    return Response(answer.body, answer.status, dict(answer.headers), media_type=answer.media_type)


def not_served(request: Request) -> Refusal:
    """The refusal of a path that the protocol has and the gateway does not serve."""
    why = f"{request.method} {request.url.path[:200]} is not served by this gateway"
    return Refusal(Problem(status=404, code="not_found", message=why, kind="not_found"))
