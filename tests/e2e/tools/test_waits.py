"""Runs that wait for a person or a client: each door, one fate, and the tool's calls."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.cli.process import run as run_command
from tests.waiting import eventually
from tokenbus import Client, Run, WaitInfo
from tokenbus.errors import AlreadyDecided, RequestInvalid, WaitNotFound
from tokenbus.events.public import BlockComplete, Completed, PublicEvent, Resumed, Waiting
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Reply, ToolCall
from tokenbus_services.parser import away

SCHEMA = '{ type = "object", properties = { amount = { type = "integer" } }, required = ["amount"] }'
SAMPLE = Path(__file__).parents[2] / "services" / "tools" / "mcp" / "sample_server.py"
SETTINGS = f"""
[gateway]
tools = ["pay", "show"]
[tools.pay]
kind = "python"
call = "tests.services.tools.sample_tools:echo"
description = "Pays."
parameters = {SCHEMA}
approval = {{ amount = {{ exclusiveMinimum = 100 }} }}
[tools.quick]
kind = "python"
call = "tests.services.tools.sample_tools:echo"
description = "Pays at once, unless somebody says no."
parameters = {SCHEMA}
approval = "always"
approval_timeout_s = 0.2
approval_on_deadline = "allow"
[tools.show]
kind = "client"
description = "Shows something on the client's screen."
parameters = {{ type = "object" }}
result = {{ type = "object", properties = {{ seen = {{ type = "boolean" }} }}, required = ["seen"] }}
[tools.gone]
kind = "client"
description = "Nobody returns its result."
timeout_s = 0.2
[tools.book]
kind = "python"
call = "tests.services.tools.sample_tools:book"
description = "Books a seat."
parameters = {{ type = "object", properties = {{ flight = {{ type = "string" }} }} }}
[tools.sign]
kind = "python"
call = "tests.services.tools.sample_tools:ask_on_a_page"
description = "Asks on a page."
approval = "always"
[tools.patient]
kind = "python"
call = "tests.services.tools.sample_tools:book"
description = "Books a seat, and cannot begin again."
parameters = {{ type = "object", properties = {{ flight = {{ type = "string" }} }} }}
questions = "wait"
[mcp.here]
kind = "stdio"
command = "{sys.executable}"
args = ["{SAMPLE}"]
[mcp.older]
kind = "stdio"
command = "{sys.executable}"
args = ["{SAMPLE.with_name("older_server.py")}", "choose"]
[tools.brief]
kind = "python"
call = "tests.services.tools.sample_tools:ask_briefly"
description = "Asks for a moment."
"""


def calls(*made: tuple[str, dict[str, object]]) -> Reply:
    return Reply(tool_calls=tuple(ToolCall(name=name, arguments=arguments) for name, arguments in made))


@pytest.fixture(scope="module", params=[False, True], ids=["in memory", "put away at once"])
def bus(request: pytest.FixtureRequest) -> Generator[LocalBus]:
    with pytest.MonkeyPatch.context() as patch, LocalBus(SETTINGS) as running:
        if request.param:
            patch.setattr(away, "AWAY_AFTER_MS", 0)
            patch.setattr(away, "LOOK_S", 0.0)
        running.model_says("pays", calls(("pay", {"amount": 500})), "Done.")
        running.model_says("pays little", calls(("pay", {"amount": 5})), "Done.")
        running.model_says("pays twice", calls(("pay", {"amount": 500}), ("pay", {"amount": 900})), "Done.")
        running.model_says("quick", calls(("quick", {"amount": 1})), "Done.")
        running.model_says("shows", calls(("show", {})), "Done.")
        running.model_says("gone", calls(("gone", {})), "Done.")
        running.model_says("books", calls(("book", {"flight": "LH1"})), "Done.")
        running.model_says("books there", calls(("here__book", {"flight": "LH1"})), "Done.")
        running.model_says("chooses", calls(("older__choose", {})), "Done.")
        running.model_says("books patiently", calls(("patient", {"flight": "LH1"})), "Done.")
        running.model_says("signs", calls(("sign", {})), "Done.")
        running.model_says("brief", calls(("brief", {})), "Done.")
        yield running


@pytest.fixture
async def client(bus: LocalBus) -> AsyncGenerator[Client]:
    async with bus.client() as client:
        yield client


async def begun(client: Client, bus: LocalBus, model: str, *tools: str, waits: int = 1, **more: Any) -> Run:
    """A run that waits."""
    run = await client.publish(bus.request(model, tools=[{"name": name} for name in tools], **more))
    await eventually(lambda: is_waiting(client, run, waits))
    return run


async def is_waiting(client: Client, run: Run, waits: int) -> bool:
    return len(await waits_of(client, run)) == waits


async def waits_of(client: Client, run: Run) -> list[WaitInfo]:
    async with aclosing(client.waiting(run=run)) as listed:
        return [info async for info in listed]


async def events_of(run: Run) -> list[PublicEvent]:
    async with aclosing(run.events()) as events:
        return [event async for event in events]


def results(events: list[PublicEvent]) -> list[str | None]:
    return [e.content for e in events if isinstance(e, BlockComplete) and e.kind == "tool_result"]


def resumed(events: list[PublicEvent]) -> list[tuple[str, str, str | None, str]]:
    return [(e.wait, e.decision, e.by, e.door) for e in events if isinstance(e, Resumed)]


async def test_a_call_runs_after_somebody_allowed_it_and_one_that_fulfils_no_condition_at_once(
    bus: LocalBus, client: Client
) -> None:
    run = await begun(client, bus, "pays", "pay", metadata={"tenant": "acme"})
    (info,) = await waits_of(client, run)
    assert (info.what, info.tool_name, info.arguments, info.tenant) == ("approval", "pay", '{"amount":500}', "acme")
    async with aclosing(client.waiting(tenant="acme")) as listed:
        assert [each.run async for each in listed] == [run.id]
    assert (await client.describe([run]))[run.id].state == "waiting"
    fate = await client.approve(run, info.wait, by="ann", decision_id="d1")
    assert (fate.decision, fate.by, fate.door) == ("allow", "ann", "bus")
    assert await client.approve(run, info.wait, by="ann", decision_id="d1") == fate, "it is the same decision"
    with pytest.raises(AlreadyDecided) as late:
        await client.deny(run, info.wait, "too dear", by="bob")
    assert late.value.fate == fate
    events = await events_of(run)
    assert results(events) == ['{"amount":500}']
    assert resumed(events) == [(info.wait, "allow", "ann", "bus")]
    assert isinstance(events[-1], Completed)
    assert await waits_of(client, run) == []
    with pytest.raises(AlreadyDecided):
        await client.deny(run, info.wait)

    at_once = await client.publish(bus.request("pays little", tools=[{"name": "pay"}]))
    assert not any(isinstance(e, Waiting) for e in await events_of(at_once))


async def test_the_deadline_of_a_run_stands_while_it_only_waits(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "pays", "pay", deadline_s=3.0)
    (info,) = await waits_of(client, run)
    until = time.monotonic() + 4
    await eventually(lambda: time.monotonic() > until)
    assert await is_waiting(client, run, 1)
    await client.approve(run, info.wait)
    assert isinstance((await events_of(run))[-1], Completed)


async def test_several_calls_are_decided_in_any_order_and_one_with_other_arguments(
    bus: LocalBus, client: Client
) -> None:
    run = await begun(client, bus, "pays twice", "pay", waits=2)
    first, second = await waits_of(client, run)
    with pytest.raises(RequestInvalid, match=r"arguments\.amount"):
        await client.approve(run, second.wait, arguments={"amount": "much"})
    with pytest.raises(RequestInvalid, match="'approval'"):
        await client.tool_result(run, second.wait, "paid")
    await client.approve(run, second.wait, arguments={"amount": 1})
    await client.deny(run, first.wait, "too dear")
    events = await events_of(run)
    assert results(events) == ["the call was denied, and did not run: too dear", '{"amount":1}']
    read = bus.requests[-1]["messages"][-1]
    assert '[a person changed the arguments of this call to {\\"amount\\":1}]' in str(read).replace('"', '\\"')


async def test_the_deadline_decides_as_the_settings_say(bus: LocalBus, client: Client) -> None:
    run = await client.publish(bus.request("quick", tools=[{"name": "quick"}]))
    events = await events_of(run)
    assert results(events) == ['{"amount":1}']
    assert [(d, door) for _, d, _, door in resumed(events)] == [("allow", "deadline")]


async def test_a_client_returns_the_result_of_its_own_tool(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "shows", "show")
    (info,) = await waits_of(client, run)
    assert (info.what, info.schema is not None) == ("tool_result", True)
    with pytest.raises(RequestInvalid, match="seen"):
        await client.tool_result(run, info.wait, {})
    await client.tool_result(run, info.wait, {"seen": True})
    assert results(await events_of(run)) == ['{"seen":true}']
    lost = await client.publish(bus.request("gone", tools=[{"name": "gone"}]))
    assert results(await events_of(lost)) == ["the client returned no result in time"]


async def test_a_request_asks_for_more_approvals_and_brings_tools_of_its_own(bus: LocalBus, client: Client) -> None:
    asks: dict[str, Any] = {"name": "pay", "approval": "always"}
    run = await client.publish(bus.request("pays little", tools=[asks]))
    await eventually(lambda: is_waiting(client, run, 1))
    (info,) = await waits_of(client, run)
    await client.approve(run, info.wait)
    assert results(await events_of(run)) == ['{"amount":5}']
    less = await begun(client, bus, "pays", "pay", waits=1)
    never: dict[str, Any] = {"name": "pay", "approval": "never"}
    run = await client.publish(bus.request("pays", tools=[never]))
    await eventually(lambda: is_waiting(client, run, 1))
    for each in (less, run):
        await each.cancel()
    bus.model_says("own", calls(("own", {"x": 1})), "Done.")
    own = {"name": "own", "kind": "client", "description": "Mine.", "parameters": {"type": "object"}}
    run = await client.publish(bus.request("own", tools=[own]))
    await eventually(lambda: is_waiting(client, run, 1))
    await client.tool_result(run, (await waits_of(client, run))[0].wait, "mine", is_error=True)
    assert results(await events_of(run)) == ["mine"]


async def test_a_run_that_ends_waits_for_nothing(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "pays", "pay")
    (info,) = await waits_of(client, run)
    await run.cancel()
    events = await events_of(run)
    assert results(events) == ["cancelled"]
    assert await waits_of(client, run) == []
    with pytest.raises(WaitNotFound):
        await client.approve(run, info.wait)
    with pytest.raises(WaitNotFound):
        await client.approve("no-such-run", "0.0")


async def test_of_many_decisions_at_once_one_counts(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "pays", "pay")
    (info,) = await waits_of(client, run)

    async def decide(n: int) -> bool:
        try:
            if n % 2:
                await client.approve(run, info.wait, by=str(n))
            else:
                await client.deny(run, info.wait, by=str(n))
        except AlreadyDecided:
            return False
        return True

    counted = await asyncio.gather(*(decide(n) for n in range(10)))
    events = await events_of(run)
    (_, decision, by, _) = next(iter(resumed(events)))
    assert [str(n) for n, each in enumerate(counted) if each] == [by]
    ran = results(events) == ['{"amount":500}']
    assert ran == (decision == "allow")


async def asks(client: Client, run: Run, text: str) -> WaitInfo:
    """What the run waits for, once that is this question."""
    found: list[WaitInfo] = []

    async def is_asked() -> bool:
        found[:] = [info for info in await waits_of(client, run) if info.text == text]
        return len(found) == 1

    await eventually(is_asked)
    return found[0]


async def test_a_tool_asks_and_goes_on_with_the_answers(bus: LocalBus, client: Client) -> None:
    run = await client.publish(bus.request("books", tools=[{"name": "book"}], metadata={"tenant": "hotel"}))
    seat = await asks(client, run, "Which seat on LH1?")
    assert (seat.what, seat.tool_name, seat.on_deadline, seat.tenant) == ("answer", "book", "cancel", "hotel")
    with pytest.raises(RequestInvalid, match='"seat" is a required property'):
        await client.answer(run, seat.wait, {})
    with pytest.raises(RequestInvalid, match="'answer'"):
        await client.approve(run, seat.wait)
    fate = await client.answer(run, seat.wait, {"seat": "12A"}, by="ann")
    assert (fate.decision, fate.by, fate.door) == ("accept", "ann", "bus")
    sure = await asks(client, run, "Book 12A?")
    with pytest.raises(AlreadyDecided) as late:
        await client.answer(run, seat.wait, {"seat": "1A"}, by="bob")
    assert late.value.fate == fate
    await client.answer(run, sure.wait, {"sure": True}, by="bob")
    events = await events_of(run)
    assert results(events) == ["LH1/12A"]
    assert resumed(events) == [(seat.wait, "accept", "ann", "bus"), (sure.wait, "accept", "bob", "bus")]
    assert [e.content for e in events if isinstance(e, Resumed)] == ['{"seat":"12A"}', '{"sure":true}']
    assert [(e.text, e.schema is not None) for e in events if isinstance(e, Waiting)] == [
        ("Which seat on LH1?", True),
        ("Book 12A?", True),
    ]


async def test_a_tool_of_an_mcp_server_asks_and_goes_on_with_the_answers(bus: LocalBus, client: Client) -> None:
    tool: dict[str, Any] = {"name": "here__book", "parameters": {"type": "object"}}  # the server may not have listed it
    run = await client.publish(bus.request("books there", tools=[tool]))
    seat = await asks(client, run, "Which seat on LH1?")
    await client.answer(run, seat.wait, {"seat": "12A"}, by="ann")
    page = await asks(client, run, "Sign.")
    assert (page.url, page.schema) == ("https://sign.example/1", None)
    await client.answer(run, page.wait, by="bob")
    events = await events_of(run)
    assert results(events) == ["LH1/12A, accept, None"]
    assert resumed(events) == [(seat.wait, "accept", "ann", "bus"), (page.wait, "accept", "bob", "bus")]


async def test_a_tool_that_cannot_begin_again_waits_for_its_answers(bus: LocalBus, client: Client) -> None:
    run = await client.publish(bus.request("books patiently", tools=[{"name": "patient"}]))
    seat = await asks(client, run, "Which seat on LH1?")
    assert seat.held
    await client.answer(run, seat.wait, {"seat": "12A"}, by="ann")
    sure = await asks(client, run, "Book 12A?")
    await client.answer(run, sure.wait, {"sure": True}, by="bob")
    events = await events_of(run)
    assert results(events) == ["LH1/12A"]
    assert resumed(events) == [(seat.wait, "accept", "ann", "bus"), (sure.wait, "accept", "bob", "bus")]


async def test_what_an_older_mcp_server_asks_within_a_call_is_answered_while_the_call_lasts(
    bus: LocalBus, client: Client
) -> None:
    tool: dict[str, Any] = {"name": "older__choose", "parameters": {"type": "object"}}
    run = await client.publish(bus.request("chooses", tools=[tool]))
    seat = await asks(client, run, "Which seat?")
    assert seat.held
    await client.answer(run, seat.wait, {"seat": "12A"}, by="ann")
    events = await events_of(run)
    assert results(events) == ['{"action": "accept", "content": {"seat": "12A"}}']
    assert resumed(events) == [(seat.wait, "accept", "ann", "bus")]
    briefly = await client.publish(bus.request("chooses", tools=[tool], tool_timeout_s=1.0))
    seat = await asks(client, briefly, "Which seat?")
    events = await events_of(briefly)
    assert results(events) in (['{"action": "cancel"}'], ["the tool returned no result within 1 s"])
    assert resumed(events) == [(seat.wait, "cancel", None, "deadline")]
    with pytest.raises((AlreadyDecided, WaitNotFound)):
        await client.answer(briefly, seat.wait, {"seat": "12A"})


async def test_who_does_not_want_to_answer_says_so_and_nobody_is_a_cancel(bus: LocalBus, client: Client) -> None:
    run = await client.publish(bus.request("books", tools=[{"name": "book"}]))
    seat = await asks(client, run, "Which seat on LH1?")
    await client.answer(run, seat.wait, decision="decline", by="ann")
    assert results(await events_of(run)) == ["not booked: decline by ann over bus"]
    brief = await client.publish(bus.request("brief", tools=[{"name": "brief"}]))
    events = await events_of(brief)
    assert results(events) == ["cancel over deadline, None"]
    assert [(decision, door) for _, decision, _, door in resumed(events)] == [("cancel", "deadline")]


async def test_a_call_that_needs_leave_is_asked_for_it_once_and_then_asks_itself(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "signs", "sign")
    (leave,) = await waits_of(client, run)
    await client.approve(run, leave.wait)
    page = await asks(client, run, "Sign in.")
    assert (page.url, page.schema) == ("https://sign.example/in", None)
    with pytest.raises(RequestInvalid, match="answered on its page"):
        await client.answer(run, page.wait, {"name": "ann"})
    await client.answer(run, page.wait)
    assert results(await events_of(run)) == ["accept, {}"]


async def test_a_cancel_ends_a_question(bus: LocalBus, client: Client) -> None:
    run = await client.publish(bus.request("books", tools=[{"name": "book"}]))
    seat = await asks(client, run, "Which seat on LH1?")
    await run.cancel()
    assert results(await events_of(run)) == ["cancelled"]
    with pytest.raises(WaitNotFound):
        await client.answer(run, seat.wait, {"seat": "12A"})


async def test_of_many_answers_at_once_one_counts(bus: LocalBus, client: Client) -> None:
    run = await client.publish(bus.request("books", tools=[{"name": "book"}]))
    seat = await asks(client, run, "Which seat on LH1?")

    async def answer(n: int) -> str | None:
        try:
            await client.answer(run, seat.wait, {"seat": str(n)}, by=str(n))
        except AlreadyDecided:
            return None
        return str(n)

    (counted,) = [each for each in await asyncio.gather(*(answer(n) for n in range(10))) if each]
    sure = await asks(client, run, f"Book {counted}?")
    await client.answer(run, sure.wait, {"sure": True})
    assert results(await events_of(run)) == [f"LH1/{counted}"]


def over_http(bus: LocalBus, method: str, path: str, **more: Any) -> httpx.Response:
    return httpx.request(method, f"{bus.gateway}{path}", **more)


async def test_the_door_of_the_gateway(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "pays", "pay")
    listed = over_http(bus, "GET", "/waiting").json()["waiting"]
    assert run.id in [each["run"] for each in listed]
    (info,) = over_http(bus, "GET", f"/runs/{run.id}/waiting").json()["waiting"]
    path = f"/runs/{run.id}/waiting/{info['wait']}"
    wrong = over_http(bus, "POST", path, json={"type": "approval", "decision": "allow", "arguments": {}})
    assert (wrong.status_code, "amount" in wrong.text) == (400, True)
    denial = {"type": "approval", "decision": "deny", "reason": "no", "by": "ann"}
    denied = over_http(bus, "POST", path, json=denial, headers={"idempotency-key": "one"})
    assert (denied.status_code, denied.json()["decision"], denied.json()["id"]) == (200, "deny", "one")
    assert over_http(bus, "POST", path, json=denial, headers={"idempotency-key": "one"}).json() == denied.json()
    late = over_http(bus, "POST", path, json={"type": "approval", "decision": "allow"})
    assert (late.status_code, "already_decided" in late.text) == (409, True)
    unknown = over_http(bus, "POST", f"/runs/{run.id}/waiting/99.0", json={"type": "approval", "decision": "allow"})
    assert unknown.status_code == 404
    events = await events_of(run)
    assert resumed(events) == [(info["wait"], "deny", "ann", "http")]


async def test_a_question_is_answered_over_http_and_by_a_command(bus: LocalBus, client: Client) -> None:
    run = await client.publish(bus.request("books", tools=[{"name": "book"}]))
    seat = await asks(client, run, "Which seat on LH1?")
    path = f"/runs/{run.id}/waiting/{seat.wait}"
    wrong = over_http(bus, "POST", path, json={"type": "answer", "content": {"seat": 7}})
    assert (wrong.status_code, "content.seat" in wrong.text) == (400, True)
    answered = over_http(bus, "POST", path, json={"type": "answer", "content": {"seat": "7"}, "by": "ann"})
    assert (answered.status_code, answered.json()["decision"]) == (200, "accept")
    late = over_http(bus, "POST", path, json={"type": "answer", "decision": "decline"})
    assert (late.status_code, "already_decided" in late.text) == (409, True)
    await asks(client, run, "Book 7?")
    listed = await run_command("waiting", run.id, **bus.environment)
    assert [line.split("  ")[2:4] for line in listed.out.splitlines()] == [["answer", "Book 7?"]]
    wrong_type = await run_command("answer", run.id, "--content", '{"sure": "yes"}', **bus.environment)
    assert (wrong_type.code, "content.sure" in wrong_type.err) == (2, True)
    assert (
        await run_command("answer", run.id, "--content", '{"sure": true}', "--by", "bob", **bus.environment)
    ).code == 0
    events = await events_of(run)
    assert results(events) == ["LH1/7"]
    assert [(by, door) for _, _, by, door in resumed(events)] == [("ann", "http"), ("bob", "cli")]


async def test_the_commands(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "pays twice", "pay", waits=2)
    listed = await run_command("waiting", run.id, **bus.environment)
    assert [line.split("  ")[2:4] for line in listed.out.splitlines()] == [
        ["approval", 'pay {"amount":500}'],
        ["approval", 'pay {"amount":900}'],
    ]
    several = await run_command("approve", run.id, **bus.environment)
    assert (several.code, "name one" in several.err) == (2, True)
    first, second = (line.split("  ")[1] for line in listed.out.splitlines())
    assert (await run_command("deny", run.id, first, "--reason", "no", "--by", "ann", **bus.environment)).code == 0
    assert (
        await run_command("approve", run.id, "--arguments", '{"amount": 7}', "--by", "ann", **bus.environment)
    ).code == 0
    late = await run_command("deny", run.id, second, **bus.environment)
    assert (late.code, "decided before: allow by ann, over cli" in late.err) == (1, True)
    events = await events_of(run)
    assert results(events) == ["the call was denied, and did not run: no", '{"amount":7}']
    assert [(by, door) for _, _, by, door in resumed(events)] == [("ann", "cli")] * 2


def test_the_client_without_asyncio(bus: LocalBus) -> None:
    with bus.sync_client() as client:
        run = client.publish(bus.request("pays", tools=[{"name": "pay"}]))
        waiting = next(event for event in run.events() if isinstance(event, Waiting))
        assert [info.wait for info in client.waiting(run=run)] == [waiting.wait]
        assert client.approve(run, waiting.wait).decision == "allow"
        assert run.result().status == "completed"
        run = client.publish(bus.request("books", tools=[{"name": "book"}]))
        waiting = next(event for event in run.events() if isinstance(event, Waiting))
        assert client.answer(run, waiting.wait, decision="decline").decision == "decline"
        assert run.result().status == "completed"
