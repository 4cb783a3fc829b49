"""Runs that wait for their clients: where an answer ends because of that, and how the next one goes on there.

Protocols without a way back in an open answer end it where the run waits, and send what the client decided as another
request. The answer to that is the rest of the run. Where an answer ends follows from the run's log and from what it
still waits for, so any gateway finds it again, days later.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, cast

import msgspec

from tokenbus.errors import SessionNotFound, TokenbusError
from tokenbus.events.public import Waiting
from tokenbus.events.requests import Answer, Approval, ToolResult, WaitDecision
from tokenbus.events.sessions import session_ref, session_run
from tokenbus.events.waits import Door
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.problem import Problem, Refusal, invalid, of_exception
from tokenbus_services.gateway.runs import GatewayRuns
from tokenbus_services.gateway.surfaces.contract import GivenAnswer
from tokenbus_services.gateway.surfaces.parking import seq_of

MAX_REASON = 4000
"""Characters of a reason; the rest is left out."""


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
            return ToolResult(content=given.content, is_error=given.is_error, **named)


def no_wait(given: GivenAnswer) -> Refusal:
    """No run of this conversation waits for what the client answers."""
    why = f"nothing in this conversation waits for {given.name or given.tool_id!r:.200}"
    return Refusal(Problem(status=404, code="wait_not_found", message=why, kind="not_found", param=given.at))
