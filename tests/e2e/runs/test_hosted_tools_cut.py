"""Hosted tools of a recorded answer, for a subscriber of `blocks`, when the answer is cancelled, cut or taken over in
the middle of one: heard while it runs, ended as cut, and part of no message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import Any

import msgspec
import pytest

from tests.e2e import judge
from tests.unit.providers.corpus import CORPUS, needs_corpus
from tokenbus import Client, PublicEvent
from tokenbus.client.response import Response
from tokenbus.events.public import BlockComplete, BlockStarted, Cancelled, Chunk, Completed, Retrying
from tokenbus.events.requests import ExtraPart
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Stall, Turn, Wire
from tokenbus_services.mock_provider.script import ErrorEvent, Fault

pytestmark = needs_corpus
RECORDED = CORPUS / "anthropic" / "vercel-ai__anthropic-web-search-tool.1.sse"
IN_A_TOOL = 5
"""Events of the recording up to the middle of the first search's input."""
JUDGED = pytest.mark.parametrize("policies", [[], ["hide"]], ids=["", "judged"])


@pytest.fixture(scope="module")
def running() -> Generator[LocalBus]:
    with LocalBus('[policies.hide]\nuse = "tokenbus.policy:RedactSecrets"\n') as bus:
        yield bus


@pytest.fixture
def bus(running: LocalBus) -> LocalBus:
    running.reset()  # tries are counted from the first again
    return running


def answer(fault: Fault, *, always: bool = False) -> Turn:
    says = Wire(stream=RECORDED.read_bytes())
    return Turn(says=says, fault=fault) if always else Turn(says=says, first=(fault,))


async def heard(
    subscription: AsyncIterator[PublicEvent], client: Client, request: dict[str, Any], *, cancel: bool = False
) -> tuple[list[PublicEvent], list[PublicEvent]]:
    """What a subscriber of `blocks` gets of a run, and the run's log. ``cancel``: at its first hosted tool."""
    run = await client.publish(request)
    told: list[PublicEvent] = []
    log: list[PublicEvent] = []
    async for event in subscription:
        if event.run != run.id:
            continue
        told.append(event)
        if cancel and isinstance(event, BlockStarted) and event.kind == "server_tool":
            await run.cancel("enough")
        open_blocks = {e.block for e in told if isinstance(e, BlockStarted)}
        open_blocks -= {e.block for e in told if isinstance(e, BlockComplete)}
        if open_blocks or not isinstance(event, BlockComplete):
            continue
        if event.kind == "text" or cancel:  # all that is open has ended; if the run has too, this was the last
            log = [each async for each in run.events()]
            if len([each for each in log if isinstance(each, BlockStarted | BlockComplete)]) == len(told):
                return told, log
    raise AssertionError("the subscription ended")


def items_of(log: list[PublicEvent]) -> list[str]:
    messages = Response.of(log).messages
    return [part.json for message in messages for part in message.content if isinstance(part, ExtraPart)]


def check(told: list[PublicEvent], log: list[PublicEvent]) -> None:
    """The subscriber got each block in order, and nothing of a tool is visible."""
    judge.check(msgspec.json.decode(msgspec.json.encode(log)))
    assert told == [each for each in log if isinstance(each, BlockStarted | BlockComplete)]
    assert not [each for each in log if isinstance(each, Chunk) and each.visible and each.kind == "server_tool"]


def request(bus: LocalBus, model: str, policies: list[str], **fields: Any) -> dict[str, Any]:
    return bus.request(model, provider="anthropic", policies=policies, max_tool_depth=0, **fields)


@JUDGED
async def test_a_run_that_is_cancelled_in_the_middle_of_a_hosted_tool(bus: LocalBus, policies: list[str]) -> None:
    bus.model_says("stalls", answer(Stall(after_events=IN_A_TOOL)))
    async with bus.client() as client, client.subscribe("blocks") as blocks:
        told, log = await heard(blocks, client, request(bus, "stalls", policies), cancel=True)
    check(told, log)
    assert isinstance(log[-1], Cancelled)
    assert [
        (type(e), e.kind, getattr(e, "cut", None)) for e in told if isinstance(e, BlockStarted | BlockComplete)
    ] == [
        (BlockStarted, "server_tool", None),
        (BlockComplete, "server_tool", True),
    ]
    assert items_of(log) == []


@JUDGED
@pytest.mark.parametrize("falls_back", [False, True], ids=["again", "elsewhere"])
async def test_a_provider_that_fails_in_the_middle_of_a_hosted_tool(
    bus: LocalBus, policies: list[str], falls_back: bool
) -> None:
    bus.model_says("whole", Turn(says=Wire(stream=RECORDED.read_bytes())))
    bus.model_says("fails", answer(ErrorEvent(after_events=IN_A_TOOL), always=falls_back))
    other: dict[str, Any] = {"fallback": [{"provider": "anthropic", "model": "whole"}]} if falls_back else {}
    async with bus.client() as client, client.subscribe("blocks") as blocks:
        _, whole = await heard(blocks, client, request(bus, "whole", policies))
        told, log = await heard(blocks, client, request(bus, "fails", policies, **other))
    check(told, log)
    assert isinstance(log[-1], Completed)
    assert [each.drop_from for each in log if isinstance(each, Retrying)]
    cut = [each for each in told if isinstance(each, BlockComplete) and each.cut]
    assert cut
    assert {each.kind for each in cut} == {"server_tool"}
    assert Response.of(log).text == Response.of(whole).text
    assert items_of(log) == items_of(whole) != []
