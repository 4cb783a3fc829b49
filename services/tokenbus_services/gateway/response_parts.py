"""Responses of runs that wait for leave: where each ends, and the decisions with which a client goes on.

A part of a run is a response of its own; see `surfaces.openai_responses.parts`. Everything follows from the run's log
and what it still waits for, so any gateway goes on with it, days later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from tokenbus.errors import AlreadyDecided
from tokenbus.events.public import Completed, PublicEvent, Resumed, Timing, Waiting
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.parked import decision_of
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.gateway.runs import GatewayRuns
from tokenbus_services.gateway.surfaces.contract import GivenAnswer
from tokenbus_services.gateway.surfaces.fields import Json
from tokenbus_services.gateway.surfaces.openai_responses.parts import (
    Asked,
    Given,
    Parts,
    approval_id,
    given_in,
    response_id,
)

MARK = b'"mcp_approval_response"'
"""In a body that may answer a request for leave."""
_ASKS = ("mcp_approval_request", "item_reference")


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
                yield _parted(event, event.seq)
                return
            yield event
            if number == part and parts.asks and await _is_all(runs, run, parts):
                yield _parted(event, event.seq + 1)
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


async def decide(runs: GatewayRuns, caller: Caller, body: Json) -> Rest | None:
    """Decide what the end of a request's input answers; None if that answers nothing that a run here asked.

    Raises Refusal: 404 for a run that is not the caller's; 400 if the request says anything else, or leaves something
    unanswered; 409 if it was decided otherwise. Raises ServerError.
    """
    items = _objects(body.get("input"))
    given = given_in(items)
    if not given:
        return None
    run = given[0].run
    if any(each.run != run for each in given):
        raise invalid("input", "answers requests of several responses")
    run = (await runs.owned(run, caller)).id
    head = items[: len(items) - len(given)]
    if head and head[-1].get("type") not in _ASKS:
        raise invalid("input", "a request that answers `mcp_approval_request`s says nothing else: say it afterwards")
    events = await runs.stored(run)
    part, asked, there = _asked(events, given)
    if not there:
        why = "the response that asks has not ended yet"
        raise Refusal(Problem(status=409, code="response_not_ended", message=why, kind="invalid_request", run=run))
    answers = {each.wait for each in given}
    still = {info.wait for info in await runs.waits.of_run(run)}
    if left := [approval_id(run, wait) for wait in asked if wait in still and wait not in answers]:
        raise invalid("input", f"answers not all requests of the response: {', '.join(left)}")
    for each in given:
        await _decide(runs, caller, run, asked[each.wait], each)
    return Rest(run, part + 1)


async def _decide(runs: GatewayRuns, caller: Caller, run: str, wait: Waiting, given: Given) -> None:
    answer = GivenAnswer(at=given.at, name=given.wait, approved=given.approve, reason=given.reason)
    try:
        await runs.waits.decide(caller, "openai", decision_of(run, wait, answer))
    except AlreadyDecided as e:  # it may have been somebody else, who wants the same
        if (e.fate.decision == "allow") != given.approve:
            raise


def _asked(events: Sequence[PublicEvent], given: Sequence[Given]) -> tuple[int, dict[str, Waiting], bool]:
    """The part that asks, all that it asks, and whether it is over. Raises Refusal (404)."""
    parts, by_part, last = Parts(), dict[int, dict[str, Waiting]](), 0
    for event in events:
        last = parts.feed(event)
        if isinstance(event, Waiting) and event.what == "approval":
            by_part.setdefault(last, {})[event.wait] = event
    for part, asked in by_part.items():
        if all(each.wait in asked for each in given):
            return part, asked, last > part or parts.asks
    at = given[0].at + ".approval_request_id"
    why = "no response asks for this"
    raise Refusal(Problem(status=404, code="wait_not_found", message=why, kind="not_found", param=at))


def answers_of(run: str, part: int, events: Sequence[PublicEvent]) -> list[Json]:
    """The input of a later part: what was decided before it."""
    parts, asked = Parts(), Asked(run)
    numbered = [(parts.feed(event), event) for event in events]
    found = [asked.decided(event) for number, event in numbered if number == part and isinstance(event, Resumed)]
    return [item for item in found if item["type"] == "mcp_approval_response"]


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


def _parted(event: PublicEvent, seq: int) -> PublicEvent:
    """The end of a response whose run goes on with another one."""
    timing = Timing(total_ms=0)
    return Completed(run=event.run, seq=seq, turn=event.turn, attempt=event.attempt, finish="tool_use", timing=timing)
