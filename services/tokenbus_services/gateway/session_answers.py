"""The answer to what a client has said in a session: a part of a run.

A message that starts a run is answered by that run, from its beginning. One that steers is answered by the run's turns
from where it went in, and the answer before ends there. What a client decides is answered by what the run does then, if
the protocol's answers end where a run waits for that. So each message has one answer, in the order of the
conversation, and a protocol whose clients wait for the answer to their request can queue and steer. What an answer is
follows from the logs alone: any gateway gives it again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from tokenbus.events.public import PublicEvent, Started
from tokenbus.events.requests import WhenBusy
from tokenbus.events.sessions import Fate
from tokenbus.events.waits import Door
from tokenbus_services.gateway.answers.answer import RunOfAnswer, StreamedAnswer
from tokenbus_services.gateway.audit import AuditedRun
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.known_answers import KnownAnswer, KnownAnswers
from tokenbus_services.gateway.parked import Decisions, Park, ParkedRuns, parted
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.runs import GONE
from tokenbus_services.gateway.session_door import Said
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayNote, GatewayRequest, Translated
from tokenbus_services.gateway.surfaces.surface import Surface

_RETURNED = {
    "busy": (409, "session_busy", "another answer of this conversation is open"),
    "queue_full": (429, "queue_full", "too many messages of this conversation wait"),
    "withdrawn": (409, "message_withdrawn", "the message was withdrawn before it was answered"),
}


class SessionAnswer:
    """One answer. `run` and `turn` are known once the message has been delivered."""

    def __init__(self, gateway: Gateway, surface: Surface, caller: Caller, said: Said) -> None:
        """Raises Refusal if it was returned already."""
        self.said = said
        self.run = said.fate.run
        self.turn = said.fate.turn or 0
        self._gateway = gateway
        self._surface = surface
        self._caller = caller
        self._joined_at = -1
        if said.fate.state == "returned":
            raise returned(said.fate.reason or "", said.fate.problem)

    @property
    def note(self) -> GatewayNote:
        """For the encoder."""
        return self.said.note

    async def join(self) -> PublicEvent | None:
        """Let the answer go beyond the places where its run waited before now; return the newest event of the run."""
        last = await self._gateway.runs.last_event(self.run) if self.run else None
        self._joined_at = last.seq if last else -1
        return last

    async def events(self) -> AsyncGenerator[PublicEvent]:
        """The events of the answer, the run's `started` first. Waits for its beginning, without end.

        Raises Refusal if the message is returned; and as `Client.follow`.
        """
        sessions, said = self._gateway.runs.sessions, self.said
        fate = said.fate
        if fate.state == "appended":
            fate = await sessions.settled(self._caller, said.session, said.append)
        if fate.run is None:
            raise returned(fate.reason or "", fate.problem)
        self.run, self.turn = fate.run, fate.turn or 0
        newest = self.turn
        kinds, after = self._surface.waits_for(said.note), max(said.after, self._joined_at - 1)
        park = Park(self._gateway.runs, self.run, kinds, after=after, decided=said.decided)
        follow = self._gateway.follow(self._surface, self.run, self._caller.key)
        async with aclosing(follow) as events:
            async for event in events:
                park.feed(event)
                if event.turn < self.turn and not isinstance(event, Started):
                    continue
                if event.seq <= said.after:
                    newest = event.turn
                if event.turn > newest:
                    steered = await sessions.steered_turns(self.run)
                    if any(newest < turn <= event.turn for turn in steered):
                        yield parted(event, "stop", seq=event.seq)
                        return
                    newest = event.turn
                yield event
                if await park.ends_at(event):
                    yield parted(event, "tool_use", seq=event.seq + 1)
                    return

    async def stop(self, reason: str) -> bool:
        """Cancel the run that answers, or take the message back; whether there was something to stop."""
        sessions, said = self._gateway.runs.sessions, self.said
        if self.run is None:
            return await sessions.take_back(self._caller, self._surface.name, said.session, said.append)
        await self._gateway.runs.cancel(self.run, reason)
        if reason != GONE:
            await self._gateway.runs.changes.note(self._caller, self._surface.name, "cancel", run=self.run)
        return True

    def left(self) -> None:
        """The answer has ended, in any way."""
        self._gateway.runs.left(self._caller, self.said)

    def stop_later(self, reason: str) -> None:
        """The same in a task of its own, which outlives the request that asks for it."""
        self._gateway.runs.later(self.said.append, self.stop(reason))

    def streamed(
        self, encoder: Callable[[PublicEvent], Encoder], *, early: bool = True, cancels: bool = False
    ) -> StreamedAnswer:
        """As the answer to an HTTP request. ``early``, ``encoder``: as for `StreamedAnswer`. ``cancels``: it stops if
        its client disconnects.
        """
        surface, use = self._surface, AuditedRun(run=self.run, model=self.note.model)
        headers = dict(self.said.headers)
        if self.note.left_out:
            headers["x-tokenbus-left-out"] = ", ".join(self.note.left_out)
        how = RunOfAnswer(
            run=self.run or "",
            events=use.watched(self.events()),
            refusal=surface.refusal,
            headers={**headers, **surface.stream_headers},
            on_client_gone=(lambda: self.stop_later(GONE)) if cancels else None,
            on_end=self.left,
            times=self._gateway.times,
            use=use,
        )
        return StreamedAnswer(
            how, encoder=encoder, media_type=surface.media_type, keep_alive=surface.keep_alive, early=early
        )


def returned(reason: str, problem: str | None = None) -> Refusal:
    """What was said has had no effect."""
    status, code, why = _RETURNED.get(reason, (400, f"message_{reason or 'returned'}", problem or "it was returned"))
    kind = "rate_limit" if status == 429 else "invalid_request"
    return Refusal(Problem(status=status, code=code, message=why, kind=kind))


class Told(NamedTuple):
    """A request of a client, in a conversation that it names. ``name``: under which it finds the answer again."""

    caller: Caller
    asked: GatewayRequest
    translated: Translated
    session: str
    name: str


class Conversations:
    """What clients say in the conversations of one surface, each of which is a session, and the answers to it."""

    def __init__(self, gateway: Gateway, surface: Surface, *, kind: str, door: Door, keeps_body: bool = False) -> None:
        """``kind``: of the keys of known answers. ``door``: for the log. ``keeps_body``: see `KnownAnswer.body`."""
        self.gateway = gateway
        self._surface = surface
        self._keeps_body = keeps_body
        self._answers = KnownAnswers(kind, server=gateway.runs.server, keys=gateway.runs.keys)
        self._parked = ParkedRuns(gateway.runs, door)

    async def decided(self, told: Told) -> Decisions | None:
        """What a request decides of what the conversation's run waits for. Raises Refusal, ServerError."""
        given, only = told.translated.given, told.translated.only_answers
        return await self._parked.find(told.caller, told.session, given, open_only=not only)

    async def go_on(self, told: Told, decided: Decisions) -> SessionAnswer:
        """Decide what a run waits for; the answer is the rest of the run. Raises Refusal, ServerError."""
        refused = await self._parked.send(told.caller, decided)
        known = KnownAnswer(
            session=told.session,
            append="",
            note=self.gateway.runs.note(self._surface, told.translated),
            run=decided.run,
            after=decided.after,
            decided=decided.waits,
            missed=refused is not None,
        )
        await self._keep(told, known)
        if refused:
            raise refused
        return SessionAnswer(self.gateway, self._surface, told.caller, _said(known, None))

    async def say(
        self, told: Told, decided: Decisions | None, *, append: str | None, when_busy: WhenBusy, rewrites: bool
    ) -> SessionAnswer:
        """Say what is new in a request. Raises Refusal, TokenbusError."""
        said = await self.gateway.runs.say(
            *(told.caller, self._surface, told.asked, told.translated),
            session=told.session,
            append=append,
            when_busy=when_busy,
            rewrites=rewrites,
        )
        try:
            answer = SessionAnswer(self.gateway, self._surface, told.caller, said)
            await self._keep(told, KnownAnswer(session=said.session, append=said.append, note=said.note))
            if decided:  # after the message, which goes in before the run goes on
                await self._parked.send(told.caller, decided)
        except BaseException:
            self.gateway.runs.left(told.caller, said)
            raise
        return answer

    async def _keep(self, told: Told, known: KnownAnswer) -> None:
        if self._keeps_body:
            known = msgspec.structs.replace(known, body=told.asked.body)
        await self._answers.put(told.caller.tenant, told.name, known)

    async def find(self, caller: Caller, name: str) -> tuple[KnownAnswer, Said] | None:
        """What a client has said earlier; None if it is known no more. One that comes back gets all of the answer.
        Raises ServerError.
        """
        known = await self._answers.get(caller.tenant, name)
        if known is None:
            return None
        if known.run:
            return known, _said(msgspec.structs.replace(known, after=-1), None)
        fate = await self.gateway.runs.sessions.fate(caller, known.session, known.append)
        return (known, _said(known, fate)) if fate else None


def _said(known: KnownAnswer, fate: Fate | None) -> Said:
    """``fate``: None for an answer that goes on where another one ended."""
    fate = fate or Fate(state="delivered", run=known.run)
    session, append, note, decided = known.session, known.append, known.note, known.decided
    return Said(session=session, append=append, fate=fate, note=note, after=known.after, decided=decided)
