"""Takes appends in: each becomes one script, made from the session as it is, and made again if that has changed.

What a message would start is decided when it is appended, by the configuration of that moment: its request is checked
and its media are stored as those of any request. So starting it later takes no more than the commit that ends the run
before (scripts/pieces/session_run.lua).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from typing import Literal, cast

import msgspec

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import locate
from tokenbus.bus.run_record import SESSION_LIVES
from tokenbus.bus.scripts import sessions as session_scripts
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem
from tokenbus.core.request.bounds import id_of_entry, tenant_of
from tokenbus.core.request.parse import request_with_notes
from tokenbus.errors import RequestInvalid
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    CancelRequested,
    Control,
    EventFrame,
    PolicyPlan,
    SteerRequested,
    encode,
)
from tokenbus.events.requests import (
    Append,
    Configure,
    ContentPart,
    Delete,
    Generate,
    HistoryBound,
    Interrupt,
    Message,
    Rewrite,
    SessionItem,
    SessionMessage,
    TextPart,
    Withdraw,
)
from tokenbus.events.sessions import SessionRun, session_ref, session_run
from tokenbus_services.intake.input_policies import InputPolicies
from tokenbus_services.intake.run_creation import RunCreation
from tokenbus_services.runtime.storage_share import StorageShare
from tokenbus_services.settings import Settings

INTERRUPTED = "interrupted"
"""Reason of a run that a session's append ended."""
UNKNOWN_MS = 600_000
"""How long the fate of an append to an unknown session can be asked."""
AT_ONCE = 500
MOST_BEGINNING = 200
"""Characters of a session's first message that a list of sessions shows."""
_SAMPLE = Message(role="user", content="…")
"""Stands for a message when a configuration is checked."""
_ANY = "any"
"""Stands for a provider or a model that nothing depends on."""

_COMPACTION: dict[str, Callable[[int], dict[str, object]]] = {
    "anthropic": lambda tokens: {
        "anthropic_beta": ["compact-2026-01-12"],
        "context_management": {
            "edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": tokens}}]
        },
    },
    "openai-responses": lambda tokens: {"context_management": [{"type": "compaction", "compact_threshold": tokens}]},
}
"""By API: fields that tell the provider to compact the conversation when it has so many tokens."""

Prepared = tuple[Generate, PolicyPlan | None, list[str]]
Prepare = Callable[[Generate], Awaitable[Prepared]]


class _Session(msgspec.Struct, frozen=True):
    """A session as it was read."""

    ref: str
    made: str = ""
    version: int = 0
    """Of the configuration, from 1; 0: there is no session."""
    runs: int = 0
    open_run: str = ""
    lost: bool = False
    """Nothing is left of the open run: its hash has expired."""
    config: Configure | None = None
    renewed_ms: int = 0
    """When the lifetimes of its ended runs began."""
    begins: bool = False
    """The list of sessions has its first message."""
    deleting: bool = False
    """It is gone once its open run has ended."""

    def run(self, number: int) -> str:
        return SessionRun(self.ref, self.made, number).id

    @property
    def newest(self) -> str:
        """The open run, or the last one; empty if it has had none."""
        return (self.open_run or self.run(self.runs - 1)) if self.runs else ""


class SessionAppends:
    """Builds the calls; each puts one append into its session, however often it is sent."""

    def __init__(
        self,
        server: Server,
        settings: Settings,
        creation: RunCreation,
        prepare: Prepare,
        *,
        offload: Callable[[Generate], Awaitable[Generate]],
        keep: Callable[[Sequence[Message]], Awaitable[None]],
        judge: InputPolicies,
        input_plan: Callable[[Generate], PolicyPlan | None],
    ) -> None:
        """``prepare`` checks a request and stores its media, as for any run; ``offload`` only does the second. ``keep``
        keeps what is stored for as long as a session. ``input_plan``: the policies that judge a request's texts.
        """
        self._server = server
        self._keys: Keys = settings.keys
        self._creation = creation
        self._settings = settings
        self._prepare = prepare
        self._offload = offload
        self._keep = keep
        self._judge = judge
        self._input_plan = input_plan
        self._open_ms = round(settings.retention.open_run_s * 1000)
        self._keep_ms = round(settings.retention.session_s * 1000)
        self._share = StorageShare(
            server, settings, what="session", key=lambda tenant: self._keys.limit(f"sessions:{tenant}")
        )

    async def call(self, append: Append, item: QueueItem) -> scripts.ScriptCall:
        """The call that accepts the append. Raises RequestInvalid; Unjudged and InputRejected, as `InputPolicies`."""
        tenant, name = tenant_of(append.metadata), id_of(append, item)
        session = await self._read(session_ref(tenant, append.session))
        if session.deleting:
            raise RequestInvalid("session", "it is being deleted")
        if not isinstance(append.item, Interrupt | Withdraw | Delete):
            await self._share.spend(tenant, sum(map(len, item.fields.values())))
        append = await self._judged(session, append, name)
        if isinstance(append.item, Configure):
            return await self._configure(session, append, append.item, name, tenant)
        if (config := session.config) is None:
            problem = f"there is no session {append.session!r}: an append of type 'configure' makes one"
            raise RequestInvalid("session", problem)
        session = await self._renewed(session)
        match append.item:
            case SessionMessage(run=False) as message:
                messages = await self._stored(_said(message))
                return self._append(
                    *(session, name, tenant, "add", _as_stored(message, messages)),
                    work=msgspec.json.encode(messages)[1:-1],
                    when_busy=message.when_busy or "",
                    fields=_begins(session, messages),
                )
            case SessionMessage() as message:
                when_busy = message.when_busy or config.when_busy
                how = "steer_now" if when_busy == "steer" and message.now else when_busy
                request, policy_plan, notes = await self._prepare_message(config, message, append)
                await self._keep(request.messages)
                request, bound = self._bounded(request, config.history)
                work = self._creation.session_work(
                    request,
                    name,
                    policy_plan,
                    notes,
                    session=append.session,
                    version=session.version,
                    history=bound,
                )
                return self._append(
                    *(session, name, tenant, "message", _as_stored(message, request.messages)),
                    work=work,
                    when_busy=how,
                    heard=message if when_busy == "interrupt" else None,
                    fields=_begins(session, request.messages),
                )
            case Rewrite() as rewrite:
                messages = await self._stored(rewrite.messages)
                return self._append(
                    *(session, name, tenant, "rewrite", msgspec.structs.replace(rewrite, messages=[])),
                    work=msgspec.json.encode(messages),
                    subject=str(_runs_through(rewrite, session)),
                    as_of="" if rewrite.as_of is None else str(rewrite.as_of),
                )
            case Interrupt() as interrupt:
                other = interrupt.run if interrupt.run != session.newest else None
                return self._append(session, name, tenant, "interrupt", interrupt, heard=interrupt, subject=other or "")
            case Withdraw() as withdraw:
                return self._append(session, name, tenant, "withdraw", withdraw, subject=withdraw.append)
            case Delete() as delete:
                await self._delete_ended(session, tenant)
                return self._append(session, name, tenant, "delete", delete)

    async def _judged(self, session: _Session, append: Append, name: str) -> Append:
        """The append with its texts as the policies of what goes in released them; the same if there are none."""
        item, config = append.item, session.config
        if isinstance(item, Configure):
            config = item
        if not isinstance(item, Configure | SessionMessage | Rewrite) or config is None:
            return append
        item, run = msgspec.structs.replace(item, judged=None), None
        said = item.request if isinstance(item, SessionMessage) else {}
        configured = {"provider": _ANY, "model": _ANY, **config.request}
        tenant = tenant_of(append.metadata)
        of_session = msgspec.structs.replace(append, metadata={"tenant": tenant} if tenant else None)
        plan = self._input_plan(self._request(configured, [_SAMPLE], of_session)[0])
        # A message may add policies to those of the session and of its routes, and take none away.
        own = cast("list[object]", said.get("input_policies") or [])
        fields = {**configured, **said, "input_policies": [*(plan.names if plan else ()), *own]}
        if plan := self._input_plan(self._request(fields, [_SAMPLE], append)[0]):
            appends = self._keys.of_session(session.ref)[1]
            known = await retry_until_available(
                self._server, lambda: self._server.client.hexists(appends, name), what="look-up of an append"
            )
            if not known:
                of = {"session": append.session, "append": name}
                item, run = await self._judge.judged(item, plan, name, of=of, metadata=append.metadata)
        return msgspec.structs.replace(append, item=msgspec.structs.replace(item, judged=run))

    async def refuse(
        self, append: Append, item: QueueItem, problem: str, *, reason: Literal["refused", "rejected"]
    ) -> scripts.ScriptCall:
        """The call that returns an append that is invalid, or that policies rejected."""
        session = await self._read(session_ref(tenant_of(append.metadata), append.session))
        partition = self._keys.partition_of(session.ref)
        keys = self._keys.within(partition)  # its run is there too, also if new runs are placed otherwise by now
        log, appends, *_ = keys.of_session(session.ref)
        return session_scripts.refuse(
            keys.session(session.ref),
            log,
            appends,
            keys.log(session.open_run) if session.open_run else log,
            keys.topic(partition, "sessions"),
            open_run=session.open_run,
            append=id_of(append, item),
            reason=reason,
            problem=msgspec.json.encode(problem),
            ttl_ms=UNKNOWN_MS,
            topic_entries=self._settings.retention.topic_entries,
        )

    async def _read(self, ref: str) -> _Session:
        """Find the session, and read what an append depends on. Its runs are where it is."""
        server, keys = self._server, self._keys
        await retry_until_available(server, lambda: locate(server, keys, ref), what="look-up of a session")
        names = ["made", "version", "runs", "run", "config", "renewed", "deleting"]
        found: list[bytes | None] = await retry_until_available(
            server, lambda: server.client.hmget(keys.session(ref), [*names, "begins"]), what="look-up of a session"
        )
        made, version, runs, run, config, renewed, deleting, begins = found
        if made is None:
            return _Session(ref)
        open_run = (run or b"").decode()
        session = _Session(
            ref,
            made=made.decode(),
            version=int(version or 0),
            runs=int(runs or 0),
            open_run=open_run,
            config=msgspec.json.decode(config or b"", type=Configure),
            renewed_ms=int(renewed or 0),
            begins=begins is not None,
            deleting=deleting is not None,
        )
        for each in (open_run, session.run(session.runs)):
            if each:
                keys.note(each, keys.partition_of(ref))
        if open_run and not await retry_until_available(
            server, lambda: server.client.exists(keys.run(open_run)), what="look-up of a run"
        ):
            return msgspec.structs.replace(session, lost=True)
        return session

    async def _renewed(self, session: _Session) -> _Session:
        """Keep the session's ended runs as long as the session, if that was last done some time ago."""
        now = self._server.clock.now_ms()
        if now - session.renewed_ms < self._keep_ms / SESSION_LIVES:
            return session
        for keys in batched(self._keys_of_ended(session, newest=self._settings.retention.session_runs)):
            pipe = self._server.client.pipeline(transaction=False)
            for key in keys:
                pipe.pexpire(key, SESSION_LIVES * self._keep_ms)
            await retry_until_available(self._server, pipe.execute, what="lifetimes of a session's runs")
        return msgspec.structs.replace(session, renewed_ms=now)

    async def _delete_ended(self, session: _Session, tenant: str) -> None:
        """Delete the session's ended runs. The script of the append deletes the rest."""
        partition = self._keys.partition_of(session.ref)
        indexes = {self._keys.ended_runs(partition), self._keys.ended_runs(partition, tenant)}
        for keys in batched(self._keys_of_ended(session)):
            pipe = self._server.client.pipeline(transaction=False)
            for kind in range(3):
                pipe.unlink(*keys[kind::3])
            for index in indexes:
                pipe.zrem(index, *(key.rpartition(":")[2] for key in keys[::3]))
            await retry_until_available(self._server, pipe.execute, what="deletion of a session's runs")

    def _keys_of_ended(self, session: _Session, *, newest: int | None = None) -> Iterator[str]:
        """The hash, the log and the tree of each ended run, or of so many ``newest``."""
        names = self._keys.within(self._keys.partition_of(session.ref))
        ended = session.runs - bool(session.open_run)
        for number in range(max(0, ended - newest) if newest else 0, ended):
            run = session.run(number)
            yield names.run(run)
            yield names.log(run)
            yield names.tree(run)

    async def _configure(
        self, session: _Session, append: Append, item: Configure, name: str, tenant: str
    ) -> scripts.ScriptCall:
        if item.messages and session.config:
            raise RequestInvalid("item.messages", "the session is there already and has a history")
        if {"provider", "model"} <= item.request.keys():
            await self._prepare_message(item, SessionMessage(content=_SAMPLE.content), append)
        else:  # left to the messages
            named = {"provider": _ANY, "model": _ANY, **item.request}
            self._request(named, [_SAMPLE], append)
        now = self._server.clock.now_ms()
        # The time too: a session may be deleted and made again by an append of the same id.
        made = session.made or sha256(f"{name} {now}".encode()).hexdigest()[:8]
        before, begins = b"", ""
        if item.messages:
            before = msgspec.json.encode(await self._stored(item.messages))
            begins = next((message.content for message in item.messages if message.role == "user"), "")
        config = msgspec.structs.replace(item, messages=[])
        fields: list[scripts.Arg] = ["version", session.version + 1, "config", msgspec.json.encode(config)]
        fields += ["together", int(item.together), *_listed(item)]
        if session.config is None:
            fields += ["made", made, "name", append.session, "tenant", tenant]
            fields += ["renewed", now, "begun", now]
            fields += ["begins", _beginning(begins)] if begins else []
        session = msgspec.structs.replace(session, made=made)
        return self._append(session, name, tenant, "configure", config, work=before, fields=fields)

    async def _prepare_message(self, config: Configure, message: SessionMessage, append: Append) -> Prepared:
        request, unknown = self._request({**config.request, **message.request}, _said(message), append)
        request, policy_plan, notes = await self._prepare(request)
        return request, policy_plan, [*unknown, *notes]

    def _bounded(self, request: Generate, bound: HistoryBound | None) -> tuple[Generate, HistoryBound | None]:
        """The request and what still bounds its history: nothing, if its provider compacts it."""
        compaction = _COMPACTION.get(self._settings.providers[request.provider].api)
        if bound is None or bound.how != "provider" or compaction is None:
            return request, bound
        return msgspec.structs.replace(request, extra={**compaction(bound.tokens), **(request.extra or {})}), None

    async def _stored(self, messages: list[Message]) -> list[Message]:
        """The messages as they are kept: with their media in the store. Raises RequestInvalid."""
        if not messages:
            return []
        stored = (await self._offload(Generate(provider=_ANY, model=_ANY, messages=messages))).messages
        await self._keep(stored)
        return stored

    def _request(
        self, fields: Mapping[str, object], messages: list[Message], append: Append
    ) -> tuple[Generate, list[str]]:
        """The request of these fields with these messages. Its tenant is that of the session."""
        configured = fields.get("metadata")
        metadata = cast("dict[str, object]", configured) if isinstance(configured, dict) else {}
        metadata = {**metadata, **(append.metadata or {})}
        if not tenant_of(append.metadata):
            metadata.pop("tenant", None)
        value = {**fields, "type": "generate", "messages": msgspec.to_builtins(messages)}
        if metadata:
            value["metadata"] = metadata
        else:
            value.pop("metadata", None)
        request, unknown = request_with_notes(value)
        assert isinstance(request, Generate)
        return request, list(unknown)

    def _append(
        self,
        session: _Session,
        name: str,
        tenant: str,
        kind: session_scripts.Kind,
        item: SessionItem,
        *,
        work: bytes = b"",
        when_busy: str = "",
        heard: SessionMessage | Interrupt | None = None,
        subject: str = "",
        as_of: str = "",
        fields: list[scripts.Arg] | None = None,
    ) -> scripts.ScriptCall:
        partition, kept = self._keys.partition_of(session.ref), self._settings.retention
        keys = self._keys.within(partition)  # its runs too, wherever new ones are placed by now
        next_run = session.run(session.runs)
        last = session.newest or next_run
        for each in (next_run, last):
            self._keys.note(each, partition)
        through, characters = (heard.heard_through, heard.heard_characters) if heard else (None, None)
        event = SteerRequested() if when_busy == "steer_now" else CancelRequested(INTERRUPTED, through, characters)
        now = self._server.clock.now_ms()
        log, appends, queue, history = keys.of_session(session.ref)
        return session_scripts.append(
            keys.session(session.ref),
            log,
            appends,
            queue,
            history,
            keys.run(last),
            keys.log(last),
            keys.run(next_run),
            keys.log(next_run),
            keys.topic(partition, "events"),
            keys.topic(partition, "turns"),
            keys.topic(partition, "raw"),
            keys.topic(partition, "control"),
            keys.lease(partition, "parser"),
            keys.lease(partition, "normalizer"),
            keys.open_runs(partition),
            keys.ended_runs(partition),
            keys.sessions(partition),
            keys.topic(partition, "sessions"),
            (keys.open_runs(partition, tenant), keys.ended_runs(partition, tenant), keys.sessions(partition, tenant))
            if tenant
            else (),
            epoch=self._keys.epoch,
            version=str(session.version or ""),
            runs=session.runs,
            open_run=session.open_run,
            lost=int(session.lost),
            next_run=next_run,
            append=name,
            kind=kind,
            item=msgspec.json.encode(item),
            work=work,
            when_busy=when_busy,
            heard="" if through is None else str(through),
            heard_characters="" if characters is None else str(characters),
            frame=encode(EventFrame(0, CONTROL_ATTEMPT, now, [event])),
            control_frame=encode(Control(last)),
            subject=subject,
            as_of=as_of,
            open_ms=self._open_ms,
            keep_ms=self._keep_ms,
            topic_entries=kept.topic_entries,
            renewed=str(session.renewed_ms or ""),
            fields=["most_runs", kept.session_runs, "most_events", kept.session_events, *(fields or [])],
        )


def batched(keys: Iterable[str]) -> Iterator[list[str]]:
    """The keys in lists that one command can take, of whole threes."""
    rest = iter(keys)
    while batch := list(islice(rest, 3 * (AT_ONCE // 3))):
        yield batch


def id_of(append: Append, item: QueueItem) -> str:
    """The append's id. One without gets the entry's id, so that a second delivery is the same append."""
    return append.id or id_of_entry(item.stream, item.entry_id)


def _listed(config: Configure) -> list[scripts.Arg]:
    """What a list of sessions shows of the configuration, as fields of the hash."""
    request = config.request
    metadata = msgspec.json.encode(request.get("metadata") or {})
    return ["provider", str(request.get("provider", "")), "model", str(request.get("model", "")), "metadata", metadata]


def _said(message: SessionMessage) -> list[Message]:
    return message.messages or [Message(role=message.role, content=message.content, participant=message.participant)]


def _as_stored(message: SessionMessage, stored: list[Message]) -> SessionMessage:
    """The message as the session's log has it."""
    if message.messages:
        return msgspec.structs.replace(message, messages=stored)
    return msgspec.structs.replace(message, content=stored[0].content)


def _begins(session: _Session, messages: Sequence[Message]) -> list[scripts.Arg]:
    """What a list of sessions shows of the first message of a user, as a field of the hash."""
    first = None if session.begins else next((m.content for m in messages if m.role == "user"), None)
    return ["begins", _beginning(first)] if first is not None else []


def _runs_through(rewrite: Rewrite, session: _Session) -> int:
    """How many runs the messages replace. Raises RequestInvalid."""
    if rewrite.through is None:
        return session.runs
    last = session_run(rewrite.through)
    if last is None or (last.ref, last.made) != (session.ref, session.made) or last.number >= session.runs:
        raise RequestInvalid("item.through", f"{rewrite.through!r} is no run of this session")
    return last.number + 1


def _beginning(content: str | Sequence[ContentPart]) -> str:
    """The beginning of a message's text, for a list of sessions."""
    texts = [content] if isinstance(content, str) else [part.text for part in content if isinstance(part, TextPart)]
    return " ".join(" ".join(texts)[: 4 * MOST_BEGINNING].split())[:MOST_BEGINNING]
