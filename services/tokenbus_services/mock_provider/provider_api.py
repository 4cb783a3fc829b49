"""What the server needs of each provider API: read its requests, write its errors and its replies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider.reply import Reply
from tokenbus_services.mock_provider.request import Asked, RequestOptions

CREATED = 1_750_000_000
"""Unix time that composed replies claim for their creation: the same request gets the same bytes."""


class Composer(Protocol):
    """Writes a `Reply` in the wire form of an API."""

    def stream(self, reply: Reply, asked: Asked) -> bytes:
        """The server-sent events of a streamed answer."""
        ...

    def body(self, reply: Reply, asked: Asked) -> bytes:
        """The JSON body of an answer that is not streamed."""
        ...


class MockApi(Composer, Protocol):
    """One provider API, as its module gives it (a module-level object named ``dialect``)."""

    name: ApiName
    route: re.Pattern[str]
    """Matches the path of its requests."""

    def hear(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> RequestOptions:
        """What the request asks for. Raises Refused for what the API itself would refuse."""
        ...

    def error(self, status: int, message: str) -> bytes:
        """The JSON body of an HTTP error."""
        ...

    def error_event(self, status: int, message: str) -> bytes:
        """The same error as an event in mid-stream."""
        ...
