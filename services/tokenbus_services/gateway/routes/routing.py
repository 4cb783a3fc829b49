"""What routes of several client protocols share: paths that a header assigns to a protocol, and plain answers."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.responses import Response
from starlette.routing import Match, Route

from tokenbus_services.gateway.gateway import GuardedEndpoint
from tokenbus_services.gateway.surfaces.contract import Answer


class HeaderRoute(Route):
    """A route that matches only requests with this header (in lower case)."""

    def __init__(self, path: str, endpoint: GuardedEndpoint, *, header: str, method: str = "GET") -> None:
        super().__init__(path, endpoint, methods=[method])
        self.header = header.encode()

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, Any]:
        if scope["type"] == "http" and any(name == self.header for name, _ in scope["headers"]):
            return super().matches(scope)
        return Match.NONE, {}


def answered(answer: Answer) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers), media_type=answer.media_type)
