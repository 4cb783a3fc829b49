"""The runs behind the answers, and the one door through which every new run begins.

`GatewayRuns` alone can publish: the bus's client is private to it, and everything that it publishes has passed
`AccessControl.admit`, which bills the caller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, Literal

import msgspec
import structlog

from tokenbus import Client
from tokenbus.bus.dead_letters import StoredDeadLetter
from tokenbus.bus.keys import Keys, SubscribedTopic
from tokenbus.bus.layout import locate
from tokenbus.bus.run_record import ENDED, REQUEST, UNENDED, read_status
from tokenbus.bus.server.server import Server, translated
from tokenbus.client.archive import Archive
from tokenbus.client.decode import public_event
from tokenbus.client.deployment import Deployment
from tokenbus.client.publishing import new_run_id
from tokenbus.client.rerun import How, derived_id, request_again
from tokenbus.client.retry_dead_letter import dead_letter_request
from tokenbus.client.tree_reader import TreeCursor, TreeReader, TreeStep
from tokenbus.core.request.bounds import is_traceparent, tenant_of
from tokenbus.errors import ServerError
from tokenbus.events.public import PublicEvent, Started, blobs_of
from tokenbus.events.requests import MAX_RUN_ID_CHARS, Generate, Message, WhenBusy, is_run_id
from tokenbus.events.topics import TopicEvent
from tokenbus_services.gateway import idempotency
from tokenbus_services.gateway.archived_runs import ArchivedRuns
from tokenbus_services.gateway.audit import Changes
from tokenbus_services.gateway.budgets.holds import new_hold
from tokenbus_services.gateway.callers import AccessControl, Admitted, Caller
from tokenbus_services.gateway.forward.owners import Owners
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.gateway.request_spans import RequestSpan, RequestSpans
from tokenbus_services.gateway.session_door import Said, SessionDoor
from tokenbus_services.gateway.surfaces.contract import (
    NOTE,
    Claim,
    GatewayNote,
    GatewayRequest,
    Translated,
    left_out_header,
)
from tokenbus_services.gateway.surfaces.surface import Surface
from tokenbus_services.gateway.wait_door import WaitDoor
from tokenbus_services.settings import GatewaySettings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

GONE = "client_disconnected"
"""Reason of a cancel because the client has disconnected."""
CANCEL_TRIES, CANCEL_PAUSE_S = 20, 0.5
MAX_RETRIES_OF_A_KEY = 16
"""Runs in a row under one Idempotency-Key."""
SHARES_KEPT_S = 86_400
"""As long as a run may be open by default."""
LOOK_S = 5.0
"""How often a client's gateway looks whether the others that have its run are still there."""
_STAYS = b"stays"
READ_COUNT = 1000


class OwnedRun(msgspec.Struct, frozen=True):
    """A run that its caller may see."""

    id: str
    note: GatewayNote | None
    """None if another service published it."""


class GatewayRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a request has published or joined."""

    id: str
    note: GatewayNote
    caller: Caller
    admission: Admitted
    joined: bool = False
    """It was not new, so it may be of another body, tenant or surface; see `note_for`."""
    span: RequestSpan | None = None
    share: int | None = None
    """This request's number among those that share the run. The last one to leave cancels it."""
    may_cancel: bool = True
    """Whether the run may end with this request's client: not if it began under another request."""
    rejoins: bool = False
    """Its client may come back, under an Idempotency-Key."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of its answer: what the limits of the key leave, and what was left out of the request."""
        return {**self.admission.headers, **left_out_header(self.note.left_out)}

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
        self,
        settings: GatewaySettings,
        *,
        bus: Client,
        server: Server,
        keys: Keys,
        access: AccessControl,
        worker: str,
        spans: RequestSpans | None = None,
        make_archive: Callable[[], Archive],
    ) -> None:
        """``worker``: this gateway's name among the live ones, in `Keys.gateway_members`. ``make_archive``: see
        `Deployment`.
        """
        self._bus = bus
        self._spans = spans
        self._settings = settings
        self._access = access
        self._worker = worker.encode()
        self.server = server
        self.keys = keys
        self.deployment = Deployment(server, keys.prefix, keys.partitions)
        """For lists of runs. Shares the server's connections, and is never closed."""
        self.archived = ArchivedRuns(self.deployment, make_archive)
        self.owners = Owners(server, keys, forward=settings.forward)
        self.changes = Changes(server, keys)
        self.sessions = SessionDoor(bus, access, self.deployment, self.changes, self.owners)
        self.waits = WaitDoor(bus, access, self.deployment, self.changes)
        self._leaving: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    async def close(self) -> None:
        """Send the cancels that are due."""
        self._closing.set()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    # --- every way to begin a run -------------------------------------------------------------------------------

    async def publish(
        self, caller: Caller, surface: Surface, request: GatewayRequest, translated: Translated
    ) -> GatewayRun:
        """Publish a translated request, or join the run that it names. Raises Refusal, TokenbusError."""
        key = request.headers.get(idempotency.HEADER)
        note = GatewayNote(
            surface=surface.name,
            version=surface.version,
            created=int(time.time()),
            model=translated.model,
            key=caller.key,
            body=idempotency.hash_of(request.body) if key is not None else None,
            echo=translated.echo,
            left_out=translated.left_out,
        )
        metadata = {k: v for k, v in (translated.generate.metadata or {}).items() if k not in (NOTE, "tenant")}
        if caller.tenant:
            metadata["tenant"] = caller.tenant
        if key is not None:
            run, failed = await self._newest(idempotency.run_of(caller.tenant, key, surface.name), note)
            metadata |= {"retry_of": failed} if failed else {}
        elif translated.run is not None:
            run = await self._named(translated.run, caller)
        else:
            run = new_run_id()
        deadline = translated.generate.deadline_s
        if deadline is None and not translated.background:
            deadline = self._settings.deadline_s
        traceparent = request.headers.get("traceparent", "")
        if translated.generate.traceparent is not None or not is_traceparent(traceparent):
            traceparent = translated.generate.traceparent
        generate = self._gathered(translated.generate, streamed=translated.stream)
        generate = msgspec.structs.replace(
            generate, id=run, metadata=metadata, deadline_s=deadline, traceparent=traceparent
        )
        stays = translated.background or translated.on_disconnect == "continue"
        return await self._begin(
            caller,
            surface.name,
            generate,
            note,
            may_exist=key is not None or translated.run is not None,
            rejoins=key is not None,
            stays=stays,
            claim=translated.claim,
        )

    async def say(
        self,
        caller: Caller,
        surface: Surface,
        request: GatewayRequest,
        translated: Translated,
        *,
        session: str,
        append: str | None,
        when_busy: WhenBusy,
        rewrites: bool = False,
    ) -> Said:
        """Put what is new of a translated request into a session, whose runs then answer it; see `SessionDoor.say`.

        ``append``: its id; None: that of the request's Idempotency-Key, or a new one. Raises Refusal, TokenbusError.
        """
        if translated.run is not None:
            raise invalid("tokenbus.run", "a conversation gives its runs their ids")
        key = request.headers.get(idempotency.HEADER)
        if append is None:
            append = new_run_id() if key is None else idempotency.run_of(caller.tenant, key, surface.name)
        note = self.note(surface, translated)
        # A session has one configuration, so this does not depend on how each of its messages is answered.
        generate = self._gathered(translated.generate, streamed=True)
        if generate.deadline_s is None:
            generate = msgspec.structs.replace(generate, deadline_s=self._settings.deadline_s)
        return await self.sessions.say(
            caller, session, generate, note, append=append, when_busy=when_busy, rewrites=rewrites
        )

    def _gathered(self, generate: Generate, *, streamed: bool) -> Generate:
        """The request, with how long its chunks may be held back: less if a client reads along."""
        if generate.max_added_ms is not None:
            return generate
        added_ms = self._settings.max_added_ms if streamed else self._settings.background_added_ms
        return msgspec.structs.replace(generate, max_added_ms=added_ms)

    @staticmethod
    def note(surface: Surface, translated: Translated) -> GatewayNote:
        """The note of the answer to a request of a conversation."""
        return GatewayNote(
            surface=surface.name,
            version=surface.version,
            created=int(time.time()),
            model=translated.model,
            echo=translated.echo,
            left_out=translated.left_out,
        )

    def left(self, caller: Caller, said: Said) -> None:
        """Report that the answer to what was said has ended, in any way."""
        self.later(said.append, self.sessions.left(caller, said))

    async def again(self, caller: Caller, surface: str, run: str, how: How, *, again: int) -> GatewayRun:
        """Retry or resume a run that the caller may see, as a run that is billed to the caller.

        Raises Refusal; RunOpen, RunNotFound, RunNotRepeatable; ServerError.
        """
        generate = await request_again(self.deployment, run, how, again=again, events=self.follow(run))
        return await self._forward(caller, surface, generate)

    async def retry_dead_letter(self, caller: Caller, surface: str, dead: StoredDeadLetter) -> GatewayRun:
        """Publish the request behind a dead letter, billed to the caller. Raises Refusal, CannotRetry, ServerError."""
        generate = await dead_letter_request(self.deployment, dead, events=self.follow)
        return await self._forward(caller, surface, generate)

    async def _forward(self, caller: Caller, surface: str, generate: Generate) -> GatewayRun:
        """Begin a stored request again. The new run stays with its tenant, who may not be the caller's."""
        note = note_in(generate.metadata) or GatewayNote(
            surface=surface, version=1, created=int(time.time()), model=f"{generate.provider}/{generate.model}"
        )
        note = msgspec.structs.replace(note, key=caller.key, hold=None)
        return await self._begin(caller, surface, generate, note, may_exist=True, rejoins=False, stays=True)

    async def _begin(
        self,
        caller: Caller,
        surface: str,
        generate: Generate,
        note: GatewayNote,
        *,
        may_exist: bool,
        rejoins: bool,
        stays: bool,
        claim: Claim | None = None,
    ) -> GatewayRun:
        """The door: admit, then publish unless the run exists.

        ``may_exist``: others know its id. ``stays``: it continues without the client. ``claim``: see `Translated`.
        Raises Refusal, TokenbusError.
        """
        run = generate.id
        assert run
        exists = may_exist and await self._status(run) in (*UNENDED, *ENDED)
        # One that exists costs nothing more; its own reservation leaves room for whoever joins it.
        begun = await self._note_of(run) if exists else None
        hold = (begun and begun.hold) or (run if exists else new_hold(run))
        note = msgspec.structs.replace(note, hold=hold if caller.key else None)
        generate = msgspec.structs.replace(
            generate, metadata={**(generate.metadata or {}), NOTE: msgspec.to_builtins(note)}
        )
        span = self._spans.begin(run, generate.traceparent) if self._spans else None
        if span:
            generate = msgspec.structs.replace(generate, traceparent=span.traceparent)
        await self.owners.check_run(caller, generate)
        admission = await self._access.admit(caller, surface, generate, hold=hold)
        release = None
        try:
            may_cancel = rejoins or not exists
            share = await self._shared(run, stays=stays) if may_exist and may_cancel else None
            if not exists:
                release = await claim(run) if claim else None
                if may_exist:
                    await self._made_again(run)
                await self._bus.publish(admission.generate)
        except BaseException:
            if release:
                await release()
            if not exists:
                await self._access.withdraw(caller, hold)
            await self._access.leave(caller, run)
            raise
        return GatewayRun(
            id=run,
            note=note,
            caller=caller,
            admission=admission,
            joined=may_exist,
            span=span,
            share=share,
            may_cancel=may_cancel,
            rejoins=rejoins,
        )

    async def _made_again(self, run: str) -> None:
        """A response of this id that was deleted is a new one."""
        with translated(self.server):
            await self.server.client.unlink(self.keys.gateway_deleted(run))

    async def _named(self, name: str, caller: Caller) -> str:
        """The run to which a client gives this id: one that it may see, or a new one. Raises Refusal."""
        with suppress(Refusal):
            return (await self.owned(name, caller)).id
        run = caller.run_named(name)
        if len(run) > MAX_RUN_ID_CHARS:
            raise invalid("run", f"a run's id has at most {MAX_RUN_ID_CHARS - len(run) + len(name)} characters here")
        return run

    async def _newest(self, run: str, note: GatewayNote) -> tuple[str, str | None]:
        """The run of an Idempotency-Key: the first one, or a retry of one that ended with an error that may pass.

        The second value is the run that it retries. Raises Refusal if a run to retry had another body.
        """
        failed: str | None = None
        for _ in range(MAX_RETRIES_OF_A_KEY):
            if await self._status(run) not in ENDED:
                break
            end = await self.last_event(run)
            if end is None or not idempotency.may_be_retried(end):
                break
            found = await self._note_of(run)
            if found is not None and found.body != note.body:
                raise idempotency.mismatch(run)
            run, failed = derived_id(run, "retry", 1), run
        return run, failed

    async def _status(self, run: str) -> str | None:
        with translated(self.server):
            await locate(self.server, self.keys, run)
            return await read_status(self.server.client, self.keys.run(run))

    # --- runs that there are --------------------------------------------------------------------------------------

    def follow(self, run: str, *, after: int = -1, new: bool = False) -> AsyncGenerator[PublicEvent]:
        return self._bus.follow(run, after=after, new=new)

    def follow_tree(self, run: str, *, after: TreeCursor | None) -> AsyncGenerator[TreeStep]:
        return self._bus.follow_tree(run, after=after)

    async def is_end_of_tree(self, run: str, cursor: TreeCursor) -> bool:
        """Whether the run and all runs below it have ended, and nothing follows the cursor. Raises CursorAhead."""
        async with TreeReader(self.deployment, run, after=cursor, wait_s=0) as reader:
            return await reader.is_at_end()

    async def messages(self, run: str, *, wait_s: float) -> list[Message]:
        return await self._bus.messages(run, wait_s=wait_s)

    async def of_topic(
        self, topic: SubscribedTopic, group: str | None, begin: Literal["now", "start"]
    ) -> AsyncGenerator[TopicEvent]:
        subscribe: Any = self._bus.subscribe
        async with subscribe(topic, group=group, from_=begin) as subscription:
            async for event in subscription:
                yield event

    async def owned(self, name: str, caller: Caller) -> OwnedRun:
        """The run that a client names, by its id or by the id that the client gave it.

        Raises Refusal (404) for another tenant's run exactly as for one that does not exist, and ServerUnavailable.
        """
        for run in dict.fromkeys((name, caller.run_named(name))):
            known, metadata = await self._metadata(run)
            if known is not None and caller.owns(tenant_of(metadata)) and (known or caller.operator):
                return OwnedRun(run, note_in(metadata))
        raise not_found(name)

    async def _note_of(self, run: str) -> GatewayNote | None:
        return note_in((await self._metadata(run))[1])

    async def _metadata(self, run: str) -> tuple[bool | None, dict[str, object] | None]:
        """Whether the run's metadata is known (None: no such run), and the metadata."""
        keys = self.keys
        if not is_run_id(run):
            raise not_found(run)
        with translated(self.server):
            await locate(self.server, keys, run)
            first: list[Any] = await self.server.client.xrange(keys.log(run), count=1)
        event = public_event(run, first[0]) if first else None
        if event is None and await self._status(run) is None:
            event = await self.archived.first_event(run)
        if isinstance(event, Started):
            return True, event.metadata
        with translated(self.server):  # not accepted yet, refused, or the log's beginning is trimmed
            stored: bytes | None = await self.server.client.hget(keys.run(run), REQUEST)
        if stored is not None:
            return True, msgspec.json.decode(stored, type=_Stored).metadata
        return (None, None) if event is None else (False, None)

    async def has_ended(self, run: str) -> bool:
        """Whether a run is over. One that was not accepted yet is not."""
        return await self._status(run) in ENDED

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
                if not events and await self._status(run) not in UNENDED:
                    events = [event async for event in self.archived.events(run)]
                return sorted(events, key=lambda event: event.seq)
            position = f"({entries[-1][0].decode()}"

    async def last_event(self, run: str) -> PublicEvent | None:
        """The newest event of the run; None if it has no event yet."""
        with translated(self.server):
            await locate(self.server, self.keys, run)
            log_key = self.keys.log(run)
            last: list[Any] = await self.server.client.xrevrange(log_key, count=1)
        if not last and await self._status(run) not in UNENDED:
            return await self.archived.last_event(run)
        return public_event(log_key, last[0]) if last else None

    async def names_blob(self, run: str, blob_id: str) -> bool:
        """Whether a field of the run's events that is for the ids of blobs has this one."""
        return any(blob_id in blobs_of(event) for event in await self.stored(run))

    def client_gone(self, opened: GatewayRun) -> None:
        """Cancel a run whose client disconnected, unless others share it, in a separate task, because the request's
        task is ending.
        """
        if opened.may_cancel:
            self.later(opened.id, self._cancel_left(opened))

    def cancel_later(self, run: str, reason: str) -> None:
        """Cancel in a separate task, which outlives the request that asks for it."""
        self.later(run, self.cancel(run, reason))

    def leave(self, opened: GatewayRun) -> None:
        """Report that an answer has ended, in any way."""
        self.later(opened.id, self._left_by(opened))

    async def cancel(
        self, run: str, reason: str | None, *, heard_through: int | None = None, heard_characters: int | None = None
    ) -> None:
        """Cancel, also if the server is unavailable for some seconds. Raises ServerError after that; RequestInvalid."""
        heard = {"heard_through": heard_through, "heard_characters": heard_characters}
        for n in range(CANCEL_TRIES):
            try:
                await self._bus.cancel(run, reason, **heard)
                return
            except ServerError:
                if n == CANCEL_TRIES - 1 or self._closing.is_set():
                    raise
                await asyncio.sleep(CANCEL_PAUSE_S)

    # ----------------------------------------------------------------------------------------------------------

    async def _left_by(self, opened: GatewayRun) -> None:
        await self._access.leave(opened.caller, opened.id)
        if opened.share is not None:
            await self._unshared(opened.id, opened.share)

    async def _cancel_left(self, opened: GatewayRun) -> None:
        if opened.share is None or await self._is_last(opened, opened.share):
            await self.cancel(opened.id, GONE)

    async def _is_last(self, opened: GatewayRun, share: int) -> bool:
        """Whether the last client of a run has gone with this one; known once a client may no longer come back, and
        the gateways of others that have the run either live or not.
        """
        await self._unshared(opened.id, share, last=True)
        wait_s = self._settings.rejoin_s if opened.rejoins else 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._closing.wait()
            match await self._others(opened.id, share):
                case "none":
                    return True
                case "later":
                    return False
                case "some":
                    if self._closing.is_set() or await self._status(opened.id) in ENDED:
                        return False
            wait_s = LOOK_S

    async def _shared(self, run: str, *, stays: bool) -> int:
        """Count a request among those that share the run; returns its number."""
        key = self._shares(run)
        with translated(self.server):
            number = int(await self.server.client.hincrby(key, "count", 1))
            await self.server.client.hset(key, str(number), _STAYS if stays else self._worker)
            await self.server.client.expire(key, SHARES_KEPT_S)
        return number

    async def _unshared(self, run: str, share: int, *, last: bool = False) -> None:
        """One of them has left. ``last``: its client did, so it cancels the run if no other comes or leaves later."""
        key = self._shares(run)
        with translated(self.server):
            if await self.server.client.hget(key, str(share)) == self._worker:
                await self.server.client.hdel(key, str(share))
            if last:
                await self.server.client.hset(key, "last", str(share))
                await self.server.client.expire(key, SHARES_KEPT_S)

    async def _others(self, run: str, share: int) -> Literal["none", "some", "later"]:
        """Who else has the run: a client that stays or is connected to a live gateway, or one that left later."""
        with translated(self.server):
            fields: dict[bytes, bytes] = await self.server.client.hgetall(self._shares(run))
            gateways = set[bytes](await self.server.client.zrange(self.keys.gateway_members, 0, -1))
        if fields.pop(b"last", None) not in (None, str(share).encode()):
            return "later"
        fields.pop(b"count", None)
        return "some" if any(holder == _STAYS or holder in gateways for holder in fields.values()) else "none"

    def _shares(self, run: str) -> str:
        return f"{self.keys.prefix}:{{gateway}}:shares:{run}"

    def later(self, run: str, work: Any) -> None:
        """Do something of a run in a separate task, before the gateway closes."""
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
    found = (metadata or {}).get(NOTE)
    try:
        return msgspec.convert(found, GatewayNote) if found is not None else None
    except msgspec.ValidationError:
        return None


def not_found(run: str) -> Refusal:
    """No such run, or not one of this caller."""
    run = run if is_run_id(run) else ""
    return Refusal(
        Problem(status=404, code="run_not_found", message="no such run", kind="not_found", param="run", run=run or None)
    )


def _conflict(run: str, why: str) -> Refusal:
    return Refusal(Problem(status=409, code="run_conflict", message=why, kind="invalid_request", run=run))
