"""Sessions behind the answers: the one door through which clients write to them.

A message may begin a run, at once or later, so each passes `AccessControl.admit` when it is appended, as a request of
the session's configuration with this message, and with the summary that its run may ask for. What a budget reserves for
it is under a name made of the append's id, because the run has none yet; the run's note says it, and the counter of
spend counts the run there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import cast

import msgspec

from tokenbus import Client, Receipt, Session, SessionCursor, SessionInfo, SessionStep
from tokenbus.bus.erase import erase_runs, with_children
from tokenbus.bus.server.server import translated
from tokenbus.client.deployment import Deployment
from tokenbus.client.publishing import new_run_id
from tokenbus.client.sessions.history import history_bytes, steered_turns
from tokenbus.client.sessions.listing import session_info
from tokenbus.core.request.parse import request_from
from tokenbus.errors import RequestInvalid, SessionNotFound
from tokenbus.events.requests import (
    Configure,
    Delete,
    Generate,
    HistoryBound,
    Message,
    Rewrite,
    SessionItem,
    SessionMessage,
    WhenBusy,
    Withdraw,
)
from tokenbus.events.sessions import Fate, SessionRun, session_ref
from tokenbus_services.gateway.audit import Changes
from tokenbus_services.gateway.budgets.holds import named_in, new_hold
from tokenbus_services.gateway.callers import AccessControl, Admitted, Caller
from tokenbus_services.gateway.forward.owners import Owners
from tokenbus_services.gateway.keys.allowed import not_allowed
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.surfaces.contract import NOTE, GatewayNote, TranslationRules
from tokenbus_services.gateway.surfaces.native import check_open, generate_from
from tokenbus_services.pricing import estimated_input
from tokenbus_services.session_summary import summary_request

_SAMPLE = Message(role="user", content="…")
"""Stands for a message when a configuration is checked."""
_OWN_FIELDS = ("type", "id", "messages", "metadata", "traceparent")
"""What is of one request, and no part of what a session's runs are."""
LOOK_S, LONGEST_LOOK_S = 0.01, 0.1
FREE_S = 30.0
"""How long a message that rewrites the history waits for the end of the run that it interrupts."""
_FORCED = ("policies", "webhooks", "record", "deadline_s", "max_tokens")
"""What a key may force."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a client of another protocol has put into a session, and how it is answered."""

    session: str
    append: str
    fate: Fate
    note: GatewayNote
    headers: Mapping[str, str] = {}
    """For the answer."""
    after: int = -1
    """The answer goes on after this event of its run, with which another one ended."""
    decided: Sequence[str] = ()
    """The waits that the client decided, which is what it says."""


class SessionDoor:
    """The sessions of a caller's tenant, and for operators those of any.

    What begins no run takes one of the key's requests, too (`AccessControl.admit_write`). Only deleting, and taking
    back what waits when a client leaves, take none: they make room.
    """

    def __init__(
        self, bus: Client, access: AccessControl, deployment: Deployment, changes: Changes, owners: Owners
    ) -> None:
        self._bus = bus
        self._access = access
        self._deployment = deployment
        self._changes = changes
        self._owners = owners

    # --- every way to write to a session --------------------------------------------------------------------------

    async def append(
        self,
        caller: Caller,
        surface: str,
        name: str,
        item: SessionItem,
        *,
        append: str | None = None,
        metadata: Mapping[str, object] | None = None,
        tenant: str | None = None,
    ) -> tuple[Receipt, Mapping[str, str]]:
        """Put something into a session; returns once it is accepted, with its fate and headers for the answer.

        The same ``append`` again is answered with its fate. Raises Refusal, SessionNotFound, RequestInvalid,
        AppendPending, ServerError.
        """
        session = self._session(caller, name, tenant)
        if append is not None and (fate := await session.fate(append)) is not None:
            if fate.reason == "refused":
                raise RequestInvalid("append", fate.problem or "")
            return Receipt(append, fate), {}
        append = append or new_run_id()
        headers: Mapping[str, str] = {}
        await self._owners.check_run(caller, item)
        match item:
            case Configure():
                receipt = await self._configure(caller, surface, session, item, append)
            case SessionMessage():
                receipt, headers = await self._send(
                    caller, session, item, surface=surface, append=append, metadata=metadata
                )
            case Delete():
                await self._delete(session, session_ref(session.tenant, name), append)
                receipt = Receipt(append, await session.fate(append) or Fate(state="delivered"))
            case Withdraw():
                headers = await self._access.admit_write(caller)
                receipt = await self._withdraw(caller, session, item, append)
            case _:
                if isinstance(item, Rewrite):
                    await self._check_rewrite(caller, session, item)
                headers = await self._access.admit_write(caller)
                receipt = await session.append(item, append=append)
        if not isinstance(item, SessionMessage):
            await self._noted(caller, surface, session, item, receipt)
        return receipt, headers

    async def _noted(self, caller: Caller, surface: str, session: Session, item: SessionItem, receipt: Receipt) -> None:
        if receipt.fate.state != "returned":
            action = f"session.{item.__struct_config__.tag}"
            named = {"session": session.name, "append": receipt.append, "run": receipt.fate.run}
            await self._changes.note(caller, surface, action, **named)

    async def _withdraw(self, caller: Caller, session: Session, item: Withdraw, append: str) -> Receipt:
        receipt = await session.append(item, append=append)
        if receipt.fate.state == "delivered":
            await self._access.withdraw(caller, _place(session, item.append))
        return receipt

    async def _check_rewrite(self, caller: Caller, session: Session, item: Rewrite) -> None:
        """The history passes what messages pass. Raises Refusal, SessionNotFound."""
        config = await session.configuration()
        check_open(_request(config.request, [*item.messages, _SAMPLE]), caller.rules)

    async def _delete(self, session: Session, ref: str, append: str) -> None:
        """Delete the session, then what its runs left elsewhere, as any erasure does."""
        server, keys = self._deployment.server, await self._deployment.keys_of(ref)
        with translated(server):
            made, count = await server.client.hmget(keys.session(ref), ["made", "runs"])
            runs = {SessionRun(ref, made.decode(), n).id for n in range(int(count or 0))} if made else set[str]()
            runs = await with_children(server, keys, runs)  # as long as the runs say which there are
        await session.delete(append=append)
        with translated(server):
            await erase_runs(server, keys, runs, [ref])

    async def say(
        self,
        caller: Caller,
        name: str,
        generate: Generate,
        note: GatewayNote,
        *,
        append: str,
        when_busy: WhenBusy,
        rewrites: bool = False,
    ) -> Said:
        """Put what is new of a conversation into its session, which is made if there is none.

        ``generate`` is the whole request. What follows the model's last message is new. The rest is the history of a
        session that is made, and takes the place of the history that there is if it ``rewrites``. Of a session that
        there is, the run has the history and what its configuration adds to ``generate``, so that is admitted. The
        key's place for the request is held until `left`. Raises as `append`.
        """
        session = self._session(caller, name, None)
        if (fate := await session.fate(append)) is not None:
            return Said(session=name, append=append, fate=fate, note=note)
        await self._owners.check_run(caller, generate)
        before, said = _parted(generate.messages)
        place = _place(session, append)
        hold = new_hold(place)
        note = msgspec.structs.replace(note, key=caller.key, hold=hold)
        request: dict[str, object] = msgspec.to_builtins(generate)
        for field in _OWN_FIELDS:
            request.pop(field, None)
        config = await _configuration(session)
        if config is None:
            whole, history, bound = msgspec.structs.replace(generate, messages=said), before, None
        else:
            whole, bound = _with_configured(request, config, said, caller.rules), config.history
            history = before if rewrites else await self._history(caller, session)
        admission = await self._admitted(caller, note.surface, hold, whole, history=history, bound=bound)
        for field in _FORCED:
            forced = getattr(admission.generate, field)
            if forced != getattr(whole, field) or (config and field in config.request):
                request[field] = forced
        named = {**_own(generate.metadata), NOTE: msgspec.to_builtins(note)}
        try:
            if config is None:
                await session.append(Configure(request=request, messages=before), append=f"{append}.begin")
            elif rewrites:
                await self._rewrite(session, before, append)
            item = SessionMessage(messages=said, request=request, when_busy=when_busy)
            receipt = await session.append(item, append=append, metadata=named)
        except BaseException as e:
            await self._access.withdraw(caller, hold)
            await self._access.leave(caller, place)
            fate = await session.fate(f"{append}.begin") if isinstance(e, RequestInvalid) and config is None else None
            if fate and fate.state == "returned" and await _configuration(session):
                # Another one has made it meanwhile, and this was admitted without what it adds.
                return await self.say(
                    caller, name, generate, note, append=append, when_busy=when_busy, rewrites=rewrites
                )
            raise
        if receipt.fate.state == "returned":
            await self._access.withdraw(caller, hold)
        return Said(session=name, append=append, fate=receipt.fate, note=note, headers=admission.headers)

    async def left(self, caller: Caller, said: Said) -> None:
        """The answer to what was said has ended, in any way."""
        await self._access.leave(caller, named_in(said.note.hold or ""))

    async def _rewrite(self, session: Session, before: list[Message], append: str) -> None:
        """Put these messages in the place of the history, once the open run has ended, which is interrupted."""
        clock, tries = asyncio.get_running_loop().time, 0
        until = clock() + FREE_S
        while (await session.append(Rewrite(messages=before), append=f"{append}.rewrite.{tries}")).fate.reason:
            await session.interrupt(append=f"{append}.free.{tries}")
            tries += 1
            while (await session_info(self._deployment, session.name, session.tenant)).run:
                if clock() > until:
                    why = "the open answer of this conversation does not end"
                    raise Refusal(Problem(status=409, code="session_busy", message=why, kind="invalid_request"))
                await asyncio.sleep(LOOK_S)

    async def take_back(self, caller: Caller, surface: str, name: str, append: str) -> bool:
        """Withdraw a message that waits; whether it did."""
        session, item = self._session(caller, name, None), Withdraw(append=append)
        receipt = await self._withdraw(caller, session, item, new_run_id())
        await self._noted(caller, surface, session, item, receipt)
        return receipt.fate.state == "delivered"

    async def settled(self, caller: Caller, name: str, append: str) -> Fate:
        """The fate of an append once it no longer waits. Raises SessionNotFound if it is not known any more."""
        session, look_s = self._session(caller, name, None), LOOK_S
        while (fate := await session.fate(append)) is not None and fate.state == "appended":
            await asyncio.sleep(look_s)
            look_s = min(2 * look_s, LONGEST_LOOK_S)
        if fate is None:
            raise SessionNotFound(name)
        return fate

    async def steered_turns(self, run: str) -> list[int]:
        """The turns of a session's run that messages went into."""
        return await steered_turns(self._deployment, run)

    async def fork(
        self,
        caller: Caller,
        surface: str,
        name: str,
        to: str,
        *,
        through: str | None,
        append: str | None,
        tenant: str | None = None,
    ) -> Mapping[str, str]:
        """Begin another session of the tenant. Returns headers of the answer. Raises Refusal, SessionNotFound,
        RequestInvalid, ServerError.
        """
        headers = await self._access.admit_write(caller)
        await self._session(caller, name, tenant).fork(to, through=through, append=append)
        await self._changes.note(caller, surface, "session.fork", session=name, to=to)
        return headers

    async def _configure(self, caller: Caller, surface: str, session: Session, item: Configure, append: str) -> Receipt:
        """Set what the key may ask for, with the fields that it forces. Nothing begins, so nothing stays reserved."""
        request = {**item.request, "metadata": _own(item.request.get("metadata"))}
        if not request["metadata"]:
            del request["metadata"]
        messages = [*item.messages, _SAMPLE]
        generate = generate_from({**request, "messages": msgspec.to_builtins(messages)}, caller.rules)
        hold = new_hold(_place(session, append))
        admission = await self._admitted(caller, surface, hold, generate, history=[], bound=item.history)
        await self._access.withdraw(caller, hold)
        await self._access.leave(caller, named_in(hold))
        request |= {"provider": generate.provider, "model": generate.model}
        if generate.fallback:
            request["fallback"] = msgspec.to_builtins(generate.fallback)
        for field in _FORCED:
            if (forced := getattr(admission.generate, field)) != getattr(generate, field):
                request[field] = forced
        return await session.append(msgspec.structs.replace(item, request=request), append=append)

    async def _send(
        self,
        caller: Caller,
        session: Session,
        item: SessionMessage,
        *,
        surface: str,
        append: str,
        metadata: Mapping[str, object] | None,
    ) -> tuple[Receipt, Mapping[str, str]]:
        config = await session.configuration()
        said = item.messages or [Message(role=item.role, content=item.content, participant=item.participant)]
        generate = _request({**config.request, **item.request}, said)
        check_open(generate, caller.rules)
        if not item.run:  # nothing begins
            headers = await self._access.admit_write(caller)
            return await session.append(item, append=append, metadata=_own(metadata)), headers
        history = await self._history(caller, session)
        hold = new_hold(_place(session, append))
        admission = await self._admitted(caller, surface, hold, generate, history=history, bound=config.history)
        note = GatewayNote(
            surface=surface,
            version=1,
            created=int(time.time()),
            model=f"{generate.provider}/{generate.model}",
            key=caller.key,
            hold=hold,
        )
        named = {**_own(metadata), NOTE: msgspec.to_builtins(note)}
        try:
            if forced := [name for name in _FORCED if getattr(admission.generate, name) != getattr(generate, name)]:
                why = f"this key forces {forced[0]!r}: configure the session with this key first"
                raise not_allowed(forced[0], why, "session_not_of_key")
            receipt = await session.append(item, append=append, metadata=named)
        except (Refusal, RequestInvalid):
            await self._access.withdraw(caller, hold)
            raise
        finally:
            await self._access.leave(caller, named_in(hold))
        if receipt.fate.state == "returned" or not item.run:  # it costs nothing
            await self._access.withdraw(caller, hold)
        return receipt, admission.headers

    async def _admitted(
        self,
        caller: Caller,
        surface: str,
        hold: str,
        generate: Generate,
        *,
        history: list[Message],
        bound: HistoryBound | None,
    ) -> Admitted:
        """Admit the request of a run, which has the history too, and the summary that the run may ask for."""
        asked = msgspec.structs.replace(generate, id=named_in(hold), messages=[*history, *generate.messages])
        return await self._access.admit(caller, surface, asked, hold=hold, summary=_summary(bound, generate, history))

    async def _history(self, caller: Caller, session: Session) -> list[Message]:
        """What a budget must hold besides the message. Nothing else needs it."""
        return await session.messages() if caller.has_budget else []

    # --- sessions that there are ----------------------------------------------------------------------------------

    async def follow(
        self, caller: Caller, name: str, *, after: SessionCursor | None, live: bool, tenant: str | None = None
    ) -> AsyncGenerator[SessionStep]:
        """The session's events, see `Session.follow`; raises at once what that raises for the cursor."""
        session = self._session(caller, name, tenant)
        await session.check(after)
        return session.follow(after=after, live=live)

    async def now(self, caller: Caller, name: str) -> SessionCursor:
        """See `Session.now`."""
        return await self._session(caller, name, None).now()

    async def info(self, caller: Caller, name: str, *, tenant: str | None = None) -> SessionInfo:
        """Raises SessionNotFound, RequestInvalid, ServerError."""
        session = self._session(caller, name, tenant)
        return await session_info(self._deployment, session.name, session.tenant)

    async def configuration(self, caller: Caller, name: str, *, tenant: str | None = None) -> Configure:
        """See `Session.configuration`."""
        return await self._session(caller, name, tenant).configuration()

    async def messages(
        self, caller: Caller, name: str, *, tenant: str | None = None, runs: bool = True
    ) -> list[Message]:
        """See `Session.messages`."""
        return await self._session(caller, name, tenant).messages(runs=runs)

    async def history_bytes(self, caller: Caller, name: str, *, tenant: str | None = None) -> int:
        """About the size of what `messages` returns. Raises ServerUnavailable."""
        session = self._session(caller, name, tenant)
        return await history_bytes(self._deployment, session_ref(session.tenant, session.name))

    async def fate(self, caller: Caller, name: str, append: str, *, tenant: str | None = None) -> Fate | None:
        """See `Session.fate`."""
        return await self._session(caller, name, tenant).fate(append)

    def _session(self, caller: Caller, name: str, tenant: str | None) -> Session:
        """The session of that name. Another tenant's is for operators; for others there is none."""
        return self._bus.session(name, tenant=tenant if tenant is not None and caller.operator else caller.tenant)


def _place(session: Session, append: str) -> str:
    """What an append is called before it has a run; the id of no run."""
    return f"append {session_ref(session.tenant, session.name)} {append}"


async def _configuration(session: Session) -> Configure | None:
    try:
        return await session.configuration()
    except SessionNotFound:
        return None


def _summary(bound: HistoryBound | None, request: Generate, history: list[Message]) -> Generate | None:
    """The request that summarises the history, if a run of the session may make one; see `AccessControl.admit`."""
    if bound is None or bound.how != "summary":
        return None
    summary = summary_request(bound, request, history)
    if estimated_input(Generate(provider=request.provider, model=request.model, messages=history)) <= bound.tokens:
        summary = msgspec.structs.replace(summary, messages=[])
    # Unless the bound names who summarises, it is the model that answers.
    return summary if bound.model else msgspec.structs.replace(summary, fallback=request.fallback)


def _with_configured(
    request: Mapping[str, object], config: Configure, said: list[Message], rules: TranslationRules
) -> Generate:
    """The request of the run that a message with these fields begins. Raises Refusal for what is configured and the key
    may not use.
    """
    # Which webhooks are told is decided by the key alone.
    added = {name: value for name, value in config.request.items() if name not in request and name != "webhooks"}
    whole = _request({**added, **request}, said)
    # The surface has checked what the client asks for by its own rules.
    asked = {name: None for name in ("extra", "fallback", "system") if name not in added}
    tools = whole.tools if "tools" in added else []
    check_open(msgspec.structs.replace(whole, messages=[], tools=tools, **asked), rules)
    return whole


def _request(fields: Mapping[str, object], messages: list[Message]) -> Generate:
    generate = request_from({**fields, "type": "generate", "messages": msgspec.to_builtins(messages)})
    assert isinstance(generate, Generate)
    return generate


def _parted(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """A conversation as its history and what is new: all that follows the model's last message, or that itself."""
    new = next((n for n, message in enumerate(reversed(messages)) if message.role == "assistant"), len(messages)) or 1
    return messages[:-new], messages[-new:]


def _own(metadata: object) -> dict[str, object]:
    """A client's metadata, without what the gateway sets."""
    given = cast("dict[str, object]", metadata) if isinstance(metadata, dict) else {}
    return {name: value for name, value in given.items() if name not in (NOTE, "tenant")}
