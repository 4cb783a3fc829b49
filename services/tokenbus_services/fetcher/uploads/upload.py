"""One upload of a blob to a provider's file API: streams it from the store and handles every way it can end."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Callable, Mapping

import httpx
import msgspec

from tokenbus.bus import process_clock
from tokenbus.errors import Malformed, RequestInvalid
from tokenbus.events.error_info import ErrorInfo
from tokenbus.providers.file_api import FileAnswer, FileApi, FileCall, FileToUpload, ProviderFile
from tokenbus.providers.response.error_mapping import http_failure, wire_failure
from tokenbus_services.endpoints.auth import KeyMissing, KeyUnusable
from tokenbus_services.endpoints.endpoint import MAX_REQUEST_S, AuthUnavailable, Endpoint
from tokenbus_services.endpoints.response_body import BodyRefused, beginning, described
from tokenbus_services.media.body import Embedded, MediaBody
from tokenbus_services.media.locate import PlaceholderMarks

MAX_ANSWER_BYTES = 64 * 2**10
LEAST_BYTES_PER_S = 256 * 2**10
"""A slower upload is given up. Each piece may stall for long, so without a rate a large file could drip for days."""

AUTH_UNAVAILABLE = "auth_unavailable"
"""Error code if a provider's `auth` raised."""
TOO_SLOW = "upload_too_slow"
"""Error code of an upload below `LEAST_BYTES_PER_S`; it is not tried again at once."""


class UploadFailed(Exception):
    """An upload failed; ``error`` is what a provider call would have ended with."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error

    def at(self, where: str) -> UploadFailed:
        """Return the same error, for media at this place of the conversation."""
        return UploadFailed(msgspec.structs.replace(self.error, message=f"{where}: {self.error.message}", where=where))


async def upload(
    endpoint: Endpoint, api: FileApi, file: FileToUpload, content: Embedded, *, moves: Callable[[float], None]
) -> ProviderFile:
    """Upload the blob as a file. Holds at most one piece of its content in memory. ``moves``: called with the longest
    time that the next step may take in silence.

    Raises UploadFailed, and MediaFailed if the blob breaks off.
    """
    marks = PlaceholderMarks()
    mark = b64decode(marks.base64(0))
    steps = api.upload(file, mark, endpoint.base_path)
    try:
        call = next(steps)
        while True:
            timeouts = endpoint.settings
            moves(call.pause_s + timeouts.connect_timeout_s + timeouts.first_event_timeout_s)
            await asyncio.sleep(call.pause_s)
            pieces = [piece if isinstance(piece, bytes) else content for piece in marks.split(call.body)]
            try:
                call = steps.send(await _answer(endpoint, call, MediaBody(pieces)))
            except StopIteration as e:
                return e.value
    except Malformed as e:
        raise UploadFailed(wire_failure(e)) from e


async def _answer(endpoint: Endpoint, call: FileCall, body: MediaBody) -> FileAnswer:
    settings = endpoint.settings
    allowed_s = settings.connect_timeout_s + settings.first_event_timeout_s + MAX_REQUEST_S
    allowed_s += body.size / LEAST_BYTES_PER_S
    limit = process_clock.timeout(allowed_s)
    try:
        async with limit:
            return await _answered(endpoint, call, body)
    except TimeoutError as e:
        if not limit.expired():
            raise
        message = f"the upload of {body.size} bytes to {endpoint.name} took longer than {allowed_s:.0f} s"
        raise UploadFailed(ErrorInfo(code=TOO_SLOW, kind="timeout", message=message, retryable=True)) from e


async def _answered(endpoint: Endpoint, call: FileCall, body: MediaBody) -> FileAnswer:
    try:
        request = endpoint.file_request(call, body)
        response = await endpoint.send(request, authorised="://" in call.path)
    except (KeyMissing, KeyUnusable) as e:
        raise UploadFailed(ErrorInfo(code="key_missing", kind="auth", message=str(e), where=e.variable)) from e
    except AuthUnavailable as e:
        raise UploadFailed(ErrorInfo(code=AUTH_UNAVAILABLE, kind="auth", message=str(e), retryable=True)) from e
    except RequestInvalid as e:
        raise UploadFailed(ErrorInfo(code="upload_refused", kind="protocol", message=str(e))) from e
    except (httpx.TransportError, httpx.InvalidURL) as e:
        raise UploadFailed(_network(endpoint, e)) from e
    finally:
        await body.aclose()
    try:
        content = await beginning(response, MAX_ANSWER_BYTES)
    except BodyRefused as e:
        raise UploadFailed(e.error) from e
    except httpx.TransportError as e:
        raise UploadFailed(_network(endpoint, e)) from e
    finally:
        await response.aclose()
    headers: Mapping[str, str] = response.headers
    if response.status_code >= 300:
        redacted = {name: endpoint.redact(value) for name, value in headers.items()}
        raise UploadFailed(http_failure(response.status_code, endpoint.redact.data(content), redacted))
    return FileAnswer(headers={name.lower(): value for name, value in headers.items()}, body=content)


def _network(endpoint: Endpoint, error: Exception) -> ErrorInfo:
    return ErrorInfo(
        code="network",
        kind="network",
        message=endpoint.redact(f"the upload to {endpoint.name} failed: {described(error)}"),
        retryable=True,
    )
