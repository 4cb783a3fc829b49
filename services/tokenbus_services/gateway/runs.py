"""The runs behind the answers: publish one, join one by its `Idempotency-Key`, cancel one whose client has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import structlog

from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import locate
from tokenbus.bus.run_record import ENDED, REQUEST, read_status
from tokenbus.bus.server.server import Server, translated
from tokenbus.client.decode import public_event
from tokenbus.client.deployment import Deployment
from tokenbus.client.publishing.new_run_id import new_run_id
from tokenbus.core.request.tenant import tenant_of
from tokenbus.core.request.traceparent import is_traceparent
from tokenbus.errors import RunNotFound, RunNotRepeatable, ServerError
from tokenbus.events.public import PublicEvent, Started
from tokenbus.events.requests import Generate
from tokenbus_services.gateway import idempotency
from tokenbus_services.gateway.callers import AccessControl, Admitted, Caller
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.request_spans import RequestSpan, RequestSpans
from tokenbus_services.gateway.surfaces.contract import NOTE, GatewayNote, GatewayRequest, Surface, Translated
from tokenbus_services.settings import GatewaySettings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

GONE = "client_disconnected"
"""Reason of a cancel because the client has disconnected."""
CANCEL_TRIES, CANCEL_PAUSE_S = 20, 0.5
MAX_RETRIES_OF_A_KEY = 16
"""Runs in a row under one Idempotency-Key."""
JOINS_KEPT_S = 3600
READ_COUNT = 1000


class GatewayRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a request has published or joined."""

    id: str
    note: GatewayNote
    caller: Caller
    admission: Admitted
    joined: bool = False
    """It was not new, so it may be of another body, tenant or surface; see `note_for`."""
    span: RequestSpan | None = None
    ticket: int | None = None
    """Number of this reader among those of an Idempotency-Key. Only the newest one cancels."""

    def note_for(self, first: PublicEvent) -> GatewayNote:
        """The note of the run, given its first event. Raises Refusal if the run is not one of this request."""
        if not isinstance(first, Started):
            return self.note
        found = note_in(first.metadata)
        if not self.joined:
            return found or self.note
        if not self.caller.owns(tenant_of(first.metadata)):
            raise not_found(self.id)
        if found is None or found.surface != self.note.surface:
            raise _conflict(self.id, "this run belongs to another kind of request")
        if self.note.body is not None and found.body != self.note.body:
            raise idempotency.mismatch(self.id)
        if found.version != self.note.version:
            raise _conflict(self.id, "this run began under another version of the gateway: read it from its beginning")
        return found


class GatewayRuns:
    """The bus, as the surfaces use it. Call `open` first and `close` last."""

    def __init__(
        self, settings: GatewaySettings, *, bus: Client, server: Server, keys: Keys, spans: RequestSpans | None = None
    ) -> None:
        self.bus = bus
        self._spans = spans
        self._settings = settings
        self.server = server
        self.keys = keys
        self.deployment = Deployment(server, keys.prefix, keys.partitions)
        """For lists of runs. Shares the server's connections, and is never closed."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    async def close(self) -> None:
        """Send the cancels that are due."""
        self._closing.set()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def publish(
        self, access: AccessControl, caller: Caller, surface: Surface, request: GatewayRequest, translated: Translated
    ) -> GatewayRun:
        """Publish a translated request, or join the run that it names. Raises Refusal, TokenbusError."""
        key = request.headers.get(idempotency.HEADER)
        run = idempotency.run_of(caller.tenant, key, surface.name) if key is not None else translated.run
        if translated.run is not None and key is None:
            await self._check_owner(translated.run, caller)
        note = GatewayNote(
            surface=surface.name,
            version=surface.version,
            created=int(time.time()),
            model=translated.model,
            key=caller.key,
            body=idempotency.hash_of(request.body) if key is not None else None,
            echo=translated.echo,
        )
        generate = self._with_note(translated, run or new_run_id(), caller, note)
        traceparent = request.headers.get("traceparent", "")
        if generate.traceparent is None and is_traceparent(traceparent):
            generate = msgspec.structs.replace(generate, traceparent=traceparent)
        span = None
        if self._spans and generate.id:
            span = self._spans.begin(generate.id, generate.traceparent)
            generate = msgspec.structs.replace(generate, traceparent=span.traceparent)
        admission = await access.admit(caller, surface.name, generate)
        generate = admission.generate
        assert generate.id
        try:
            ticket = await self._ticket(generate.id) if key is not None else None
            name = await self._published(generate, may_exist=run is not None)
        except BaseException:
            await access.leave(caller, generate.id)
            raise
        return GatewayRun(
            id=name, note=note, caller=caller, admission=admission, joined=run is not None, span=span, ticket=ticket
        )

    def follow(self, run: str, *, after: int = -1, new: bool = False) -> AsyncGenerator[PublicEvent]:
        """See `Client.follow`."""
        return self.bus.follow(run, after=after, new=new)

    async def owned(self, run: str, caller: Caller) -> GatewayNote | None:
        """The note of a run that the caller may see; None if it was published by another service.

        Raises Refusal (404) for another tenant's run exactly as for one that does not exist, and ServerUnavailable.
        """
        keys = self.keys
        with translated(self.server):
            await locate(self.server, keys, run)
            first: list[Any] = await self.server.client.xrange(keys.log(run), count=1)
        event = public_event(run, first[0]) if first else None
        if isinstance(event, Started):
            metadata = event.metadata
        else:  # not accepted yet, refused, or the log's beginning is trimmed
            with translated(self.server):
                stored: bytes | None = await self.server.client.hget(keys.run(run), REQUEST)
            metadata = msgspec.json.decode(stored, type=_Stored).metadata if stored else None
            if stored is None and not (caller.operator and event is not None):
                raise not_found(run)
        if not caller.owns(tenant_of(metadata)):
            raise not_found(run)
        return note_in(metadata)

    async def _check_owner(self, run: str, caller: Caller) -> None:
        """Raise Refusal (404) if a run with the id that the client chose is another tenant's."""
        with translated(self.server):
            await locate(self.server, self.keys, run)
            exists = await self.server.client.exists(self.keys.run(run), self.keys.log(run))
        if exists:
            await self.owned(run, caller)

    async def stored(self, run: str) -> list[PublicEvent]:
        """The events that the run has now, from seq 0."""
        with translated(self.server):
            await locate(self.server, self.keys, run)
        log_key, events, position = self.keys.log(run), list[PublicEvent](), "-"
        while True:
            with translated(self.server):
                entries: list[Any] = await self.server.client.xrange(log_key, min=position, count=READ_COUNT)
            events += [public_event(log_key, entry) for entry in entries]
            if len(entries) < READ_COUNT:
                return sorted(events, key=lambda event: event.seq)
            position = f"({entries[-1][0].decode()}"

    async def last_event(self, run: str) -> PublicEvent | None:
        """The newest event of the run; None if there is none yet."""
        with translated(self.server):
            await locate(self.server, self.keys, run)
            log_key = self.keys.log(run)
            last: list[Any] = await self.server.client.xrevrange(log_key, count=1)
        return public_event(log_key, last[0]) if last else None

    async def names_blob(self, run: str, blob_id: str) -> bool:
        """Whether one of the run's events names this blob."""
        name = msgspec.json.encode(blob_id)
        return any(name in msgspec.json.encode(event) for event in await self.stored(run))

    def client_gone(self, opened: GatewayRun) -> None:
        """Cancel a run whose client disconnected, in a separate task, because the request's task is ending."""
        self._later(opened.id, self._cancel_left(opened))

    def cancel_later(self, run: str, reason: str) -> None:
        """Cancel in a separate task, which outlives the request that asks for it."""
        self._later(run, self.cancel(run, reason))

    def leave(self, access: AccessControl, opened: GatewayRun) -> None:
        """Report to access control that an answer has ended."""
        self._later(opened.id, access.leave(opened.caller, opened.admission.generate.id or opened.id))

    async def cancel(self, run: str, reason: str) -> None:
        """Cancel, also if the server is unavailable for some seconds. Raises ServerError after that."""
        for n in range(CANCEL_TRIES):
            try:
                await self.bus.cancel(run, reason)
                return
            except ServerError:
                if n == CANCEL_TRIES - 1 or self._closing.is_set():
                    raise
                await asyncio.sleep(CANCEL_PAUSE_S)

    # ----------------------------------------------------------------------------------------------------------

    def _with_note(self, translated: Translated, run: str, caller: Caller, note: GatewayNote) -> Generate:
        metadata = {k: v for k, v in (translated.generate.metadata or {}).items() if k not in (NOTE, "tenant")}
        if caller.tenant:
            metadata["tenant"] = caller.tenant
        metadata[NOTE] = msgspec.to_builtins(note)
        deadline = translated.generate.deadline_s
        if deadline is None and not translated.background:
            deadline = self._settings.deadline_s
        return msgspec.structs.replace(translated.generate, id=run, metadata=metadata, deadline_s=deadline)

    async def _published(self, generate: Generate, *, may_exist: bool) -> str:
        """Publish the request unless its run exists. If it ended with an error that may pass, use a retry of it."""
        assert generate.id
        run = generate.id
        for _ in range(MAX_RETRIES_OF_A_KEY if may_exist else 0):
            keys = self.keys
            with translated(self.server):
                await locate(self.server, keys, run)
                status = await read_status(self.server.client, keys.run(run))
                if status not in ENDED:
                    break
                last: list[Any] = await self.server.client.xrevrange(keys.log(run), count=1)
            if not last or not idempotency.may_be_retried(public_event(run, last[0])):
                return run
            try:
                run = (await self.bus.retry(run)).id
            except (RunNotFound, RunNotRepeatable):
                return run  # not repeatable: the client gets the end that the run had
        if run == generate.id:
            await self.bus.publish(generate)
        return run

    async def _ticket(self, run: str) -> int:
        key = self._joins(run)
        with translated(self.server):
            number = int(await self.server.client.incr(key))
            await self.server.client.expire(key, JOINS_KEPT_S)
        return number

    async def _cancel_left(self, opened: GatewayRun) -> None:
        if opened.ticket is not None:
            try:
                async with asyncio.timeout(self._settings.rejoin_s):
                    await self._closing.wait()
            except TimeoutError:
                pass
            assert opened.admission.generate.id
            with translated(self.server):
                newest = await self.server.client.get(self._joins(opened.admission.generate.id))
            if newest is not None and int(newest) != opened.ticket:
                return  # a retry has joined the run
        await self.cancel(opened.id, GONE)

    def _joins(self, run: str) -> str:
        return f"{self.keys.prefix}:{{gateway}}:joins:{run}"

    def _later(self, run: str, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=run)
        self._leaving.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.warning("run_cancel_failed", run=task.get_name(), error=f"{type(error).__name__}: {error}")


class _Stored(msgspec.Struct):
    metadata: dict[str, object] | None = None


def note_in(metadata: dict[str, object] | None) -> GatewayNote | None:
    """The gateway's note in a run's metadata."""
    found = (metadata or {}).get(NOTE)
    try:
        return msgspec.convert(found, GatewayNote) if found is not None else None
    except msgspec.ValidationError:
        return None


def not_found(run: str) -> Refusal:
    """No such run, or not one of this caller."""
    return Refusal(
        Problem(status=404, code="run_not_found", message="no such run", kind="not_found", param="run", run=run)
    )


def _conflict(run: str, why: str) -> Refusal:
    return Refusal(Problem(status=409, code="run_conflict", message=why, kind="invalid_request", run=run))
