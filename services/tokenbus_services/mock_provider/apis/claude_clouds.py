"""Claude on Amazon Bedrock and on Google's Vertex AI: the Messages API with other paths, and Bedrock's frames.

Sources: "InvokeModelWithResponseStream" of the Bedrock API reference, "Claude on Vertex AI" of the Claude
documentation, and Anthropic's SDK, whose clients of both read these answers in
`tests/services/mock_provider/test_sdks_read_it.py`.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from struct import pack
from typing import Any
from urllib.parse import unquote
from zlib import crc32

import msgspec

from tokenbus_services.mock_provider.apis.anthropic import MockAnthropic
from tokenbus_services.mock_provider.request import HttpError, ParsedBody

_encode = msgspec.json.encode
_DATE = re.compile(r"20\d\d-\d\d-\d\d")
"""What Anthropic's own SDK sends since October 2026."""


class _Cloud(MockAnthropic):
    """The model is in the path, and so is whether the answer is streamed."""

    version = ""
    """The body's `anthropic_version`."""
    streams = ""
    """The end of a path whose answer is streamed."""

    def parse(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ParsedBody:
        if not (body.get("anthropic_version") == self.version or _DATE.fullmatch(body.get("anthropic_version", ""))):
            raise HttpError(400, f"anthropic_version: must be {self.version} or a version of the Messages API")
        if "model" in body:
            raise HttpError(400, "model: Extra inputs are not permitted")
        if not headers.get("authorization", "").startswith(("Bearer ", "AWS4-HMAC-SHA256 ")):
            raise HttpError(403, "the request is not authorized")
        completed = {**body, "model": unquote(route["model"]), "stream": route["method"] == self.streams}
        return super().parse(route, query, {**headers, "anthropic-version": "2023-06-01"}, completed)


class MockVertex(_Cloud):
    version = "vertex-2023-10-16"
    streams = "streamRawPredict"
    route = re.compile(
        r"/v1/projects/[^/]+/locations/[^/]+/publishers/anthropic/models/(?P<model>[^/:]+)"
        r":(?P<method>rawPredict|streamRawPredict)"
    )


class MockBedrock(_Cloud):
    """Claude on Bedrock. It refuses `stream`, which Vertex ignores."""

    version = "bedrock-2023-05-31"
    streams = "invoke-with-response-stream"
    stream_type = "application/vnd.amazon.eventstream"
    route = re.compile(r"/model/(?P<model>[^/]+)/(?P<method>invoke|invoke-with-response-stream)")

    def parse(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ParsedBody:
        if "stream" in body:
            raise HttpError(400, "stream: Extra inputs are not permitted")
        return super().parse(route, query, headers, body)

    def frame(self, event: bytes) -> bytes:
        """An event of the model as a chunk."""
        [data] = [line[len(b"data: ") :] for line in event.splitlines() if line.startswith(b"data: ")]
        return frame({":event-type": "chunk"}, _encode({"bytes": b64encode(data).decode(), "p": "abcdef"}))

    def error(self, status: int, message: str) -> bytes:
        return _encode({"message": message})

    def error_event(self, status: int, message: str) -> bytes:
        kind = "throttlingException" if status == 429 else "modelStreamErrorException"
        return frame({":message-type": "exception", ":exception-type": kind}, _encode({"message": message}))


def frame(headers: Mapping[str, str], payload: bytes) -> bytes:
    """A frame with headers of text, those of an event unless they say otherwise."""
    named = {":content-type": "application/json", ":message-type": "event", **headers}
    head = b"".join(
        pack(">B", len(name)) + name.encode() + pack(">BH", 7, len(value)) + value.encode()
        for name, value in named.items()
    )
    prelude = pack(">II", 16 + len(head) + len(payload), len(head))
    begun = prelude + pack(">I", crc32(prelude)) + head + payload
    return begun + pack(">I", crc32(begun))


bedrock = MockBedrock()
vertex = MockVertex()
