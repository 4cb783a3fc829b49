"""A job in the background of a provider: started once, read until it ends, and cancelled if nobody reads it any more.

A call that breaks ends no job. So its attempt goes on: this fetcher reads the rest of the stream, or looks at the job
until it has ended. If the fetcher stops or dies, the next one that gets the item does so in the same attempt
(`take_job`), because the run's hash says with each frame how far the job was read. A later attempt of the turn reads
the same job from its beginning.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any

import msgspec
import structlog

from tokenbus.bus import process_clock
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import wait_briefly
from tokenbus.bus.run_record import ATTEMPT, CLOSED, JOB, STATUS, status_of
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.errors import RequestError, SettingsError
from tokenbus.events.error_info import ErrorInfo, stream_cut
from tokenbus.events.frames import ProviderJob, encode, job_decoder
from tokenbus.providers.api import HttpCall, JobApi
from tokenbus.providers.response.sse import MAX_IMAGE_EVENT_BYTES
from tokenbus_services.endpoints.endpoint import Endpoint, Providers
from tokenbus_services.endpoints.response_body import BodyRefused
from tokenbus_services.settings import RetrySettings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

LOOK_S = 0.5
LONGEST_LOOK_S = 10.0
"""Wait before the first look at a job, and the longest one: each is twice the one before."""
MOST_TAKEN = 3
"""A job that was taken this often without progress may be what kills its fetchers: its attempt ends as lost."""
CANCEL_S = 5.0
"""How long one call that cancels a job may take."""
CANCEL_TRIES = 3
DECISION_S = 1.0
DECISIONS = 30
"""How often, and how many times, a fetcher looks what became of a run whose attempt it left with a job."""

_EVENT_END = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
_LINE_END = re.compile(rb"\r\n|\r|\n")
_MISUSED = ("invalid_request", "not_found")


class RunningJob:
    """One job, as one attempt reads it: which call comes next, and the whole events of its answers, each once."""

    def __init__(self, api: JobApi, job: ProviderJob, *, opened: bool = False) -> None:
        """``job``: without an id until the answer names it. ``opened``: the attempt has the head of an answer."""
        self.api = api
        self.job = job
        self.opened = opened
        self.taken = opened
        """Another fetcher read the first part of the answer."""
        self.events = job.stream
        """Whether the present answer is a stream; else it is the whole response."""
        self._failed = False
        self._buffer = bytearray()
        self._told = job

    @property
    def known(self) -> bool:
        return bool(self.job.id)

    @property
    def running(self) -> bool:
        """Whether there is more to read of it."""
        return self.known and not self.job.over and not self._failed

    def answered(self, *, status: int, moved: str) -> None:
        """The head of an answer came. ``moved``: see `ProviderJob`."""
        if status < HTTPStatus.MULTIPLE_CHOICES:
            self.opened = True
            self.job = msgspec.structs.replace(self.job, moved=self.job.moved or moved)

    def next_call(self, *, look: bool) -> HttpCall:
        """The call that reads on; its answer goes to `feed`. ``look``: as the whole response."""
        self._buffer.clear()
        self.events = not look
        return self.api.look(self.job.id) if look else self.api.resume(self.job.id, self.job.after)

    def feed(self, data: bytes) -> bytes:
        """Add a part of the answer. Returns the whole events in it that are new; nothing of a whole response. Raises
        BodyRefused.
        """
        self._buffer += data
        if len(self._buffer) > MAX_IMAGE_EVENT_BYTES:
            message = f"an event of the job, or its answer, has over {MAX_IMAGE_EVENT_BYTES} bytes"
            raise BodyRefused(ErrorInfo(code="answer_too_large", kind="limit", message=message))
        if not self.events:
            return b""
        new, at = bytearray(), 0
        for end in _EVENT_END.finditer(self._buffer):
            event = bytes(self._buffer[at : end.end()])
            at = end.end()
            if self._take(b"\n".join(_data_of(event))):
                new += event
        del self._buffer[:at]
        return bytes(new)

    def end(self) -> bytes:
        """The answer is complete: return the rest of it. Of a job that is not over, the response says only that."""
        data = bytes(self._buffer)
        self._buffer.clear()
        if self.events:
            data = b"\n".join(_data_of(data))
            return b"data: %b\n\n" % data if self.api.read(data).number >= 0 and self._take(data) else b""
        self._take(data)
        if not self.job.over:
            return b""
        return self.api.last_event(data) if self.job.stream else data

    @property
    def has_news(self) -> bool:
        """Whether the run's hash does not have all that is known of the job."""
        return self.known and self.job != self._told

    def mark(self) -> bytes:
        """The job for the run's hash, behind what was read of it; empty if that is known there."""
        if not self.has_news:
            return b""
        self._told = self.job
        return encode(self.job)

    def lose(self) -> None:
        """The provider does not have it, so that a later attempt starts another."""
        self.job = msgspec.structs.replace(self.job, over=True)

    def _take(self, data: bytes) -> bool:
        """Note what the data say of the job. Returns whether they are new."""
        seen = self.api.read(data)
        if 0 <= seen.number <= self.job.after:
            return False
        job = self.job
        self._failed = self._failed or seen.failed
        self.job = msgspec.structs.replace(
            job, id=job.id or seen.id, after=max(job.after, seen.number), over=job.over or seen.over
        )
        return True


def _data_of(event: bytes) -> list[bytes]:
    return [line[5:].strip() for line in _LINE_END.split(event) if line.startswith(b"data:")]


class Readings:
    """When to read on after the call before, and when to give up: as often, and as soon, as `retry` says."""

    def __init__(self, job: RunningJob, retry: RetrySettings) -> None:
        self._job = job
        self._retry = retry
        self._looks = self._failures = 0
        self._streams = job.job.stream and job.api.resumes
        self._look = not self._streams
        self.wait_s = 0.0
        """Before the next call."""

    def next_call(self) -> HttpCall:
        return self._job.next_call(look=self._look)

    def after(self, error: ErrorInfo | None, *, read: int) -> ErrorInfo | None:
        """Take note of how a call ended, and which event was the last before it. Returns the error that ends the
        attempt; None: read on.
        """
        looked, self._look = self._look, not self._streams
        if error is not None and error.kind in _MISUSED and not looked:
            self._streams, self._look = False, True  # it cannot be streamed (any more)
            return None
        if error is not None and error.status == HTTPStatus.NOT_FOUND:
            self._job.lose()
        if error is not None and error.code != "call_timeout" and not error.retryable:
            return error
        if error is not None and error.kind == "timeout":
            self._look = True  # silent, or gone?
        if self._job.job.after > read or (looked and error is None):
            self._failures = 0
        else:
            self._failures += 1
            if self._failures >= self._retry.max_attempts:
                return error or stream_cut("the stream ended before the job")
        if looked and error is None:
            self.wait_s = min(LOOK_S * 2 ** min(self._looks, 16), LONGEST_LOOK_S)
            self._looks += 1
        else:
            wait_s = self._retry.base_delay_s * 2 ** max(0, self._failures - 1) if self._failures else 0.0
            self.wait_s = max(min(wait_s, self._retry.max_delay_s), (error and error.retry_after_s) or 0.0)
        return None


class LeftJobs:
    """Cancels jobs that no attempt will read any more. Each cancellation ends within a bound."""

    def __init__(self, server: Server, keys: Keys, providers: Providers) -> None:
        self._server = server
        self._keys = keys
        self._providers = providers
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    def left(self, run: str, job: ProviderJob) -> None:
        """An attempt does not read its job any more: cancel it, unless it goes on elsewhere."""
        self._start(self._settle(run, job))

    def drop(self, run: str, job: ProviderJob) -> None:
        """The run does not need the job."""
        self._start(self._cancel(run, job))

    async def look(self, run: str) -> None:
        """Cancel the job of a run that is over."""
        if not (found := await self._state(run))[0] and (job := found[2]) and not job.over:
            await self._cancel(run, job)

    async def job_of(self, run: str, attempt: int) -> ProviderJob | None:
        """The job that this attempt, which is open, has begun to read."""
        is_open, closed, job = await self._state(run, attempt)
        return job if is_open and not closed and job and job.attempt == attempt else None

    async def close(self) -> None:
        """Look once more at each run, and end."""
        self._closing.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CANCEL_S)
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work, name="left job")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, run: str, job: ProviderJob) -> None:
        for _ in range(DECISIONS):
            is_open, closed, present = await self._state(run, job.attempt)
            if not is_open or present is None or present.id != job.id:
                await self._cancel(run, job)
                return
            if not closed or self._closing.is_set():
                return  # another fetcher has it, or will get the next attempt
            await wait_briefly(self._closing, timeout_s=DECISION_S)

    async def _state(self, run: str, attempt: int = 0) -> tuple[bool, bool, ProviderJob | None]:
        """Whether the run is open, whether this attempt is its newest and over, and its job."""
        fields = [STATUS, ATTEMPT, CLOSED, JOB]
        found: list[bytes | None] = await retry_until_available(
            self._server, lambda: self._server.client.hmget(self._keys.run(run), fields), what="job of a run"
        )
        status, newest, closed, job = found
        this = b"%d" % attempt
        over = newest == this and closed == this
        return status_of(status) == "open", over, job_decoder.decode(job) if job else None

    async def _cancel(self, run: str, job: ProviderJob) -> None:
        problem = "no answer"
        try:
            endpoint = self._providers.get(job.provider)
            if endpoint.api.jobs is None:
                return
            call = endpoint.job_call(endpoint.api.jobs.cancel(job.id), job.model)
            for _ in range(CANCEL_TRIES):
                try:
                    async with process_clock.timeout(CANCEL_S):
                        if (status := await _status(endpoint, call)) < HTTPStatus.INTERNAL_SERVER_ERROR:
                            log.info("job_cancelled", run=run, provider=job.provider, job=job.id, status=status)
                            return
                    problem = f"HTTP {status}"
                except Exception as e:  # the network, credentials: any may be of a moment
                    problem = f"{type(e).__name__}: {endpoint.redact(str(e))}"
                await asyncio.sleep(LOOK_S)
        except (RequestError, SettingsError) as e:
            problem = str(e)
        log.warning("job_not_cancelled", run=run, provider=job.provider, job=job.id, problem=problem)


async def _status(endpoint: Endpoint, call: HttpCall) -> int:
    response = await endpoint.send(endpoint.request(call))
    await response.aclose()
    return response.status_code
