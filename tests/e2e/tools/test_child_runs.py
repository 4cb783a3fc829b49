"""Tools of kind `run`: a call begins a child run, whose text is the call's result."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing
from typing import Any

import httpx
import msgspec
import pytest

from tests.e2e.gateway.served import auth
from tests.services.cli.process import run as run_command
from tests.waiting import eventually
from tokenbus import Client, Run, TreeCursor, TreeStep
from tokenbus.bus.erase import erase_runs, remains, with_children
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import REQUEST, call_field
from tokenbus.bus.server.server import Server
from tokenbus.errors import CursorAhead, RequestInvalid, RunNotFound
from tokenbus.events.public import (
    BlockComplete,
    Cancelled,
    ChildEnded,
    ChildStarted,
    Chunk,
    Completed,
    PublicEvent,
    RunFailedEvent,
    Started,
)
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.budgets.spend import ClientSpend, read_spend
from tokenbus_services.gateway.keys.key import NewKey, new_key
from tokenbus_services.mock_provider import Reply, Stall, ToolCall, Turn

KEY, PAYS, POOR, NARROW, SLOW = (new_key() for _ in range(5))
SETTINGS = f"""
[limits]
child_runs = 2
child_depth = 2
[gateway]
tools = ["research", "stuck"]
[gateway.prices."anthropic/"]
input = 1
output = 1000
[gateway.keys.any]
sha256 = "{KEY.sha256}"
tools = ["research"]
[gateway.keys.pays]
sha256 = "{PAYS.sha256}"
tools = ["research"]
max_budget = 9
[gateway.keys.poor]
sha256 = "{POOR.sha256}"
max_budget = 0.05
max_tokens = 100
[gateway.keys.narrow]
sha256 = "{NARROW.sha256}"
models = ["anthropic/asks"]
[gateway.keys.slow]
sha256 = "{SLOW.sha256}"
rpm_limit = 2
"""
SETTINGS += """
[tools.research]
kind = "run"
provider = "anthropic"
model = "researcher"
instructions = "You look things up."
description = "Looks things up."
[tools.lead]
kind = "run"
provider = "anthropic"
model = "lead"
tools = ["research"]
[tools.deeper]
kind = "run"
provider = "anthropic"
model = "digs"
tools = ["deeper"]
[tools.stuck]
kind = "run"
provider = "anthropic"
model = "silent"
[tools.brief]
kind = "run"
provider = "anthropic"
model = "silent"
timeout_s = 2
[tools.broken]
kind = "run"
provider = "nobody"
model = "none"
[tools.asked]
kind = "run"
provider = "anthropic"
model = "researcher"
approval = "always"
parameters = { type = "object", properties = { city = { type = "string" }, days = { type = "integer" } } }
"""


def calls(*made: tuple[str, Mapping[str, object]]) -> Reply:
    return Reply(tool_calls=tuple(ToolCall(name=name, arguments=dict(arguments)) for name, arguments in made))


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("asks", calls(("research", {"task": "Bonn?"})), "Thanks.")
        running.model_says("asks two", calls(("research", {"task": "one"}), ("research", {"task": "two"})), "Thanks.")
        running.model_says("top", calls(("lead", {"task": "lead it"})), "Top.")
        both = calls(("lead", {"task": "lead it"}), ("research", {"task": "other"}))
        running.model_says("top two", both, "Top.")
        running.model_says("lead", calls(("research", {"task": "deep"})), "Led.")
        running.model_says("researcher", lambda request: f"Found {request.user_text!r}")
        running.model_says("asks three", calls(*(("research", {"task": n}) for n in "abc")), "Thanks.")
        running.model_says("digs", calls(("deeper", {"task": "dig"})), "Dug.")
        running.model_says("waits for two", calls(("stuck", {"task": "one"}), ("stuck", {"task": "two"})), "Both.")
        running.model_says("waits", calls(("stuck", {"task": "wait"})), "Never.")
        running.model_says("silent", Turn(says=Reply(text="Begun, and more."), fault=Stall(after_text="Begun")))
        running.model_says("is brief", calls(("brief", {"task": "wait"})), "Late.")
        running.model_says("breaks", calls(("broken", {"task": "go"})), "Oh.")
        running.model_says("is wrong", calls(("research", {"job": "go"})), "Oh.")
        running.model_says("asks leave", calls(("asked", {"city": "Bonn", "days": 2})), "Thanks.")
        yield running


@pytest.fixture
async def client(bus: LocalBus) -> AsyncGenerator[Client]:
    async with bus.client() as client:
        yield client


async def begun(client: Client, bus: LocalBus, model: str, *tools: str, **more: Any) -> Run:
    return await client.publish(bus.request(model, tools=[{"name": name} for name in tools], **more))


async def events_of(client: Client, run: str) -> list[PublicEvent]:
    async with aclosing(client.follow(run)) as events:
        return [event async for event in events]


def results(events: list[PublicEvent]) -> list[tuple[str | None, bool]]:
    found = [e for e in events if isinstance(e, BlockComplete) and e.kind == "tool_result"]
    return [(e.content, bool(e.is_error)) for e in found]


def children(events: list[PublicEvent]) -> list[str]:
    return [e.child for e in events if isinstance(e, ChildStarted)]


async def test_the_childs_text_is_the_result_and_both_name_each_other(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "asks", "research", metadata={"tenant": "acme", "note": "n"}, user_id="u1")
    events = await events_of(client, run.id)
    assert results(events) == [("Found 'Bonn?'", False)]
    assert isinstance(events[-1], Completed)
    (child,) = children(events)
    assert child == f"{run.id}~0"
    assert [(e.child, e.status, e.error) for e in events if isinstance(e, ChildEnded)] == [(child, "completed", None)]
    inner = await events_of(client, child)
    started = inner[0]
    assert isinstance(started, Started)
    assert (started.parent, started.model, started.metadata) == (run.id, "researcher", {"tenant": "acme", "note": "n"})
    assert {e.depth for e in inner if isinstance(e, Chunk)} == {1}
    assert {e.depth for e in events if isinstance(e, Chunk)} == {0}
    described = await client.describe([run, child])
    assert (described[child].parent, described[child].tenant, described[run.id].parent) == (run.id, "acme", None)
    assert any("You look things up." in str(body.get("system")) for body in bus.requests)


async def test_events_of_all_runs_below_a_run_of_a_session_name_it(bus: LocalBus, client: Client) -> None:
    session = client.session("led", tenant="acme")
    tools = [{"name": "lead"}, {"name": "research"}]
    await session.configure({"provider": "anthropic", "model": "top two", "tools": tools})
    root = (await session.send("go")).fate.run
    assert root
    events = await events_of(client, root)
    first, second = children(events)
    below = children(await events_of(client, first)) + children(await events_of(client, second))
    assert len(below) == 1
    for run in (root, first, second, *below):
        assert {event.session for event in await events_of(client, run)} == {"led"}
    alone = await begun(client, bus, "asks", "research")
    (child,) = children(await events_of(client, alone.id))
    assert {event.session for event in await events_of(client, child)} == {None}


async def test_a_child_of_a_sessions_run_that_is_refused_is_an_error_result(bus: LocalBus, client: Client) -> None:
    session = client.session("broken")
    await session.configure({"provider": "anthropic", "model": "breaks", "tools": [{"name": "broken"}]})
    root = (await session.send("go")).fate.run
    assert root
    ((why, is_error),) = results(await events_of(client, root))
    assert is_error
    assert "nobody" in str(why)


async def test_children_of_one_turn_run_at_once_and_children_have_children(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "asks two", "research")
    events = await events_of(client, run.id)
    assert results(events) == [("Found 'one'", False), ("Found 'two'", False)]
    assert children(events) == [f"{run.id}~0", f"{run.id}~1"]
    top = await begun(client, bus, "top", "lead")
    events = await events_of(client, top.id)
    assert results(events) == [("Led.", False)]
    inner = await events_of(client, f"{top.id}~0")
    assert results(inner) == [("Found 'deep'", False)]
    deepest = await events_of(client, f"{top.id}~0~0")
    assert {e.depth for e in deepest if isinstance(e, Chunk)} == {2}


async def test_a_run_is_erased_with_the_runs_below_it(bus: LocalBus, client: Client) -> None:
    top = await begun(client, bus, "top", "lead")
    await events_of(client, top.id)
    tree = {top.id, f"{top.id}~0", f"{top.id}~0~0"}
    async with Server(bus.url) as server:
        keys = Keys("tokenbus", 8)
        assert await with_children(server, keys, [top.id]) == tree
        assert (await remains(server, keys, tree))["runs"] >= 2 * len(tree)
        assert set((await erase_runs(server, keys, [top.id])).runs) == tree
        assert +(await remains(server, keys, tree)) == {}


async def test_a_cancel_ends_the_whole_tree(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "waits", "stuck")
    child = f"{run.id}~0"
    async with aclosing(client.follow(child)) as events:
        async for event in events:
            if isinstance(event, Chunk):
                await run.cancel("enough")
            last = event
    assert isinstance(last, Cancelled)
    assert last.reason == "the run whose tool call began this run has ended"
    ended = await events_of(client, run.id)
    assert isinstance(ended[-1], Cancelled)
    assert [e for e in ended if isinstance(e, ChildEnded)] == []


async def test_the_parents_deadline_is_the_childs(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "waits", "stuck", deadline_s=2)
    end = (await events_of(client, run.id))[-1]
    assert isinstance(end, RunFailedEvent)
    assert end.error.code == "deadline"
    last = (await events_of(client, f"{run.id}~0"))[-1]
    assert isinstance(last, Cancelled | RunFailedEvent)
    assert not isinstance(last, RunFailedEvent) or last.error.code == "deadline"


async def test_what_fails_is_a_named_error_result(bus: LocalBus, client: Client) -> None:
    events = await events_of(client, (await begun(client, bus, "is brief", "brief")).id)
    ((text, is_error),) = results(events)
    assert is_error
    assert text == "the child run ended failed: deadline: the run's deadline has passed\n\nUntil then it said:\nBegun,"
    assert [(e.status, e.error and e.error.code) for e in events if isinstance(e, ChildEnded)] == [
        ("failed", "deadline")
    ]
    events = await events_of(client, (await begun(client, bus, "breaks", "broken")).id)
    ((text, is_error),) = results(events)
    assert is_error
    assert str(text).startswith("the child run ended failed: request_invalid: ")
    events = await events_of(client, (await begun(client, bus, "is wrong", "research")).id)
    ((text, is_error),) = results(events)
    assert is_error
    assert str(text).startswith("the arguments do not match the schema")
    assert [e for e in events if isinstance(e, ChildEnded)] == []


async def test_a_tree_is_bounded_in_breadth_and_depth(bus: LocalBus, client: Client) -> None:
    events = await events_of(client, (await begun(client, bus, "asks three", "research")).id)
    assert len(children(events)) == 2
    *_, (text, is_error) = results(events)
    assert is_error
    assert text == "too_many_children: the run has begun 2 child runs, and may begin no more"
    run = await begun(client, bus, "digs", "deeper")
    assert results(await events_of(client, run.id)) == [("Dug.", False)]
    deepest = await events_of(client, f"{run.id}~0~0")
    assert children(deepest) == []
    ((text, is_error),) = results(deepest)
    assert is_error
    assert str(text).startswith("child_too_deep: child runs are at most 2 deep")
    long = await begun(client, bus, "asks", "research", id="r" * 127)
    ((text, is_error),) = results(await events_of(client, long.id))
    assert is_error
    assert str(text).startswith("child_id_too_long: ")


async def test_the_key_of_the_parent_pays_for_the_children(bus: LocalBus, client: Client) -> None:
    run = await posted(bus, PAYS, "asks", "research")
    ends = [(await events_of(client, each))[-1] for each in (run, f"{run}~0")]
    used = [end.usage.output or 0 for end in ends if isinstance(end, Completed) and end.usage]

    async def spent() -> bool:
        total = (await spend_of(bus, "pays")).total
        return (total.runs, total.output) == (2, sum(used))

    await eventually(spent)


async def posted(bus: LocalBus, key: NewKey, model: str, tool: str, **more: Any) -> str:
    """A run that a client with this key began."""
    body = {"model": f"anthropic/{model}", "messages": [{"role": "user", "content": "go"}], "tools": [{"name": tool}]}
    async with httpx.AsyncClient(base_url=bus.gateway, headers=auth(key), timeout=60) as http:
        answer = await http.post("/runs", json=body | more)
    assert answer.status_code in (200, 202), answer.text
    return answer.json()["run"]


async def spend_of(bus: LocalBus, key: str) -> ClientSpend:
    async with Server(bus.url) as server:
        return (await read_spend(server, Keys(), [key]))[0]


async def test_a_child_whose_model_the_key_may_not_use_does_not_begin(bus: LocalBus, client: Client) -> None:
    run = await posted(bus, NARROW, "asks", "research")
    events = await events_of(client, run)
    ((text, is_error),) = results(events)
    assert is_error
    assert str(text).startswith("the child run cannot begin: model_not_allowed: this key may not use the model")
    assert isinstance(events[-1], Completed)
    assert await client.describe([f"{run}~0"]) == {}


async def test_a_child_is_a_request_of_the_keys_minute(bus: LocalBus, client: Client) -> None:
    run = await posted(bus, SLOW, "asks two", "research")
    first, second = sorted(results(await events_of(client, run)), key=lambda result: result[1])
    assert not first[1]
    assert str(second[0]).startswith("the child run cannot begin: rate_limit_exceeded: this key's limit of 2 requests")


async def test_a_tree_spends_no_more_than_its_key_has(bus: LocalBus, client: Client) -> None:
    run = await posted(bus, POOR, "waits for two", "stuck")
    tree, keys = [run, f"{run}~0", f"{run}~1"], Keys("tokenbus", 8)
    async with Server(bus.url) as server:

        async def refused() -> bool:
            fields = await server.client.hkeys(keys.run(run))
            return len({call_field(0).encode(), call_field(1).encode()} & {*fields}) == 1

        await eventually(refused)
        found = await server.client.hgetall(keys.gateway_held("poor"))
    held = {name.partition(b"#")[0]: amount for name, amount in found.items()}
    root, *children_held = [int(held[each.encode()]) for each in tree if each.encode() in held]
    assert len(children_held) == 1
    assert root > 10 * children_held[0] > 0
    (begun,) = await eventually(lambda: client.describe(tree[1:]))
    async with aclosing(client.follow(begun)) as inner:
        async for event in inner:
            if isinstance(event, Chunk):
                for exchange in bus.exchanges:
                    bus.resume(exchange)
    events = await events_of(client, run)
    assert isinstance(events[-1], Completed)
    (text, _), (why, is_error) = sorted(results(events), key=lambda result: result[1])
    assert text == "Begun, and more."
    assert is_error
    assert str(why).startswith("the child run cannot begin: budget_reserved: ")

    async def settled() -> bool:
        spend = await spend_of(bus, "poor")
        return spend.total.runs == 2 and spend.reserved == 0

    await eventually(settled)


async def test_leave_is_asked_before_a_child_begins(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "asks leave", "asked")

    async def waits() -> str:
        return next(iter([info.wait async for info in client.waiting(run=run)]), "")

    wait = await eventually(waits)
    assert await client.describe([f"{run.id}~0"]) == {}
    await client.approve(run, wait, arguments={"city": "Ulm", "days": 3})
    events = await events_of(client, run.id)
    assert results(events) == [('Found \'{"city":"Ulm","days":3}\'', False)]


async def test_only_a_call_begins_a_child(bus: LocalBus, client: Client) -> None:
    with pytest.raises(RequestInvalid, match="ids that end like this"):
        await client.publish(bus.request("asks", id="mine~3"))
    with pytest.raises(RequestInvalid, match="only a tool call"):
        await client.publish(bus.request("asks", id="mine", parent="yours"))
    # One that passes the checks, but whose parent waits for no such run, begins nothing.
    run = await begun(client, bus, "asks", "research")
    await events_of(client, run.id)
    await client.publish(bus.request("asks", id=f"{run.id}~7", parent=run.id))
    after = await client.publish(bus.request("asks"))
    await events_of(client, after.id)
    assert await client.describe([f"{run.id}~7"]) == {}
    async with httpx.AsyncClient(base_url=bus.gateway, headers=auth(KEY)) as http:
        body = {"model": "anthropic/asks", "messages": [{"role": "user", "content": "go"}]}
        for more in ({"parent": run.id, "id": f"{run.id}~7"}, {"id": "x~3"}):
            refused = await http.post("/runs", json=body | more)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(more)))


async def steps_of(client: Client, run: str, after: str | None = None) -> list[TreeStep]:
    async with aclosing(client.follow_tree(run, after=after)) as steps:
        return [step async for step in steps]


async def test_a_tree_has_one_order_live_and_later_from_each_cursor_on(bus: LocalBus, client: Client) -> None:
    top = await begun(client, bus, "top two", "lead", "research")
    live = await steps_of(client, top.id)
    lead, other, deep = f"{top.id}~0", f"{top.id}~1", f"{top.id}~0~0"
    assert {step.event.run: step.path for step in live} == {
        top.id: (top.id,),
        lead: (top.id, lead),
        other: (top.id, other),
        deep: (top.id, lead, deep),
    }
    for run in (top.id, lead, other, deep):
        assert [step.event for step in live if step.event.run == run] == await events_of(client, run)
    places = {(step.event.run, type(step.event)): n for n, step in enumerate(live)}
    for child, above in ((lead, top.id), (other, top.id), (deep, lead)):
        begins = next(n for n, s in enumerate(live) if isinstance(s.event, ChildStarted) and s.event.child == child)
        ends = next(n for n, s in enumerate(live) if isinstance(s.event, ChildEnded) and s.event.child == child)
        assert begins < places[child, Started] < places[child, Completed] < ends < places[above, Completed]
    assert await steps_of(client, top.id) == live
    for n, step in enumerate(live):
        assert TreeCursor.parse(str(step.cursor)) == step.cursor
        assert await steps_of(client, top.id, str(step.cursor)) == live[n + 1 :]
    below = await steps_of(client, lead)
    assert [step.event for step in below] == [step.event for step in live if lead in step.path]
    assert below[0].path == (lead,)


async def test_a_run_without_children_is_a_tree_of_one(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "researcher")
    steps = await steps_of(client, run.id)
    assert [step.event for step in steps] == await events_of(client, run.id)
    for n, step in enumerate(steps):
        assert await steps_of(client, run.id, str(step.cursor)) == steps[n + 1 :]
    async with Server(bus.url) as server:
        assert not await server.client.exists(Keys("tokenbus", 8).tree(run.id))
    with pytest.raises(CursorAhead):
        await steps_of(client, run.id, "0-0.999")
    with pytest.raises(RunNotFound):
        await anext(client.follow_tree("nobody", wait_s=0.1))
    with pytest.raises(RunNotFound):
        await anext(client.follow_tree("nobody~0", wait_s=0.1))
    with pytest.raises(ValueError, match="no cursor of a tree"):
        await steps_of(client, run.id, "17")


async def test_a_tree_ends_with_the_last_of_its_runs(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "waits", "stuck")
    steps: list[TreeStep] = []
    async with aclosing(client.follow_tree(run)) as live:
        async for step in live:
            steps.append(step)
            if step.event.run != run.id and isinstance(step.event, Chunk):
                await run.cancel("enough")
    ends = [step.event.run for step in steps if isinstance(step.event, Cancelled)]
    assert ends == [run.id, f"{run.id}~0"]
    assert await steps_of(client, run.id) == steps
    with pytest.raises(CursorAhead):
        await steps_of(client, run.id, "17-0.999~0")


async def test_the_gateway_gives_the_tree_of_a_run_and_goes_on_after_an_id(bus: LocalBus, client: Client) -> None:
    run = await posted(bus, KEY, "asks", "research")
    steps = await steps_of(client, run)
    other = new_key()
    async with httpx.AsyncClient(base_url=bus.gateway, timeout=60) as http:

        async def told(after: str | None = None, key: NewKey = KEY) -> httpx.Response:
            last = {} if after is None else {"last-event-id": after}
            return await http.get(f"/runs/{run}/events", params={"tree": "true"}, headers={**auth(key), **last})

        def shown(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
            lines = [event.split("\n") for event in answer.text.split("\n\n") if event.startswith("id: ")]
            return [(one[0].removeprefix("id: "), json.loads(one[2].removeprefix("data: "))) for one in lines]

        events = shown(await told())
        assert [(place, data.pop("path")) for place, data in events] == [(str(s.cursor), [*s.path]) for s in steps]
        assert [data for _, data in events] == [msgspec.to_builtins(step.event) for step in steps]
        middle = len(steps) // 2
        assert [place for place, _ in shown(await told(events[middle][0]))] == [p for p, _ in events[middle + 1 :]]
        assert (await told(events[-1][0])).status_code == 204
        assert (await told("17")).json()["error"]["param"] == "after"
        assert (await told(key=NARROW)).status_code == 404
        assert (await told(key=other)).status_code == 401


async def test_the_command_shows_a_tree_and_goes_on_after_a_cursor(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "asks", "research")
    steps = await steps_of(client, run.id)

    async def shown(*more: str) -> tuple[list[dict[str, Any]], int | None]:
        ended = await run_command("follow", "--tree", "--json", run.id, *more, **bus.environment)
        return [json.loads(line) for line in ended.out.splitlines()], ended.code

    lines, code = await shown()
    assert code == 0
    assert [(e["run"], e["seq"], e["path"], e["cursor"]) for e in lines] == [
        (s.event.run, s.event.seq, [*s.path], str(s.cursor)) for s in steps
    ]
    rest, _ = await shown("--after", str(steps[3].cursor))
    assert rest == lines[4:]


INHERITS = """
[records]
[policies.passes]
use = "tokenbus.policy:StreamProcessor"
[tools.research]
kind = "run"
provider = "anthropic"
model = "researcher"
max_tokens = 500
"""


async def test_policies_record_and_most_tokens_of_the_parent_are_the_childs() -> None:
    with LocalBus(INHERITS) as bus:
        bus.model_says("asks", calls(("research", {"task": "Bonn?"})), "Thanks.")
        bus.model_says("researcher", "Found it.")
        async with bus.client() as client, Server(bus.url) as server:
            for most, expected in ((300, 300), (900, 500)):
                more = {"policies": ["passes"], "record": True, "max_tokens": most}
                run = await begun(client, bus, "asks", "research", **more)
                steps = await steps_of(client, run.id)
                assert results([step.event for step in steps]) == [("Found it.", False)]
                stored = await server.client.hget(Keys("tokenbus", 8).run(f"{run.id}~0"), REQUEST)
                request = json.loads(stored)
                assert (request["policies"], request["record"], request["max_tokens"]) == (["passes"], True, expected)
                assert await steps_of(client, run.id, str(steps[2].cursor)) == steps[3:]
