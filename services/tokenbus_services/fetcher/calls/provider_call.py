"""One provider call: sends the request, writes the whole answer, and handles every way it can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from http import HTTPStatus

import httpx
import structlog

from tokenbus.bus import process_clock
from tokenbus.bus.liveness import slack
from tokenbus.events.error_info import IN_ANSWER, ErrorInfo
from tokenbus.events.frames import Ended
from tokenbus.events.requests import Generate
from tokenbus.providers.api import HttpCall
from tokenbus.providers.file_api import LOST_STATUSES, lost_files
from tokenbus.providers.response.decoder import MAX_ERROR_BODY_BYTES
from tokenbus.providers.response.error_mapping import http_failure
from tokenbus_services.endpoints.endpoint import AuthUnavailable, Endpoint, KeyMissing, KeyUnusable
from tokenbus_services.endpoints.response_body import BodyRefused, beginning, described, read_body
from tokenbus_services.fetcher.calls.background_job import Readings, RunningJob
from tokenbus_services.fetcher.calls.call_timeouts import DEADLINE_PASSED, CallTimeouts
from tokenbus_services.fetcher.calls.response_relay import PLAIN, CallOptions, relay_response
from tokenbus_services.fetcher.calls.steered_call import SteeredCall
from tokenbus_services.fetcher.uploads.upload import AUTH_UNAVAILABLE
from tokenbus_services.fetcher.writing.attempt_writer import AttemptWriter
from tokenbus_services.media.locate import MediaBody, MediaFailed
from tokenbus_services.net.http_client import HeadRefused

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

SILENT_S = 30.0
"""After this time without a byte of the answer's body, the log says so."""


class CredentialsRejected(Exception):
    """The provider rejected the credentials and newer ones are available; nothing was written."""


class FilesLost(Exception):
    """The provider does not have these files that the request names; nothing of the answer was written."""

    def __init__(self, file_ids: tuple[str, ...]) -> None:
        super().__init__(f"{len(file_ids)} files")
        self.file_ids = file_ids


async def fetch(
    endpoint: Endpoint,
    request: Generate,
    call: HttpCall | None,
    body: MediaBody | None = None,
    *,
    writer: AttemptWriter,
    deadline: float | None,
    options: CallOptions = PLAIN,
) -> None:
    """Make the request's call and write its whole answer, including its end.

    - ``call``: None if the request's job in the background is running already.
    - ``body``: replaces the call's own body; closed when it is sent.
    - ``deadline``: in the event loop's time.

    Raises AttemptRefused if the attempt is over; FilesLost before anything is written; CredentialsRejected likewise, if
    the call may be repeated. However this ends, including by cancellation, the connection is closed or back in its
    pool.
    """
    error = (
        await _called(endpoint, request, call, body, writer=writer, deadline=deadline, options=options)
        if call
        else None
    )
    if (job := options.job) and job.running:
        error = await _read_on(endpoint, request, job, error, writer=writer, deadline=deadline, options=options)
    if options.facts:
        options.facts.ended(error)
    if job and (mark := job.mark()):
        await writer.end(Ended(error, options.called_ms), job=mark)
    else:
        await writer.end(Ended(error, options.called_ms))


async def _read_on(
    endpoint: Endpoint,
    request: Generate,
    job: RunningJob,
    error: ErrorInfo | None,
    *,
    writer: AttemptWriter,
    deadline: float | None,
    options: CallOptions,
) -> ErrorInfo | None:
    """Read the rest of a job, call by call. ``error``: how the call before ended."""
    readings = Readings(job, options.retry)
    longest_s = endpoint.settings.job_timeout_s
    loop = asyncio.get_running_loop()
    until = loop.time() + longest_s - (options.now_ms() - job.job.started_ms) / 1000
    if job.opened and not job.taken and (end := readings.after(error, read=-1)):
        return end
    while job.running:
        left_s = min(until, until if deadline is None else deadline) - loop.time()
        with slack(readings.wait_s):
            await asyncio.sleep(max(0.0, min(left_s, readings.wait_s)))
        if left_s <= readings.wait_s:
            if deadline is not None and deadline <= until:
                return DEADLINE_PASSED
            message = f"the job took longer than {longest_s:g} s (`job_timeout_s`)"
            return ErrorInfo(code="job_timeout", kind="timeout", message=message)
        read = job.job.after
        call = endpoint.job_call(readings.next_call(), job.job.model)
        try:
            error = await _called(endpoint, request, call, None, writer=writer, deadline=deadline, options=options)
        except CredentialsRejected:
            error = None  # the next call has new ones
        if end := readings.after(error, read=read) if job.running else error:
            return end
    return None


async def _called(
    endpoint: Endpoint,
    request: Generate,
    call: HttpCall,
    body: MediaBody | None,
    *,
    writer: AttemptWriter,
    deadline: float | None,
    options: CallOptions,
) -> ErrorInfo | None:
    """Make one call, and write its answer. Returns why it ended early."""
    limit = process_clock.timeout(None)
    settings = endpoint.settings
    silence = CallTimeouts(limit, deadline, settings)
    try:
        with slack(settings.connect_timeout_s + settings.first_event_timeout_s + settings.idle_timeout_s):
            async with limit:
                return await _read(endpoint, request, call, body, writer=writer, silence=silence, options=options)
    except TimeoutError:
        return silence.error()
    finally:
        silence.stop_report()


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
    response = await _answer_to(endpoint, call, body, options.steered)
    if isinstance(response, ErrorInfo):
        return response
    if options.facts:
        options.facts.answered(response)
    try:
        refused = None
        if response.status_code == HTTPStatus.UNAUTHORIZED and options.again and endpoint.rejected():
            raise CredentialsRejected
        if options.job and options.job.known and response.status_code >= HTTPStatus.MULTIPLE_CHOICES:
            clean = endpoint.redact.stream()
            refused = clean.feed(await beginning(response, MAX_ERROR_BODY_BYTES)) + clean.end()
            return http_failure(response.status_code, refused, response.headers)
        if call.files and response.status_code in LOST_STATUSES:
            refused = await beginning(response, MAX_ERROR_BODY_BYTES)
            if lost := lost_files(response.status_code, refused, call.files):
                raise FilesLost(lost)
        content = read_body(response, limit=options.answer_bytes) if refused is None else _once(refused)
        async with aclosing(content):
            await relay_response(response, content, endpoint, request, writer=writer, silence=silence, options=options)
    except BodyRefused as e:
        return e.error
    except httpx.TransportError as e:
        return _network(endpoint, e, in_answer=True)
    except OSError as e:  # disk error while spooling an image: another fetcher may have space
        log.error("image_not_held", run=writer.run, provider=endpoint.name, problem=str(e))
        return ErrorInfo(code="disk", kind="internal", message="an image could not be held on disk", retryable=True)
    finally:
        await response.aclose()
    return None


def _report_silence(
    endpoint: Endpoint, request: Generate, writer: AttemptWriter, timeout_s: float, options: CallOptions
) -> Callable[[], object]:
    """Report that the call is silent. Returns a callback that clears the report."""
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


async def _answer_to(
    endpoint: Endpoint, call: HttpCall, body: MediaBody | None, steered: SteeredCall | None
) -> httpx.Response | ErrorInfo:
    """Send the call; return the head of its answer, or why there is none."""
    try:
        return await (steered.send(call) if steered else _send(endpoint, call, body))
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


async def _once(data: bytes) -> AsyncGenerator[bytes]:
    if data:
        yield data


def _network(endpoint: Endpoint, error: httpx.TransportError, *, in_answer: bool = False) -> ErrorInfo:
    """Why no answer came, or why it ended. ``in_answer``: its head had come, so the provider can be reached."""
    if isinstance(error, HeadRefused):
        return ErrorInfo(code="answer_head", kind="protocol", message=f"the head of the answer has {error}")
    failed = "broke in the middle of the answer" if in_answer else "failed"
    return ErrorInfo(
        code="network",
        kind="network",
        message=endpoint.redact(f"the connection to {endpoint.name} {failed}: {described(error)}"),
        retryable=True,
        where=IN_ANSWER if in_answer else None,
    )
