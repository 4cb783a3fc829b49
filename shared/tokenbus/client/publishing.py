"""Publishes requests: the run's id, the encoded request after the same checks as at intake, and the queue of sends."""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from time import time_ns
from typing import Any, Protocol, cast
from uuid import UUID

import msgspec

from tokenbus.bus.scripts import Arg
from tokenbus.bus.scripts.requests import publish
from tokenbus.bus.server.run_scripts import JOINED_BYTES, run_script
from tokenbus.bus.server.server import Server, translated
from tokenbus.core.request.bounds import RANDOM_BITS, tenant_of, uuid7
from tokenbus.core.request.parse import request_from, too_deep
from tokenbus.errors import PublishQueueFull, RequestError, RequestInvalid, RequestTooLarge, ServerError, ServerFull
from tokenbus.events.requests import Append, Cancel, DurabilityLevel, Generate, RunId, WaitDecision

_NOT_PLAIN = (bytes, bytearray, memoryview, datetime, date, time, timedelta, UUID, Decimal)
"""Types that msgspec would encode in its own form. They are passed through, so that the check reports them."""


def with_id(
    request: Generate | Mapping[str, object], new_id: Callable[[], str]
) -> tuple[str, Generate | Mapping[str, object]]:
    """Return the run id, a new one if the request has none, and the request with it. Raises RequestInvalid."""
    if isinstance(request, Generate):
        run = request.id or new_id()
        return run, msgspec.structs.replace(request, id=run)
    if not isinstance(cast("object", request), Mapping):  # from a program that no type checker read
        raise RequestInvalid("$", f"Expected `Generate` or a mapping, got `{type(request).__name__}`")
    if request.get("type") == "cancel":
        raise RequestInvalid("type", "a cancel is sent with Client.cancel")
    given = request.get("id")
    run = new_id() if given is None else given
    if not isinstance(run, str):
        raise RequestInvalid("id", f"Expected `str`, got `{type(run).__name__}`")
    return run, {"type": "generate", **request, "id": run}


def with_trace_context(
    request: Generate | Mapping[str, object],
) -> Generate | Mapping[str, object]:
    """Add the current OpenTelemetry span as the run's parent, if there is one and the request names none.

    Nothing is imported for it: a program that has a span has imported the package.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return request
    context: Any = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return request
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 1:02x}"
    if isinstance(request, Generate):
        return request if request.traceparent else msgspec.structs.replace(request, traceparent=traceparent)
    return {"traceparent": traceparent, **request}


def encoded(request: Generate | Cancel | Append | WaitDecision | Mapping[str, object], *, limit: int) -> bytes:
    """Encode the request as JSON. Raises RequestInvalid if intake would refuse it, RequestTooLarge if it exceeds
    ``limit`` bytes.
    """
    try:
        value = msgspec.to_builtins(request, builtin_types=_NOT_PLAIN)
    except RecursionError:
        raise too_deep() from None
    except TypeError as e:
        raise RequestInvalid("$", str(e)) from None
    request_from(value)
    data = msgspec.json.encode(value)
    if len(data) > limit:
        raise RequestTooLarge(len(data), limit)
    return data


def durability_in(request: Generate | Mapping[str, object]) -> DurabilityLevel | None:
    """Return what a request that `encoded` accepted says of it."""
    named = request.durability if isinstance(request, Generate) else request.get("durability")
    return cast("DurabilityLevel | None", named)


def tenant_in(request: Generate | Mapping[str, object]) -> str:
    """Return the tenant of a request that `encoded` accepted; empty if it has none."""
    metadata = request.metadata if isinstance(request, Generate) else request.get("metadata")
    return tenant_of(cast("Mapping[str, object] | None", metadata))


@contextmanager
def carrying(request: Generate | Append | Mapping[str, object]) -> Generator[None]:
    """Attach the request to errors raised in this block, so that the caller can publish the same request again."""
    try:
        yield
    except (RequestError, ServerError) as e:
        e.request = request
        raise


class RunIds:
    """Generates UUIDv7 ids, each greater than the one before it, even if the clock stands still or is set back.

    Method 2 of RFC 9562 section 6.2: within one millisecond the random part increases by a random step. Thread-safe.
    """

    def __init__(self, now_ms: Callable[[], int] = lambda: time_ns() // 1_000_000) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._ms = -1
        self._rest = 0

    def __call__(self) -> str:
        with self._lock:
            now = self._now_ms()
            if now > self._ms:
                # The top bit stays clear, so that the steps within one millisecond cannot overflow.
                self._ms, self._rest = now, secrets.randbits(RANDOM_BITS - 1)
            else:
                self._rest += 1 + secrets.randbits(32)
            return uuid7(self._ms, self._rest)


new_run_id = RunIds()


COMMANDS = 4
"""Maximum concurrent commands, and so connections. More of them did not make a busy server faster."""
ENTRIES = 256
"""Maximum entries per command, and maximum requests prepared at once: preparing thousands in one pass of the event loop
would starve its connections.
"""


class _Entry(msgspec.Struct, eq=False):
    data: bytes
    tenant: str
    most: int
    durable: bool
    taken: asyncio.Future[None]


class PublishQueue:
    """Appends entries in the order they are put. Call `close` at the end."""

    def __init__(self, server: Server, *, most_queued: int) -> None:
        """``most_queued``: entries in flight before a caller with ``wait=False`` is refused."""
        self._server = server
        self._most_queued = most_queued
        self._in_flight = 0
        self._room = asyncio.Semaphore(ENTRIES)
        self._queue: deque[_Entry] = deque()
        self._sending: set[asyncio.Task[None]] = set()
        self._stream = ""
        self._closed = False

    @asynccontextmanager
    async def turn(self, *, wait: bool) -> AsyncGenerator[None]:
        """Reserve a slot while one entry is prepared and put. Raises PublishQueueFull if waiting is not allowed and the
        queue is full.
        """
        if not wait and self._in_flight >= self._most_queued:
            raise PublishQueueFull(self._in_flight)
        self._in_flight += 1
        try:
            async with self._room:
                yield
        finally:
            self._in_flight -= 1

    async def put(
        self, stream: str, data: bytes, *, tenant: str = "", most: int, first: bool = False, durable: bool = False
    ) -> None:
        """Append one entry if the stream holds fewer than ``most``. ``first``: put it ahead of the entries queued here.
        ``durable``: return once it is where the server's `Durability` says.

        Each entry is sent once: after ServerUnavailable it may or may not have been stored. Raises ServerUnavailable,
        and WriteNotReplicated, which is one; ServerFull; RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError("the client is closed")
        self._stream = stream
        entry = _Entry(data, tenant, most, durable, asyncio.get_running_loop().create_future())
        if first:
            self._queue.appendleft(entry)
        else:
            self._queue.append(entry)
        if len(self._sending) < COMMANDS:
            task = asyncio.create_task(self._send_all(), name="publishing")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        with translated(self._server, stream):  # here, because each caller needs its own error
            await entry.taken

    async def close(self) -> None:
        """Finish what is in flight; entries still queued fail with RuntimeError."""
        self._closed = True
        while self._queue:
            entry = self._queue.popleft()
            if not entry.taken.done():
                entry.taken.set_exception(RuntimeError("the client is closed"))
        await asyncio.gather(*self._sending)

    async def _send_all(self) -> None:
        while batch := self._batch():
            try:
                self._pass_on(batch, await self._send(batch))
            except asyncio.CancelledError:  # `close` is cancelled: no caller may wait for an answer any more
                self._fail(batch, RuntimeError("the client is closed"))
                raise
            except Exception as e:
                self._fail(batch, e)

    def _pass_on(self, batch: Sequence[_Entry], replies: Sequence[Any]) -> None:
        for entry, reply in zip(batch, replies, strict=True):
            if entry.taken.done():
                continue
            if reply is None:
                full = ServerFull(self._stream, f"{entry.most} requests wait to be taken in")
                entry.taken.set_exception(full)
            else:
                entry.taken.set_result(None)

    @staticmethod
    def _fail(batch: Sequence[_Entry], error: Exception) -> None:
        for entry in batch:
            if not entry.taken.done():
                entry.taken.set_exception(error)

    def _batch(self) -> list[_Entry]:
        """The next batch, without entries whose callers have stopped waiting."""
        batch: list[_Entry] = []
        size = 0
        while self._queue and len(batch) < ENTRIES:
            entry = self._queue[0]
            if batch and (size + len(entry.data) > JOINED_BYTES or entry.durable != batch[0].durable):
                break
            self._queue.popleft()
            if not entry.taken.done():
                batch.append(entry)
                size += len(entry.data)
        return batch

    async def _send(self, batch: list[_Entry]) -> list[Any]:
        args: list[Arg] = []
        for entry in batch:
            args += (entry.most, entry.data, entry.tenant)
        call = publish(self._stream, requests=args)
        return await run_script(self._server, msgspec.structs.replace(call, durable=batch[0].durable))


class AnyRun(Protocol):
    """A handle of a run, of this client or of the synchronous one."""

    @property
    def id(self) -> str:
        """The run's id."""
        ...


def run_id_of(run: AnyRun | str) -> str:
    """The id of a run that a caller names. Raises RequestInvalid."""
    try:
        return msgspec.convert(getattr(run, "id", run), RunId)
    except msgspec.ValidationError as e:
        raise RequestInvalid("run", str(e)) from None
