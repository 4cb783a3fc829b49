"""Passes a provider's response on: its head, then each read of its body, without secrets and large images."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager

import httpx
import msgspec

from tokenbus.bus.liveness import beater
from tokenbus.events.frames import Data, Opened
from tokenbus.events.requests import Generate
from tokenbus.providers.response.error_mapping import REQUEST_ID_HEADERS
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.endpoints.response_body import BodyRefused
from tokenbus_services.fetcher.calls.background_job import RunningJob
from tokenbus_services.fetcher.calls.call_spans import CallFacts
from tokenbus_services.fetcher.calls.call_timeouts import AnswerProgress, CallTimeouts, SilentCalls
from tokenbus_services.fetcher.calls.steered_call import SteeredCall
from tokenbus_services.fetcher.image_offload import ImageOffloader, ImageStore
from tokenbus_services.fetcher.limits.token_estimate import TokenTally
from tokenbus_services.fetcher.writing.attempt_writer import AttemptWriter
from tokenbus_services.redaction.events import RedactedEvents
from tokenbus_services.redaction.redactor import RedactedStream
from tokenbus_services.settings import LimitSettings, RetrySettings

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


async def relay_response(
    response: httpx.Response,
    content: AsyncGenerator[bytes],
    endpoint: Endpoint,
    request: Generate,
    *,
    writer: AttemptWriter,
    silence: CallTimeouts,
    options: CallOptions,
) -> None:
    """Write the head of the response, then each read of its body, without secrets and large images.

    Raises AttemptRefused, BodyRefused, httpx.TransportError.
    """
    redact, tally, job = endpoint.redact, options.tally, options.job
    opened, offloader = _opened(response, endpoint, request, silence=silence, options=options)
    if job is None or not job.opened:
        await _write(writer, opened, silence)
        if tally:
            tally.open(opened)
    if job:
        job.answered(moved=opened.images.moved, status=response.status_code)
    events = job.events if job else request.stream
    marks = endpoint.api.urgent
    clean = RedactedEvents(redact) if response.status_code < 300 else redact.stream()
    last = LastEvent(endpoint.api.last if events and response.status_code < 300 else ())

    async def pass_on(data: bytes, *, urgent: bool, whole: bool = False) -> None:
        if job and job.opened and not whole and not (data := job.feed(data)):
            return
        if tally:
            tally.feed(data)
        await _write(writer, Data(data), silence, urgent=urgent, job=job)
        if last.feed(data):
            silence.allow_closing()

    async def forward(data: bytes, *, urgent: bool) -> None:
        if offloader and not offloader.passes(data):
            async with aclosing(offloader.feed(data)) as parts:
                async for part in parts:
                    await pass_on(part, urgent=urgent)
        elif data:
            await pass_on(data, urgent=urgent)

    progress = AnswerProgress(events=events and response.status_code < 300)
    first = True
    after_boundary = False
    alive = beater()
    with _reached_end(clean, offloader, writer, job):
        async for read in content:
            alive()
            brings = progress.feed(read, wanted=silence.wants_progress)
            data = clean.feed(read)
            boundary = first or any(mark in data for mark in marks)
            if first:
                first = False
                _answers(endpoint, request, silence, options, whole=response.status_code < 300)
            else:
                silence.received(progress=brings)
            # Data after a boundary may be a block's first chunk, and readers are waiting for it.
            await forward(data, urgent=boundary or after_boundary)
            after_boundary = boundary
        await forward(clean.end(), urgent=True)
        if job and job.opened and ((rest := job.end()) or job.has_news):
            await pass_on(rest, urgent=True, whole=True)
    if tally:
        tally.end()


def _answers(
    endpoint: Endpoint, request: Generate, silence: CallTimeouts, options: CallOptions, *, whole: bool
) -> None:
    """The answer's first byte came. ``whole``: it is no error."""
    silence.stop_report()
    if options.silent and whole:
        options.silent.answered(endpoint.name, request.model)
    seconds = endpoint.settings.idle_timeout_s
    silence.allow(seconds, "idle_timeout", f"the stream was silent for {seconds:g} s", answers=True)


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
    images = endpoint.api.images_asked(request)
    offloader = None
    if options.images and endpoint.api.image_keys and not images.inline and response.status_code < 300:
        secret = options.job.job.moved if options.job else ""
        offloader = ImageOffloader(endpoint.api.image_keys, options.images, silence.paused, secret)
        images = msgspec.structs.replace(images, moved=offloader.secret)
    opened = Opened(
        api=endpoint.settings.api,
        status=response.status_code,
        headers=headers,
        stream=request.stream,
        quirks=endpoint.quirks_of(request),
        images=images,
        provider=endpoint.name,
        called_ms=options.called_ms,
        traceparent=request.traceparent or "",
        steers=options.steered is not None and response.status_code < 300,
    )
    return opened, offloader


@contextmanager
def _reached_end(
    clean: RedactedEvents | RedactedStream,
    offloader: ImageOffloader | None,
    writer: AttemptWriter,
    job: RunningJob | None,
) -> Generator[None]:
    """If the answer breaks off, pass on what was held back as the possible beginning of a secret."""
    try:
        yield
    except (httpx.TransportError, BodyRefused, asyncio.CancelledError):
        rest = clean.end()
        if rest and writer.why_refused is None and (offloader is None or offloader.passes(rest)):
            if job is None or not job.opened:
                writer.write_item(Data(rest))
            elif rest := job.feed(rest):
                writer.write_item(Data(rest), job=job.mark())
        raise
    finally:
        if offloader:
            offloader.close()


async def _write(
    writer: AttemptWriter,
    item: Opened | Data,
    silence: CallTimeouts,
    *,
    urgent: bool = False,
    job: RunningJob | None = None,
) -> None:
    """Write an item. While there is no room for more, nothing is read, so the silence timeout is suspended."""
    if job and (mark := job.mark()):
        writer.write_item(item, urgent=urgent, job=mark)
    else:
        writer.write_item(item, urgent=urgent)
    if writer.must_wait:
        with silence.paused():
            await writer.room()


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Data for a call in addition to its request."""

    tally: TokenTally | None = None
    """Receives the answer, to count tokens for the limits."""
    images: ImageStore | None = None
    """Where the answer's images are stored."""
    answer_bytes: int = LimitSettings().answer_bytes
    """Maximum size of the decoded answer."""
    again: bool = False
    """Whether the caller repeats the call after `CredentialsRejected`."""
    called_ms: int = 0
    """Unix time of the call, for those who measure it."""
    facts: CallFacts | None = None
    """Notes about the call, for its span."""
    job: RunningJob | None = None
    """The job in the background that the call starts, or that runs."""
    retry: RetrySettings = RetrySettings()
    """How often a job's broken answer is read on."""
    now_ms: Callable[[], int] = int
    """The workers' clock."""
    silent: SilentCalls | None = None
    """Counts the call while it has no byte of an answer, from `provider_call.SILENT_S` on."""
    steered: SteeredCall | None = None
    """Sends the call over a WebSocket, and steers its answer; None: the call goes over HTTP."""


PLAIN = CallOptions()


_HEAD = 64
"""How many bytes at the start of a line to check: more than any mark plus its whitespace."""
_LINE_END = re.compile(rb"[\r\n]")


def _words(mark: bytes) -> bytes:
    """The longest part of a mark that contains no whitespace: a cheap test before splitting lines."""
    return max(re.split(rb"[\"{}:]", mark), key=len)


class LastEvent:
    """Detects the last event of a stream without decoding it. ``marks``: prefixes of its line, without whitespace.

    A server-sent-event line that begins with ``data:`` is always data, and JSON contains no raw line ends. So if the
    provider writes the event type first, the beginning of the line identifies it. Text content cannot produce such a
    line. An event written in another layout is missed; that costs a reusable connection but no content.
    """

    def __init__(self, marks: tuple[bytes, ...]) -> None:
        self.seen = False
        """The last event is complete; nothing meaningful follows."""
        self._marks = marks
        self._words = tuple({_words(mark) for mark in marks})
        self._head = b""
        """The beginning of the incomplete line."""

    def feed(self, data: bytes) -> bool:
        """Add bytes. Return True once the last event is complete."""
        if self.seen or not self._marks:
            return self.seen
        text = self._head + data if self._head else data
        for word in self._words:  # most reads contain none, so this test is their whole cost
            if word in text:
                *lines, rest = _LINE_END.split(text)
                self.seen = any(self._is_last(line) for line in lines)
                self._head = rest[:_HEAD]
                return self.seen
        if text.endswith(b"\n"):
            self._head = b""
        else:
            start = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            self._head = text[start : start + _HEAD]
        return False

    def _is_last(self, line: bytes) -> bool:
        return line[:_HEAD].translate(None, b" \t").startswith(self._marks)
