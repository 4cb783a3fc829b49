"""The interface of a mocked provider API: read requests, write errors and replies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider.reply import Reply
from tokenbus_services.mock_provider.request import ModelRequest, ParsedBody

CREATED = 1_750_000_000
"""Fixed creation time (Unix) of composed replies, so that the same request gets the same bytes."""


class Composer(Protocol):
    """Writes a `Reply` in the wire format of an API."""

    def stream(self, reply: Reply, request: ModelRequest) -> bytes:
        """The server-sent events of a streamed answer."""
        ...

    def body(self, reply: Reply, request: ModelRequest) -> bytes:
        """The JSON body of an answer that is not streamed."""
        ...


class MockApi(Composer, Protocol):
    """One provider API; each module exports one as ``mock_api``."""

    name: ApiName
    route: re.Pattern[str]
    """Matches the path of its requests."""

    def parse(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ParsedBody:
        """Parse a request. Raises Rejected for anything the real API would reject."""
        ...

    def error(self, status: int, message: str) -> bytes:
        """The JSON body of an HTTP error."""
        ...

    def error_event(self, status: int, message: str) -> bytes:
        """The same error as an event in mid-stream."""
        ...


@runtime_checkable
class FramedApi(Protocol):
    """An API that sends the events of a stream in frames of its own."""

    stream_type: str
    """The media type of its streams."""

    def frame(self, event: bytes) -> bytes:
        """The frame of one server-sent event."""
        ...


@runtime_checkable
class JobsApi(MockApi, Protocol):
    """An API that runs a request with ``background`` as a job."""

    resumes: bool
    """Whether the stream of a job can be read from any event on."""

    def id_of(self, request: ModelRequest) -> str:
        """The id of the answer to a request, by which its job is named."""
        ...

    def without_output(self, request: ModelRequest, status: str) -> bytes:
        """The answer of a job that has no output (yet)."""
        ...
