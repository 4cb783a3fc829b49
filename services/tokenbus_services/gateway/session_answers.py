"""The answer to what a client has said in a session: a part of a run.

A message that starts a run is answered by that run, from its beginning. One that steers is answered by the run's turns
from where it went in, and the answer before ends there. So each message has one answer, in the order of the
conversation, and a protocol whose clients wait for the answer to their request can queue and steer. What an answer is
follows from the logs alone: any gateway gives it again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from tokenbus.events.public import Completed, PublicEvent, Started, Timing
from tokenbus_services.gateway.answers.answer import RunOfAnswer, StreamedAnswer
from tokenbus_services.gateway.audit import AuditedRun
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.runs import GONE
from tokenbus_services.gateway.session_door import Said
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayNote
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
        if said.fate.state == "returned":
            raise returned(said.fate.reason or "", said.fate.problem)

    @property
    def note(self) -> GatewayNote:
        """For the encoder."""
        return self.said.note

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
        follow = self._gateway.follow(self._surface, self.run, self._caller.key)
        async with aclosing(follow) as events:
            async for event in events:
                if event.turn < self.turn and not isinstance(event, Started):
                    continue
                if event.turn > newest:
                    steered = await sessions.steered_turns(self.run)
                    if any(newest < turn <= event.turn for turn in steered):
                        yield _parted(event)
                        return
                    newest = event.turn
                yield event

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


def _parted(event: PublicEvent) -> PublicEvent:
    """The end of an answer whose run goes on with another one."""
    timing = Timing(total_ms=0)
    return Completed(run=event.run, seq=event.seq, turn=event.turn, attempt=event.attempt, finish="stop", timing=timing)
