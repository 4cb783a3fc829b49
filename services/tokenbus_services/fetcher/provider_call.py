"""One provider call: sends the request, passes on every read of the body, and handles every way it can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from http import HTTPStatus

import httpx
import msgspec
import structlog

from tokenbus.bus.liveness import beater, slack
from tokenbus.events.error_info import IN_ANSWER, ErrorInfo
from tokenbus.events.frames import Data, Ended, Opened
from tokenbus.events.requests import Generate
from tokenbus.providers.api import HttpCall
from tokenbus.providers.file_api import LOST_STATUSES, lost_files
from tokenbus.providers.response.decoder import MAX_ERROR_BODY_BYTES
from tokenbus.providers.response.error_mapping import REQUEST_ID_HEADERS
from tokenbus.providers.response.last_event import LastEvent
from tokenbus_services.fetcher.attempt_writer import AttemptWriter
from tokenbus_services.fetcher.auth import KeyMissing, KeyUnusable
from tokenbus_services.fetcher.call_spans import CallFacts
from tokenbus_services.fetcher.call_timeouts import CallTimeouts
from tokenbus_services.fetcher.endpoints import AuthUnavailable, Endpoint
from tokenbus_services.fetcher.image_offload.offload import ImageOffloader, ImageStore
from tokenbus_services.fetcher.limits.token_estimate import TokenTally
from tokenbus_services.fetcher.response_body import BodyRefused, beginning, described, read_body
from tokenbus_services.fetcher.silent_calls import SilentCalls
from tokenbus_services.fetcher.uploads.upload import AUTH_UNAVAILABLE
from tokenbus_services.media.body import MediaBody
from tokenbus_services.media.errors import MediaFailed
from tokenbus_services.net.head_bound import HeadRefused
from tokenbus_services.redaction import RedactedStream
from tokenbus_services.redaction.events import RedactedEvents
from tokenbus_services.settings import LimitSettings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

SILENT_S = 30.0
"""After this time without a byte of the answer's body, the log says so."""
PASSED_HEADERS = (
    "content-type",
    "retry-after",
    "retry-after-ms",
    "date",
    "x-should-retry",
    *REQUEST_ID_HEADERS,
)
"""Response headers passed on with the attempt: those a decoder may need, and none that could be secret."""
MAX_HEADER_CHARS = 1_024
"""Maximum characters per header. The HTTP library allows 100 KB of headers in total and treats more as a broken
connection.
"""


class CredentialsRejected(Exception):
    """The provider rejected the credentials and newer ones are available; nothing was written."""


class FilesLost(Exception):
    """The provider does not have these files that the request names; nothing of the answer was written."""

    def __init__(self, file_ids: tuple[str, ...]) -> None:
        super().__init__(f"{len(file_ids)} files")
        self.file_ids = file_ids


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Data for a call in addition to its request."""

    tally: TokenTally | None = None
    """Receives the answer, to count tokens for the limits."""
    images: ImageStore | None = None
    """Where the answer's images are stored."""
    answer_bytes: int = LimitSettings().answer_bytes
    """Maximum size of the decoded answer."""
    again: bool = False
    """Whether the caller will repeat the call after Rejected."""
    called_ms: int = 0
    """Unix time of the call, for those who measure it."""
    facts: CallFacts | None = None
    """Notes about the call, for its span."""
    silent: SilentCalls | None = None
    """Is told of a call without a byte of an answer for `SILENT_S`."""


PLAIN = CallOptions()


async def fetch(
    endpoint: Endpoint,
    request: Generate,
    call: HttpCall,
    body: MediaBody | None = None,
    *,
    writer: AttemptWriter,
    deadline: float | None,
    options: CallOptions = PLAIN,
) -> None:
    """Make the request's call and write its whole answer, including its end.

    - ``body``: replaces the call's own body; closed when it is sent.
    - ``deadline``: in the event loop's time.

    Raises AttemptRefused if the attempt is over; FilesLost before anything is written; Rejected likewise, if the call
    may be repeated. However this ends, including by cancellation, the connection is closed or back in its pool.
    """
    limit = asyncio.timeout(None)
    silence = CallTimeouts(limit, deadline)
    settings = endpoint.settings
    try:
        with slack(settings.connect_timeout_s + settings.first_event_timeout_s + settings.idle_timeout_s):
            async with limit:
                error = await _read(endpoint, request, call, body, writer=writer, silence=silence, options=options)
    except TimeoutError:
        error = silence.error()
    finally:
        silence.stop_report()
    if options.facts:
        options.facts.ended(error)
    await writer.end(Ended(error, options.called_ms))


async def _read(
    endpoint: Endpoint,
    request: Generate,
    call: HttpCall,
    body: MediaBody | None,
    *,
    writer: AttemptWriter,
    silence: CallTimeouts,
    options: CallOptions,
) -> ErrorInfo | None:
    seconds = endpoint.settings.first_event_timeout_s
    silence.allow(seconds, "first_event_timeout", f"no answer within {seconds:g} s")
    silence.report_after(SILENT_S, lambda: _report_silence(endpoint, request, writer, seconds, options))
    response = await _answer_to(endpoint, call, body)
    if isinstance(response, ErrorInfo):
        return response
    if options.facts:
        options.facts.answered(response)
    try:
        refused = None
        if response.status_code == HTTPStatus.UNAUTHORIZED and options.again and endpoint.rejected():
            raise CredentialsRejected
        if call.files and response.status_code in LOST_STATUSES:
            refused = await beginning(response, MAX_ERROR_BODY_BYTES)
            if lost := lost_files(response.status_code, refused, call.files):
                raise FilesLost(lost)
        content = read_body(response, limit=options.answer_bytes) if refused is None else _once(refused)
        async with aclosing(content):
            await _pass_on(response, content, endpoint, request, writer=writer, silence=silence, options=options)
    except BodyRefused as e:
        return e.error
    except httpx.TransportError as e:
        return _network(endpoint, e, in_answer=True)
    except OSError as e:  # disk error while spooling an image: another fetcher may have space
        return ErrorInfo(code="disk", kind="internal", message=f"an image could not be held: {e}", retryable=True)
    finally:
        await response.aclose()
    return None


def _report_silence(
    endpoint: Endpoint, request: Generate, writer: AttemptWriter, timeout_s: float, options: CallOptions
) -> Callable[[], object]:
    """Say that the call is silent; return what is called when it is no longer."""
    # At info, since a model that thinks, or whose answer comes whole, may take this long in health.
    log.info(
        "attempt_silent",
        run=writer.run,
        turn=writer.turn,
        attempt=writer.attempt,
        provider=endpoint.name,
        model=request.model,
        silent_s=SILENT_S,
        timeout_s=timeout_s,
        hint=f"many of these: the provider answers nothing; look at its state, "
        f"or lower first_event_timeout_s in [providers.{endpoint.name}] and set a fallback",
    )
    silent = options.silent
    return silent.began(endpoint.name, request.model, options.called_ms) if silent else lambda: None


async def _answer_to(endpoint: Endpoint, call: HttpCall, body: MediaBody | None) -> httpx.Response | ErrorInfo:
    """Send the call; return the head of its answer, or why there is none."""
    try:
        return await _send(endpoint, call, body)
    except MediaFailed as e:
        return e.error
    except KeyMissing as e:
        return ErrorInfo(code="key_missing", kind="auth", message=str(e), where=e.variable)
    except AuthUnavailable as e:
        return ErrorInfo(code=AUTH_UNAVAILABLE, kind="auth", message=str(e), retryable=True)
    except KeyUnusable as e:
        return ErrorInfo(code="key_unusable", kind="auth", message=str(e), where=e.variable)
    except httpx.ConnectTimeout:
        seconds = endpoint.settings.connect_timeout_s
        message = f"no connection to {endpoint.name} within {seconds:g} s"
        return ErrorInfo(code="connect_timeout", kind="timeout", message=message, retryable=True)
    except httpx.TransportError as e:
        return _network(endpoint, e)


async def _send(endpoint: Endpoint, call: HttpCall, body: MediaBody | None) -> httpx.Response:
    try:
        return await endpoint.send(endpoint.request(call, body))
    finally:
        if body is not None:
            await body.aclose()


async def _pass_on(
    response: httpx.Response,
    content: AsyncGenerator[bytes],
    endpoint: Endpoint,
    request: Generate,
    *,
    writer: AttemptWriter,
    silence: CallTimeouts,
    options: CallOptions,
) -> None:
    redact, tally = endpoint.redact, options.tally
    opened, offloader = _opened(response, endpoint, request, silence=silence, options=options)
    await _write(writer, opened, silence)
    if tally:
        tally.open(opened)
    marks = endpoint.api.urgent
    clean = RedactedEvents(redact) if response.status_code < 300 else redact.stream()
    last = LastEvent(endpoint.api.last if request.stream and response.status_code < 300 else ())

    async def pass_on(data: bytes, *, urgent: bool) -> None:
        if tally:
            tally.feed(data)
        await _write(writer, Data(data), silence, urgent=urgent)
        if last.feed(data):
            silence.allow_closing()

    async def hand_on(data: bytes, *, urgent: bool) -> None:
        if offloader and not offloader.passes(data):
            async with aclosing(offloader.feed(data)) as parts:
                async for part in parts:
                    await pass_on(part, urgent=urgent)
        elif data:
            await pass_on(data, urgent=urgent)

    first = True
    after_boundary = False
    progress = beater()
    with _reached_end(clean, offloader, writer):
        async for read in content:
            progress()
            data = clean.feed(read)
            boundary = first or any(mark in data for mark in marks)
            if first:
                first = False
                silence.stop_report()
                if options.silent and response.status_code < 300:
                    options.silent.answered(endpoint.name, request.model)
                seconds = endpoint.settings.idle_timeout_s
                silence.allow(seconds, "idle_timeout", f"the stream was silent for {seconds:g} s")
            else:
                silence.received()
            # Data after a boundary may be a block's first chunk, and readers are waiting for it.
            await hand_on(data, urgent=boundary or after_boundary)
            after_boundary = boundary
        await hand_on(clean.end(), urgent=True)
    if tally:
        tally.end()


def _opened(
    response: httpx.Response,
    endpoint: Endpoint,
    request: Generate,
    *,
    silence: CallTimeouts,
    options: CallOptions,
) -> tuple[Opened, ImageOffloader | None]:
    """The first item of the answer, and what moves its images out of it, if they are moved."""
    redact = endpoint.redact
    # Redact before truncating: half a key would not be recognised.
    headers = {n: redact(response.headers[n])[:MAX_HEADER_CHARS] for n in PASSED_HEADERS if n in response.headers}
    asked = endpoint.api.images_asked(request)
    offloader = None
    if options.images and endpoint.api.image_keys and not asked.inline and response.status_code < 300:
        offloader = ImageOffloader(endpoint.api.image_keys, options.images, silence.paused)
        asked = msgspec.structs.replace(asked, moved=offloader.secret)
    opened = Opened(
        api=endpoint.settings.api,
        status=response.status_code,
        headers=headers,
        stream=request.stream,
        quirks=endpoint.quirks_of(request),
        images=asked,
        provider=endpoint.name,
        called_ms=options.called_ms,
        traceparent=request.traceparent or "",
    )
    return opened, offloader


@contextmanager
def _reached_end(
    clean: RedactedEvents | RedactedStream, offloader: ImageOffloader | None, writer: AttemptWriter
) -> Generator[None]:
    """If the answer breaks off, pass on what was held back as the possible beginning of a secret."""
    try:
        yield
    except (httpx.TransportError, BodyRefused, asyncio.CancelledError):
        rest = clean.end()
        if rest and writer.why_refused is None and (offloader is None or offloader.passes(rest)):
            writer.write_item(Data(rest))
        raise
    finally:
        if offloader:
            offloader.close()


async def _write(writer: AttemptWriter, item: Opened | Data, silence: CallTimeouts, *, urgent: bool = False) -> None:
    """Write an item. While there is no room for more, nothing is read, so the silence timeout is suspended."""
    writer.write_item(item, urgent=urgent)
    if writer.must_wait:
        with silence.paused():
            await writer.room()


async def _once(data: bytes) -> AsyncGenerator[bytes]:
    if data:
        yield data


def _network(endpoint: Endpoint, error: httpx.TransportError, *, in_answer: bool = False) -> ErrorInfo:
    """Why no answer came, or why it ended. ``in_answer``: its head had come, so the provider can be reached."""
    if isinstance(error.__cause__, HeadRefused):
        return ErrorInfo(code="answer_head", kind="protocol", message=f"the head of the answer has {error.__cause__}")
    failed = "broke in the middle of the answer" if in_answer else "failed"
    return ErrorInfo(
        code="network",
        kind="network",
        message=endpoint.redact(f"the connection to {endpoint.name} {failed}: {described(error)}"),
        retryable=True,
        where=IN_ANSWER if in_answer else None,
    )
