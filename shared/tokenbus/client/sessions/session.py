"""A session as its clients use it: append to it, follow it, read its history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from tokenbus.bus.server.server import translated
from tokenbus.client import publishing
from tokenbus.client.deployment import Deployment
from tokenbus.client.publishing import new_run_id
from tokenbus.client.sessions.history import history_before
from tokenbus.client.sessions.reader import SessionCursor, SessionReader, SessionStep, follow_session, newest_cursor
from tokenbus.core.request.bounds import tenant_of
from tokenbus.errors import AppendPending, RequestInvalid, ServerUnavailable, SessionNotFound
from tokenbus.events.requests import (
    Append,
    Configure,
    ContentPart,
    Delete,
    HistoryBound,
    Interrupt,
    Message,
    Rewrite,
    RunId,
    SessionItem,
    SessionMessage,
    WhenBusy,
    Withdraw,
)
from tokenbus.events.sessions import Fate, SessionRun, session_ref, session_run

ACCEPTED_WAIT_S = 60.0
"""How long an append may wait for intake before `AppendPending` is raised."""
FIRST_LOOK_S, LONGEST_LOOK_S = 0.004, 0.1
DELETED_S = 1.0
"""How much longer an append whose session was deleted is waited for: it may come after that, and make a new one."""
_FOR_CONFIGURATION = ("id", "messages", "type")
_fate_decoder = msgspec.json.Decoder(Fate)


class Receipt(msgspec.Struct, frozen=True):
    """An append that was accepted: its id, and its fate so far."""

    append: str
    fate: Fate


class Session:
    """A conversation that any number of clients append to and follow. From `Client.session`; usable while that is open.

    Every method that appends takes ``append``, the append's id: appending it twice is appending it once. Without one it
    gets a new id. It returns once the append is accepted, with its fate so far, and raises

    - RequestInvalid if the append is invalid, with the problem that intake named;
    - AppendPending if no intake took it within ``wait_s`` seconds: repeat it with the same id, or ask `fate`;
    - RequestTooLarge, ServerUnavailable and ServerFull. After the last two it may be repeated with the same id.
    """

    def __init__(
        self,
        name: str,
        deployment: Deployment,
        put: Callable[[Append, str], Awaitable[None]],
        *,
        tenant: str = "",
        reconnect_s: float,
    ) -> None:
        """``put`` puts an append of a tenant on the inbound stream. Raises RequestInvalid for a name that no session
        can have.
        """
        try:
            self.name = msgspec.convert(name, RunId)
        except msgspec.ValidationError as e:
            raise RequestInvalid("session", str(e)) from None
        self.tenant = tenant_of({"tenant": tenant})
        self._ref = session_ref(self.tenant, self.name)
        self._deployment = deployment
        self._put = put
        self._reconnect_s = reconnect_s

    def __repr__(self) -> str:
        return f"Session({self.name!r})" if not self.tenant else f"Session({self.name!r}, tenant={self.tenant!r})"

    # --- appends ----------------------------------------------------------------------------------------------

    async def configure(
        self,
        request: Mapping[str, object],
        *,
        when_busy: WhenBusy = "enqueue",
        together: bool = False,
        history_tokens: int | None = None,
        history: HistoryBound | None = None,
        messages: Sequence[Message | Mapping[str, object]] = (),
        append: str | None = None,
        wait_s: float = ACCEPTED_WAIT_S,
    ) -> Receipt:
        """Set what each run of the session is, from the next append on; makes the session if there is none.

        - ``request``: fields of a `Generate`, without ``id`` and ``messages``.
        - ``when_busy``: what becomes of a message while a run is open: `enqueue`, `steer`, `interrupt` or `reject`.
        - ``together``: messages that wait start one run together.
        - ``history_tokens``: send at most about so many tokens of the history, the newest; None: all of it.
        - ``history``: the same with what happens to the rest: see `HistoryBound`.
        - ``messages``: the history that a new session begins with.
        """
        for name in _FOR_CONFIGURATION:
            if name in request:
                raise RequestInvalid(f"request.{name}", "it is no part of a configuration, for each run has its own")
        item = Configure(
            request=dict(request),
            when_busy=when_busy,
            together=together,
            history=history or (HistoryBound(tokens=history_tokens) if history_tokens is not None else None),
            messages=_messages(messages),
        )
        return await self.append(item, append=append, wait_s=wait_s)

    async def send(
        self,
        content: str | list[ContentPart] = "",
        *,
        messages: Sequence[Message | Mapping[str, object]] = (),
        request: Mapping[str, object] | None = None,
        run: bool = True,
        participant: str | None = None,
        when_busy: WhenBusy | None = None,
        now: bool = False,
        heard_through: int | None = None,
        heard_characters: int | None = None,
        metadata: Mapping[str, object] | None = None,
        append: str | None = None,
        wait_s: float = ACCEPTED_WAIT_S,
    ) -> Receipt:
        """Append a message to the model. It starts a run, at once if none is open: see `configure` for ``when_busy``.

        - ``now``: of a message that steers: see `steer`.
        - ``messages``: several, in place of ``content``.
        - ``request``: fields of a `Generate` that this run has in place of the configured ones.
        - ``run`` False: it starts no run, and is history at once, behind the open run if there is one.

        ``heard_through``, ``heard_characters``: for a message that interrupts, how far the open run was heard, as in
        `Client.cancel`. ``metadata`` is added to that of the run.
        """
        item = SessionMessage(
            content=content,
            participant=participant,
            when_busy=when_busy,
            heard_through=heard_through,
            heard_characters=heard_characters,
            now=now,
            messages=_messages(messages),
            request=dict(request or {}),
            run=run,
        )
        return await self.append(item, append=append, metadata=metadata, wait_s=wait_s)

    async def steer(
        self,
        content: str | list[ContentPart],
        *,
        now: bool = False,
        participant: str | None = None,
        append: str | None = None,
        wait_s: float = ACCEPTED_WAIT_S,
    ) -> Receipt:
        """`send` a message that goes into the open run's next call; if there is none, it starts the next run.

        ``now``: end the present call for it. The answer continues its text if provider and model can do that, else it
        gets another turn. If calls of tools have begun, the message waits for their results.
        """
        return await self.send(
            content, when_busy="steer", now=now, participant=participant, append=append, wait_s=wait_s
        )

    async def append(
        self,
        item: SessionItem,
        *,
        append: str | None = None,
        metadata: Mapping[str, object] | None = None,
        wait_s: float = ACCEPTED_WAIT_S,
    ) -> Receipt:
        """Append an item as it is on the bus; the other methods make one. ``metadata``: as in `send`."""
        named = {**(metadata or {}), **({"tenant": self.tenant} if self.tenant else {})}
        request = Append(session=self.name, item=item, id=append or new_run_id(), metadata=named or None)
        with publishing.carrying(request):
            name, was = request.id or "", None
            with suppress(ServerUnavailable):  # what is published waits for the server
                was = (await self._look(name))[1]
            await self._put(request, self.tenant)
            return await self._accepted(name, wait_s, was)

    async def interrupt(
        self,
        *,
        heard_through: int | None = None,
        heard_characters: int | None = None,
        run: str | None = None,
        append: str | None = None,
        wait_s: float = ACCEPTED_WAIT_S,
    ) -> Receipt:
        """End the open run as `cancelled`, reason `interrupted`; what waits starts the next one.

        ``heard_through``, ``heard_characters``: as in `Client.cancel`. If no run is open, they cut the last one, whose
        speech may end after it did. ``run``: the one that is meant; if there is a newer one, the append is returned as
        `newer_run`, and nothing is interrupted.
        """
        item = Interrupt(heard_through=heard_through, heard_characters=heard_characters, run=run)
        return await self.append(item, append=append, wait_s=wait_s)

    async def withdraw(self, waiting: str, *, append: str | None = None, wait_s: float = ACCEPTED_WAIT_S) -> Receipt:
        """Take back the append ``waiting``, if it still waits: it is then returned as `withdrawn`."""
        return await self.append(Withdraw(append=waiting), append=append, wait_s=wait_s)

    async def rewrite(
        self,
        messages: Sequence[Message | Mapping[str, object]],
        *,
        through: str | None = None,
        as_of: int | None = None,
        append: str | None = None,
        wait_s: float = ACCEPTED_WAIT_S,
    ) -> Receipt:
        """Replace the history by ``messages``. Runs and events stay as they are.

        ``through``: the last run whose messages they replace; None: all. ``as_of``: the newest ``session_seq`` that you
        saw. Returned as `busy` if there are newer ones, or while a run is open that it would replace.
        """
        item = Rewrite(messages=_messages(messages), through=through, as_of=as_of)
        return await self.append(item, append=append, wait_s=wait_s)

    async def delete(self, *, append: str | None = None, wait_s: float = ACCEPTED_WAIT_S) -> None:
        """Delete the session: its events, its runs and its history. Returns once all is gone; an open run is cancelled
        first. Blobs and debug records expire by themselves.
        """
        receipt = await self.append(Delete(), append=append, wait_s=wait_s)
        await self._fate(receipt.append, wait_s, settled=True)

    async def fork(
        self, name: str, *, through: str | None = None, append: str | None = None, wait_s: float = ACCEPTED_WAIT_S
    ) -> Session:
        """Begin a new session of the tenant with this one's configuration and history, and return it.

        ``through``: the last run whose messages it has; None: the last one that has ended.

        Raises SessionNotFound; RequestInvalid if ``through`` is no run of this session that has ended, or if there is a
        session ``name`` with another history.
        """
        server = self._deployment.server
        keys = await self._deployment.keys_of(self._ref)
        with translated(server):
            names = ["made", "runs", "run", "config"]
            found: list[bytes | None] = await server.client.hmget(keys.session(self._ref), names)
            made, runs, run, config = found
            if made is None or config is None:
                raise SessionNotFound(self.name)
            number = int(runs or 0) - (1 if run else 0)
            if through is not None:
                last = session_run(through)
                if last is None or (last.ref, last.made) != (self._ref, made.decode()) or last.number >= number:
                    raise RequestInvalid("through", f"{through!r} is no run of this session that has ended")
                number = last.number + 1
            history = await history_before(server, keys, SessionRun(self._ref, made.decode(), number))
        item = msgspec.json.decode(config, type=Configure)
        forked = Session(name, self._deployment, self._put, tenant=self.tenant, reconnect_s=self._reconnect_s)
        await forked.append(msgspec.structs.replace(item, messages=history.messages), append=append, wait_s=wait_s)
        return forked

    async def _accepted(self, append: str, wait_s: float, was: bytes | None) -> Receipt:
        fate = await self._fate(append, wait_s, was)
        if fate.reason == "refused":
            raise RequestInvalid("append", fate.problem or "")
        return Receipt(append, fate)

    async def _fate(self, append: str, wait_s: float, was: bytes | None = None, *, settled: bool = False) -> Fate:
        """Wait for the append's fate; ``settled``: until it no longer waits. Raises SessionNotFound if the session was
        deleted since the append was published, and the fate with it. ``was``: the mark of a deletion before that.
        """
        clock, look_s = asyncio.get_running_loop().time, FIRST_LOOK_S
        forgotten_at: float | None = None
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    fate, deleted = await self._look(append)
                    if fate is not None and not (settled and fate.state == "appended"):
                        return fate
                    if fate is None and deleted not in (None, was):
                        forgotten_at = forgotten_at or clock()
                        if clock() > forgotten_at + DELETED_S:  # it is not about to be accepted either
                            raise SessionNotFound(self.name)
                    await asyncio.sleep(look_s)
                    look_s = min(2 * look_s, LONGEST_LOOK_S)
        except TimeoutError:
            raise AppendPending(self.name, append, wait_s) from None

    async def fate(self, append: str) -> Fate | None:
        """What became of an append; None if it is not known, or not any more. Raises ServerUnavailable."""
        try:
            msgspec.convert(append, RunId)
        except msgspec.ValidationError:  # an id that none has; the hash has other fields for appends that wait
            return None
        return (await self._look(append))[0]

    async def _look(self, append: str) -> tuple[Fate | None, bytes | None]:
        """The fate of an append, and a mark of the session's last deletion."""
        keys = await self._deployment.keys_of(self._ref)
        with translated(self._deployment.server):
            appends = keys.of_session(self._ref)[1]
            found: list[bytes | None] = await self._deployment.server.client.hmget(appends, [append, "!"])
        return _fate_decoder.decode(found[0]) if found[0] is not None else None, found[1]

    # --- reading ----------------------------------------------------------------------------------------------

    def follow(self, *, after: SessionCursor | None = None, live: bool = True) -> AsyncGenerator[SessionStep]:
        """Yield the session's events and those of its runs, each with the cursor behind it.

        The order is the same for every reader, for ever: an event of the session stands behind those of the open run
        that were there when it was written. First the stored ones, then live, without end; ``live`` False: the stored
        ones. Reconnects after lost connections. Of a session's own events the newest some thousand are kept: without
        ``after`` it begins with the oldest one kept.

        Raises SessionNotFound, also if the session is deleted or expires; SessionReplaced if ``after`` is of a session
        that was deleted, and there is a new one of this name; CursorTrimmed; CursorAhead; ServerUnavailable.
        """
        return follow_session(
            self._deployment,
            self._ref,
            self.name,
            after=after or SessionCursor(),
            live=live,
            reconnect_s=self._reconnect_s,
        )

    async def now(self) -> SessionCursor:
        """The cursor behind all that is stored; `follow` after it yields what comes from now on.

        Raises SessionNotFound, ServerUnavailable.
        """
        return await newest_cursor(self._deployment, self._ref, self.name)

    async def check(self, after: SessionCursor | None = None) -> None:
        """Raise at once what `follow` would raise for this cursor."""
        async with SessionReader(self._deployment, self._ref, self.name, after=after or SessionCursor()) as reader:
            await reader.begin()

    async def configuration(self) -> Configure:
        """What the session is configured as, without the history that it began with. Raises SessionNotFound,
        ServerUnavailable.
        """
        keys = await self._deployment.keys_of(self._ref)
        with translated(self._deployment.server):
            found: list[bytes | None] = await self._deployment.server.client.hmget(
                keys.session(self._ref), ["config", "deleting"]
            )
        if found[0] is None or found[1] is not None:
            raise SessionNotFound(self.name)
        return msgspec.json.decode(found[0], type=Configure)

    async def messages(self, *, runs: bool = True) -> list[Message]:
        """The newest 32 MiB of the history, as the next run gets it without the bound of the configuration. Excludes
        what the open run has given so far.

        ``runs`` False: only what the session began with, as a fork does.

        Raises SessionNotFound, ServerUnavailable.
        """
        keys = await self._deployment.keys_of(self._ref)
        server = self._deployment.server
        with translated(server):
            found: list[bytes | None] = await server.client.hmget(keys.session(self._ref), ["made", "runs", "run"])
            made, count, run = found
            if made is None:
                raise SessionNotFound(self.name)
            number = int(count or 0) - (1 if run else 0) if runs else 0
            before = await history_before(server, keys, SessionRun(self._ref, made.decode(), number))
        return [*before.messages, *([*before.own, *before.following] if run and runs else [])]


def _messages(values: Sequence[Message | Mapping[str, object]]) -> list[Message]:
    try:
        return [value if isinstance(value, Message) else msgspec.convert(value, Message) for value in values]
    except msgspec.ValidationError as e:
        raise RequestInvalid("messages", str(e)) from None
