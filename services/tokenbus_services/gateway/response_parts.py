"""Responses of runs that wait for their clients: where each ends, and the decisions with which a client goes on.

A part of a run is a response of its own; see `surfaces.openai_responses.parts`. Everything follows from the run's log
and what it still waits for, so any gateway goes on with it, days later.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from tokenbus.errors import AlreadyDecided
from tokenbus.events.public import BlockComplete, PublicEvent, Resumed, Waiting
from tokenbus.events.requests import Approval, WaitDecision
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.parked import decision_of, no_wait, parted
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.gateway.runs import GatewayRuns
from tokenbus_services.gateway.surfaces.contract import GivenAnswer
from tokenbus_services.gateway.surfaces.fields import Json
from tokenbus_services.gateway.surfaces.openai_responses.parts import (
    KINDS,
    Asked,
    Parts,
    approval_id,
    given_in,
    response_id,
    says_more,
)
from tokenbus_services.gateway.surfaces.owed_calls import OwedCalls, call_name

_MARK = re.compile(rb'"mcp_approval_response"|"wait_')
"""In a body that may answer what a run waits for."""


class Rest(msgspec.Struct, frozen=True):
    """The response with which a run goes on after what its client has decided."""

    run: str
    part: int


async def of_part(
    runs: GatewayRuns, run: str, part: int, events: AsyncGenerator[PublicEvent]
) -> AsyncGenerator[PublicEvent]:
    """A run's events up to the end of one part. A part that ends because the run waits ends with `completed`."""
    parts = Parts()
    async with aclosing(events):
        async for event in events:
            number = parts.feed(event)
            if number > part:
                yield parted(event, "tool_use", seq=event.seq)
                return
            yield event
            if number == part and parts.asks and await _is_all(runs, run, parts):
                yield parted(event, "tool_use", seq=event.seq + 1)
                return


async def _is_all(runs: GatewayRuns, run: str, parts: Parts) -> bool:
    """Whether the log has all that the run waits for."""
    return {info.wait for info in await runs.waits.of_run(run)} <= parts.parking.seen


async def begun(runs: GatewayRuns, run: str, part: int, wait_s: float) -> None:
    """Wait until a part has begun, or not longer than this."""
    parts = Parts()
    try:
        async with asyncio.timeout(wait_s), aclosing(runs.follow(run)) as events:
            async for event in events:
                if parts.feed(event) >= part:
                    return
    except TimeoutError:
        pass


def may_answer(data: bytes) -> bool:
    """Whether a body may answer what a run waits for; `decide` tells."""
    return _MARK.search(data) is not None


async def decide(runs: GatewayRuns, caller: Caller, body: Json) -> Rest | None:
    """Decide what the end of a request's input answers; None if that answers nothing that a run here asked.

    Raises Refusal: 404 for a run that is not the caller's; 400 if the request says anything else, or leaves something
    unanswered; 409 if it was decided otherwise. Raises ServerError.
    """
    items = _objects(body.get("input"))
    given = given_in(items)
    if not given:
        return None
    run = _run_of(given[-1])
    if any(_run_of(each) != run for each in given):
        raise invalid("input", "answers requests of several responses")
    run = (await runs.owned(run, caller)).id
    if says_more(items):
        raise invalid("input", "a request that answers what a response asks says nothing else: say it afterwards")
    events = await runs.stored(run)
    part, asked, there = _asked(events, given)
    if not there:
        why = "the response that asks has not ended yet"
        raise Refusal(Problem(status=409, code="response_not_ended", message=why, kind="invalid_request", run=run))
    answers = {wait: each for each in given if (wait := _wait_of(each)) in asked}
    still = {info.wait for info in await runs.waits.of_run(run)}
    if left := [_name(run, wait) for name, wait in asked.items() if name in still and name not in answers]:
        raise invalid("input", f"answers not all requests of the response: {', '.join(left)}")
    known = {event.decision_id for event in events if isinstance(event, Resumed)}
    for wait, each in answers.items():
        decision = decision_of(run, asked[wait], each)
        if decision.decision_id not in known:
            await _decide(runs, caller, decision)
    return Rest(run, part + 1)


async def _decide(runs: GatewayRuns, caller: Caller, decision: WaitDecision) -> None:
    try:
        await runs.waits.decide(caller, "openai", decision)
    except AlreadyDecided as e:  # it may have been somebody else, who wants the same
        if not isinstance(decision, Approval) or e.fate.decision != decision.decision:
            raise


def _run_of(given: GivenAnswer) -> str:
    return given.name.rpartition(":")[0]


def _wait_of(given: GivenAnswer) -> str:
    return given.name.rpartition(":")[2]


def _name(run: str, wait: Waiting) -> str:
    return (approval_id if wait.what == "approval" else call_name)(run, wait.wait)


def _asked(events: Sequence[PublicEvent], given: Sequence[GivenAnswer]) -> tuple[int, dict[str, Waiting], bool]:
    """The part that asks for the last answer, all that it asks, and whether it is over. Raises Refusal (404)."""
    parts, by_part, last = Parts(), dict[int, dict[str, Waiting]](), 0
    for event in events:
        last = parts.feed(event)
        if isinstance(event, Waiting) and event.what in KINDS:
            by_part.setdefault(last, {})[event.wait] = event
    waits = {wait: event for asked in by_part.values() for wait, event in asked.items()}
    for each in given:
        wait = waits.get(_wait_of(each))
        if wait is None or (wait.what == "approval") != (each.approved is not None):
            raise no_wait(each)
    part, asked = next((n, asked) for n, asked in by_part.items() if _wait_of(given[-1]) in asked)
    return part, asked, last > part or parts.asks


def answers_of(run: str, part: int, events: Sequence[PublicEvent]) -> list[Json]:
    """The input of a later part: what was decided before it."""
    parts, asked, owed, found = Parts(), Asked(run), OwedCalls(), list[Json]()
    for event in events:
        number, item = parts.feed(event), None
        owed.feed(event)
        match event:
            case Waiting(what="tool_result"):
                asked.owe(event, owed.calls[-1])
            case Resumed(what="approval"):
                item = asked.decided(event)
            case BlockComplete(kind="tool_result"):
                item = asked.output(event)
            case _:
                pass
        found += [item] if item and number == part else []
    return found


def last_part(events: Sequence[PublicEvent]) -> int:
    """The part that the log ends in."""
    parts = Parts()
    return max((parts.feed(event) for event in events), default=0)


def name_of(rest: Rest) -> str:
    """The id of the response."""
    return response_id(rest.run, rest.part)


def _objects(value: object) -> list[Json]:
    found: list[Any] = cast("list[Any]", value) if isinstance(value, list) else []
    return [cast("Json", item) if isinstance(item, dict) else {} for item in found]
