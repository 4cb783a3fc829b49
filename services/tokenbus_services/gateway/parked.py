"""Runs that wait for their clients: where an answer ends because of that, and how the next one goes on there.

Protocols without a way back in an open answer end it where the run waits, and send what the client decided as another
request. The answer to that is the rest of the run. Where an answer ends follows from the run's log and from what it
still waits for, so any gateway finds it again, days later.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress
from hashlib import sha256
from typing import Any, cast

import msgspec

from tokenbus.errors import SessionNotFound, TokenbusError
from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import Completed, PublicEvent, Resumed, Started, Timing, UsageReported, Waiting
from tokenbus.events.requests import Answer, Approval, ToolResult, WaitDecision
from tokenbus.events.sessions import session_ref, session_run
from tokenbus.events.usage import Usage
from tokenbus.events.waits import Door, WaitKind
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.problem import Problem, Refusal, invalid, of_exception
from tokenbus_services.gateway.runs import GatewayRuns
from tokenbus_services.gateway.surfaces.contract import GivenAnswer, wait_name
from tokenbus_services.gateway.surfaces.owed_calls import call_name
from tokenbus_services.gateway.surfaces.parking import Parking, seq_of

MAX_REASON = 4000
"""Characters of a reason; the rest is left out."""
GONE_ON = "its client has gone on without it"
"""Reason of a cancel because a client gave a result together with something new."""


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """What a client decides of one run."""

    run: str
    after: int
    """The client has the run up to this seq."""
    sent: list[WaitDecision]

    @property
    def waits(self) -> list[str]:
        return [each.wait for each in self.sent]


class ParkedRuns:
    """Decides what runs of a conversation wait for, by what its client sends. ``door``: for the log."""

    def __init__(self, runs: GatewayRuns, door: Door) -> None:
        self._runs = runs
        self._door: Door = door

    async def find(
        self, caller: Caller, session: str, given: Sequence[GivenAnswer], *, open_only: bool = False
    ) -> Decisions | None:
        """What the client decides of a run of this session; None if nothing.

        ``open_only``: leave out what is decided already. Else raises Refusal (404) for a name that no run of the
        session waits for. Raises ServerError.
        """
        if not given:
            return None
        ref, runs = session_ref(caller.tenant, session), dict[str, None]()
        for each in given:
            run = each.name.rpartition(":")[0] if each.name else each.run
            known = session_run(run) if run else None
            if known is not None and known.ref == ref:
                runs[run] = None
            elif each.name and not open_only:
                raise no_wait(each)
        if not runs:
            try:
                info = await self._runs.sessions.info(caller, session)
            except SessionNotFound:
                return None
            if info.run is None:
                return None
            runs[info.run] = None
        run = next(reversed(runs))
        events = await self._runs.stored(run)
        asked = {event.wait: event for event in events if isinstance(event, Waiting)}
        still = {info.wait for info in await self._runs.waits.of_run(run)} if open_only else set(asked)
        found: dict[str, WaitDecision] = {}
        for each in given:
            wait = _wait_of(each, run, asked)
            if wait is None and each.name and not open_only:
                raise no_wait(each)
            if wait is not None and wait.wait in still and wait.wait not in found:
                found[wait.wait] = decision_of(run, wait, each)
        return Decisions(run=run, after=seq_of(events, found), sent=[*found.values()]) if found else None

    async def of_calls(self, caller: Caller, given: Sequence[GivenAnswer]) -> Decisions:
        """What the client decides of the run that its calls name.

        Raises Refusal: 404 for calls that no run of the caller waits for; 400 for those of several runs, and if one
        that it got with them is left out. Raises ServerError.
        """
        named = given[0].name.rpartition(":")[0]
        try:
            run = (await self._runs.owned(named, caller)).id
        except Refusal as e:
            raise (no_wait(given[0]) if e.problem.status == 404 else e) from None
        events = await self._runs.stored(run)
        asked = {event.wait: event for event in events if isinstance(event, Waiting) and event.what == "tool_result"}
        found: dict[str, WaitDecision] = {}
        for each in given:
            if each.name.rpartition(":")[0] != named:
                raise invalid(each.at, "gives results of calls of several runs")
            if (wait := _wait_of(each, run, asked)) is None:
                raise no_wait(each)
            found.setdefault(wait.wait, decision_of(run, wait, each))
        after, parking = seq_of(events, found), Parking()
        for event in events:
            if event.seq <= after:
                parking.feed(event)
        still = {info.wait for info in await self._runs.waits.of_run(run)}
        shown = [wait for wait in parking.open if wait.what == "tool_result" and wait.wait in still]
        if left := [call_name(run, wait.wait) for wait in shown if wait.wait not in found]:
            raise invalid(given[0].at, f"not all calls of the answer have a result: {', '.join(left)} has none")
        known = {event.decision_id for event in events if isinstance(event, Resumed)}
        return Decisions(run=run, after=after, sent=[each for each in found.values() if each.decision_id not in known])

    async def go_on_without(self, caller: Caller, given: Sequence[GivenAnswer]) -> None:
        """The client has said something else with its results, which begins a new run: cancel the one that waits for
        them. Raises Refusal, ServerError.
        """
        for named in dict.fromkeys(each.name.rpartition(":")[0] for each in given):
            try:
                run = (await self._runs.owned(named, caller)).id
            except Refusal as e:
                if e.problem.status != 404:
                    raise
                continue  # it is over for long, and only a part of the conversation
            waits = {wait_name(run, info.wait) for info in await self._runs.waits.of_run(run)}
            if not waits.isdisjoint(each.name for each in given):
                await self._runs.cancel(run, GONE_ON)

    async def send(self, caller: Caller, decisions: Decisions) -> Refusal | None:
        """Send all of them; return why the first did not count that did not. What is sent again counts again."""
        refused: Refusal | None = None
        for decision in decisions.sent:
            try:
                await self._runs.waits.decide(caller, self._door, decision)
            except Refusal as e:
                refused = refused or e
            except TokenbusError as e:
                refused = refused or Refusal(of_exception(e))
        return refused


class Park:
    """Where an answer ends because its run waits for nothing but its client. Feed it the run's events from seq 0."""

    def __init__(
        self, runs: GatewayRuns, run: str, kinds: Collection[WaitKind], *, after: int = -1, decided: Sequence[str] = ()
    ) -> None:
        """``kinds``: what the client can decide. ``after``: it has the run up to this seq. ``decided``: what it has
        decided, without which the answer does not end.
        """
        self._runs = runs
        self._run = run
        self._kinds = kinds
        self._after = after
        self._decided = frozenset(decided)
        self._parking = Parking()

    def feed(self, event: PublicEvent) -> None:
        self._parking.feed(event)

    async def ends_at(self, event: PublicEvent) -> bool:
        """Whether the answer ends after this event, which was fed. Raises ServerError."""
        if event.seq <= self._after or not self._kinds or self._parking.first is None:
            return False
        if not self._parking.decided >= self._decided:
            return False
        return self._parking.is_parked(await self._runs.waits.of_run(self._run), self._kinds)


async def until_parked(
    runs: GatewayRuns,
    run: str,
    kinds: Collection[WaitKind],
    events: AsyncGenerator[PublicEvent],
    *,
    after: int = -1,
    decided: Sequence[str] = (),
) -> AsyncGenerator[PublicEvent]:
    """A run's events for one answer: `started`, then those after ``after``, up to where the run waits for its client.
    Such an answer ends with `completed`. The end has the usage of these events alone. As `Park`.
    """
    park, usage = Park(runs, run, kinds, after=after, decided=decided), Usage()
    async with aclosing(events):
        async for event in events:
            park.feed(event)
            if event.seq <= after and not isinstance(event, Started):
                continue
            if isinstance(event, UsageReported):
                usage = usage.plus(event.usage)
            own = isinstance(event, Completed) and after >= 0
            yield msgspec.structs.replace(event, usage=usage) if own else event
            if await park.ends_at(event):
                yield parted(event, "tool_use", seq=event.seq + 1, usage=usage)
                return


def parted(event: PublicEvent, finish: FinishReason, *, seq: int, usage: Usage | None = None) -> PublicEvent:
    """The end of an answer whose run goes on with another one."""
    timing = Timing(total_ms=0)
    return Completed(
        run=event.run, seq=seq, turn=event.turn, attempt=event.attempt, finish=finish, usage=usage, timing=timing
    )


def _wait_of(given: GivenAnswer, run: str, asked: dict[str, Waiting]) -> Waiting | None:
    """The wait of a run that a client answers; of several of one call, the newest that fits."""
    if given.name:
        of, _, wait = given.name.rpartition(":")
        return asked.get(wait) if of == run else None
    fits = [wait for wait in asked.values() if wait.tool_id == given.tool_id and wait.what == "tool_result"]
    return fits[-1] if fits else None


def decision_of(run: str, wait: Waiting, given: GivenAnswer) -> WaitDecision:
    """The decision on a wait. What the client sends again has the same id. Raises Refusal."""
    said = msgspec.json.encode([run, wait.wait, msgspec.structs.replace(given, at="")], order="sorted")
    named: dict[str, Any] = {"run": run, "wait": wait.wait, "decision_id": sha256(said).hexdigest()[:32]}
    match wait.what:
        case "approval":
            if given.approved is None and not given.left:
                raise invalid(given.at, "an approval must say whether it is `approved`: true or false")
            allowed = given.approved is True
            reason = None if allowed or given.reason is None else given.reason[:MAX_REASON]
            return Approval(
                decision="allow" if allowed else "deny",
                reason=reason,
                arguments=given.arguments if allowed else None,
                **named,
            )
        case "answer":
            if given.left or given.approved is False:
                return Answer(decision="cancel" if given.left else "decline", **named)
            return Answer(decision="accept", content=cast("dict[str, object]", given.content or {}), **named)
        case "tool_result":
            return ToolResult(content=_result(given, wait), is_error=given.is_error, **named)


def _result(given: GivenAnswer, wait: Waiting) -> object:
    """What the tool returned. Of a tool with a schema, a text that is JSON is that value, unless it wants a text."""
    if isinstance(given.content, str) and wait.schema and wait.schema.get("type") != "string" and not given.is_error:
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(given.content)
    return given.content


def no_wait(given: GivenAnswer) -> Refusal:
    """No run of this conversation waits for what the client answers."""
    why = f"nothing in this conversation waits for {given.name or given.tool_id!r:.200}"
    return Refusal(Problem(status=404, code="wait_not_found", message=why, kind="not_found", param=given.at))
