"""The order of a fair queue: tenants take turns, urgent entries overtake, and nothing of it can lose an entry."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import pytest

from tokenbus.bus.keys import Keys, order_keys
from tokenbus.bus.scripts.fair_order import SORTED_ENTRIES, Entries, put_back, reclaim, take
from tokenbus.bus.scripts.work_queue import NOBODY, claim, finish
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import ToolWork, TurnWork, encode

GROUP = "g"
BINARY = b"\x89BIN\r\n\x1a\n\x00\x01" + (18).to_bytes(4, "big") + (20).to_bytes(4, "big") + b"{}"


class Inbound:
    """A stream of requests with its group."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.client = server.client
        self.stream = keys.requests
        self.entries: Entries = "requests"

    async def put(self, tenant: str, *names: str) -> None:
        for name in names:
            request = {"type": "generate", "id": name, "metadata": {"tenant": tenant}}
            await self.client.xadd(self.stream, {"__data__": msgspec.json.encode(request)})

    async def ask(self, count: int, consumer: str = "a") -> tuple[int, list[dict[bytes, bytes]], list[Any]]:
        """How many wait, the urgent ones, and those taken as [id, deliveries, fields]."""
        call = take(self.stream, self.entries, group=GROUP, consumer=consumer, count=count)
        waiting, _, urgent, taken = await run_script(self.server, call)
        return waiting, [fields(each) for each in urgent], taken

    async def names(self, count: int, consumer: str = "a") -> list[str]:
        """Those taken next, by name."""
        _, _, taken = await self.ask(count, consumer)
        return [name_of(each) for each in taken]

    async def pending(self) -> dict[str, int]:
        summary = await self.client.xpending(self.stream, GROUP)
        return {c["name"].decode(): c["pending"] for c in summary["consumers"]}

    async def reclaim(self, consumer: str, idle_ms: int) -> tuple[int, list[Any]]:
        call = reclaim(self.stream, self.entries, group=GROUP, consumer=consumer, idle_ms=idle_ms, start="-", count=10)
        _, waiting, entries = await run_script(self.server, call)
        return waiting, entries

    async def finish(self, taken: Sequence[Any], consumer: str = "a") -> None:
        ids = [each[0].decode() for each in taken]
        await run_script(self.server, finish(self.stream, group=GROUP, consumer=consumer, ids=ids))


def fields(entry: Any) -> dict[bytes, bytes]:
    return dict(zip(entry[2][::2], entry[2][1::2], strict=True))


def name_of(entry: Any) -> str:
    return msgspec.json.decode(fields(entry)[b"__data__"])["id"]


@pytest.fixture
async def inbound(server: Server, keys: Keys) -> AsyncGenerator[Inbound]:
    await server.client.xgroup_create(keys.requests, GROUP, id="0-0", mkstream=True)
    yield Inbound(server, keys)
    await server.client.delete(keys.requests, *order_keys(keys.requests))


async def test_tenants_take_turns_and_each_keeps_its_own_order(inbound: Inbound):
    await inbound.put("big", *(f"big{n}" for n in range(40)))
    assert await inbound.names(4) == ["big0", "big1", "big2", "big3"]
    await inbound.put("small", "s0", "s1")
    await inbound.put("third", "t0")
    names = await inbound.names(7)
    assert set(names[:3]) == {"big4", "s0", "t0"}
    assert set(names[3:5]) == {"big5", "s1"}
    assert names[5:] == ["big6", "big7"]


async def test_who_was_idle_has_saved_up_no_turns(inbound: Inbound):
    await inbound.put("a", *(f"a{n}" for n in range(20)))
    await inbound.names(10)
    await inbound.put("b", *(f"b{n}" for n in range(20)))
    names = await inbound.names(10)
    assert sum(name.startswith("a") for name in names) == 5


async def test_large_requests_cost_more_turns(inbound: Inbound):
    for n in range(4):
        request = {"id": f"large{n}", "text": "x" * 200_000, "metadata": {"tenant": "large"}}
        await inbound.client.xadd(inbound.stream, {"__data__": msgspec.json.encode(request)})
    await inbound.put("small", *(f"s{n}" for n in range(12)))
    names = await inbound.names(8)
    assert sum(name.startswith("large") for name in names) == 2


@pytest.mark.parametrize(
    "data",
    [
        b'{"type":"cancel","run":"r"}',
        b'{ "run" : "r", "type" :  "cancel" }',
        msgspec.msgpack.encode({"type": "cancel", "run": "r"}),
        msgspec.json.encode({"data": '{"type": "cancel", "run": "r"}', "headers": {}}),
        BINARY + b'{"type":"cancel","run":"r"}',
    ],
)
async def test_a_cancel_overtakes_earlier_entries(inbound: Inbound, data: bytes):
    await inbound.put("a", *(f"a{n}" for n in range(30)))
    await inbound.client.xadd(inbound.stream, {"__data__": data})
    waiting, urgent, taken = await inbound.ask(0)
    assert (waiting, urgent, taken) == (30, [{b"__data__": data}], [])
    assert await inbound.pending() == {"a": 1, NOBODY: 30}


async def test_a_cancel_is_found_although_more_is_unread_than_one_call_puts_in_order(inbound: Inbound):
    pipe: Any = inbound.client.pipeline(transaction=False)
    for n in range(SORTED_ENTRIES + 100):
        pipe.xadd(inbound.stream, {"__data__": b'{"type": "generate", "id": "r%d"}' % n})
    await pipe.execute()
    await inbound.client.xadd(inbound.stream, {"__data__": b'{"type": "cancel", "run": "r"}'})
    waiting, urgent, _ = await inbound.ask(0)
    assert waiting < SORTED_ENTRIES + 100
    assert urgent == [{b"__data__": b'{"type": "cancel", "run": "r"}'}]
    _, again, _ = await inbound.ask(0, consumer="b")
    assert again == urgent  # it is not finished yet
    waiting, urgent, taken = await inbound.ask(SORTED_ENTRIES + 100)
    assert (waiting, urgent, len(taken)) == (100, [], SORTED_ENTRIES)
    waiting, urgent, taken = await inbound.ask(SORTED_ENTRIES + 100)
    assert (waiting, urgent, len(taken)) == (0, [], 100)
    assert await inbound.pending() == {"a": SORTED_ENTRIES + 100, "b": 1}


async def test_a_request_whose_text_mentions_cancels_does_not_overtake(inbound: Inbound):
    text = 'say {"type":"cancel"} or "type": "cancel"'
    request = {"type": "generate", "id": "x", "messages": [{"role": "user", "content": text}]}
    await inbound.client.xadd(inbound.stream, {"__data__": msgspec.json.encode(request)})
    waiting, urgent, _ = await inbound.ask(0)
    # Escaped quotes look like those of an envelope; its worker sees what it is, and passes it over.
    assert waiting + len(urgent) == 1


@pytest.mark.parametrize(
    ("entry", "tenant"),
    [
        ({"__data__": b'{"metadata": {"n": 1, "tenant" : "acme"}}'}, b"acme"),
        ({"__data__": b'{"extra":{"tenant":"no"},"metadata":{"tenant":"acme"}}'}, b"acme"),
        ({"__data__": b'{"text":"\\"metadata\\" is a word","metadata":{"tenant":"acme"}}'}, b"acme"),
        ({"__data__": msgspec.msgpack.encode({"metadata": {"tenant": "acme"}})}, b"acme"),
        ({"__data__": b'{"metadata":{"tenant":"other"}}', "tenant": "acme"}, b"acme"),
        ({"__data__": b'{"metadata":{"tenant":17}}'}, b""),
        ({"__data__": b"no JSON at all"}, b""),
        ({"something": b"else"}, b""),
    ],
)
async def test_the_tenant_comes_from_the_entry_or_its_metadata(
    inbound: Inbound, entry: dict[str, bytes], tenant: bytes
):
    await inbound.client.xadd(inbound.stream, entry)
    await inbound.ask(0)
    assert await inbound.client.hkeys(order_keys(inbound.stream)[1]) == [tenant]


async def test_a_claimed_item_counts_as_delivered_once_and_is_removed_when_finished(inbound: Inbound):
    await inbound.put("a", "x", "y")
    _, _, taken = await inbound.ask(5)
    assert [each[1] for each in taken] == [1, 1]
    assert await inbound.pending() == {"a": 2}
    await inbound.finish(taken)
    assert await inbound.client.xlen(inbound.stream) == 0
    assert await inbound.client.exists(*order_keys(inbound.stream)) == 0


async def test_a_dead_workers_items_are_claimed_and_waiting_ones_are_not(inbound: Inbound):
    await inbound.put("a", "x", "y", "z")
    await inbound.ask(1, consumer="dead")
    waiting, entries = await inbound.reclaim("b", idle_ms=0)
    assert waiting == 2
    assert [(name_of(each), each[1]) for each in entries] == [("x", 2)]


async def test_what_was_put_back_in_front_is_next_and_as_if_never_delivered(inbound: Inbound):
    await inbound.put("a", *(f"a{n}" for n in range(5)))
    _, _, taken = await inbound.ask(2)
    ids = [each[0].decode() for each in taken]
    call = put_back(inbound.stream, "requests", group=GROUP, consumer="a", ids=ids)
    assert await run_script(inbound.server, call) == 2
    assert await run_script(inbound.server, call) == 0  # after the second one they have no owner
    _, _, taken = await inbound.ask(3, consumer="b")
    assert [(name_of(each), each[1]) for each in taken] == [("a0", 1), ("a1", 1), ("a2", 1)]


async def test_a_skipped_request_comes_after_its_tenants_others(inbound: Inbound):
    await inbound.put("a", "a0", "a1", "a2")
    _, _, taken = await inbound.ask(1)
    ids = [taken[0][0].decode()]
    await run_script(
        inbound.server, put_back(inbound.stream, "requests", group=GROUP, consumer="a", ids=ids, in_front=False)
    )
    assert await inbound.names(3) == ["a1", "a2", "a0"]


async def test_an_order_that_was_lost_is_made_again_from_the_stream(inbound: Inbound):
    await inbound.put("a", *(f"a{n}" for n in range(8)))
    await inbound.ask(0)
    await inbound.client.delete(*order_keys(inbound.stream))
    assert await inbound.names(8) == []
    assert await inbound.reclaim("b", idle_ms=10_000) == (8, [])
    assert await inbound.names(10) == [f"a{n}" for n in range(8)]


async def test_a_worker_without_fair_order_processes_entries_that_wait_in_it(inbound: Inbound):
    await inbound.put("a", "x", "y", "z")
    await inbound.ask(0)
    old = claim(inbound.stream, group=GROUP, consumer="old", idle_ms=4000, start="0-0", count=2)
    _, entries = await run_script(inbound.server, old)
    assert [deliveries for _, deliveries, _ in entries] == [1, 1]
    assert await inbound.names(5) == ["z"]  # nothing twice


async def test_the_hash_of_tenants_stays_bounded(inbound: Inbound):
    await inbound.put("flood", *(f"f{n}" for n in range(30)))
    await inbound.ask(1)
    for n in range(0, 1_500, 50):
        for tenant in range(n, n + 50):
            await inbound.put(f"tenant{tenant}", f"x{tenant}")
        await inbound.ask(60)
        await inbound.put("flood", *(f"f{n}-{more}" for more in range(10)))
    assert 1 < await inbound.client.hlen(order_keys(inbound.stream)[1]) <= 1_300


async def test_a_group_that_is_gone_is_reported(inbound: Inbound):
    await inbound.client.flushdb()
    with pytest.raises(Exception, match="NOGROUP"):
        await inbound.ask(1)
    with pytest.raises(Exception, match="NOGROUP"):
        await inbound.reclaim("a", idle_ms=1)


async def test_turns_are_ordered_by_their_tenant_and_those_that_policies_judge_apart(server: Server, keys: Keys):
    turns = Inbound(server, keys)
    turns.stream, turns.entries = keys.topic(0, "turns"), "turns"
    await server.client.xgroup_create(turns.stream, GROUP, id="0-0", mkstream=True)
    for n in range(6):
        work = TurnWork(f"big{n}", 0, 1, tenant="big", held=n == 5)
        await server.client.xadd(turns.stream, {work.run: encode(work)})
    await server.client.xadd(turns.stream, {"s": encode(TurnWork("s", 0, 1, tenant="small"))})
    await server.client.xadd(turns.stream, {"odd": b"no msgpack"})
    _, _, taken = await turns.ask(4)
    assert {next(iter(fields(each))) for each in taken} == {b"big0", b"big5", b"s", b"odd"}
    await server.client.delete(turns.stream, *order_keys(turns.stream))


async def test_tool_calls_are_ordered_by_their_tenant_and_cost_by_their_size(server: Server, keys: Keys):
    calls = Inbound(server, keys)
    calls.stream, calls.entries = keys.topic(0, "tools"), "tools"
    await server.client.xgroup_create(calls.stream, GROUP, id="0-0", mkstream=True)
    for name, tenant, arguments in (
        *((f"big{n}", "big", "{}") for n in range(6)),
        ("vast0", "vast", "x" * 300_000),
        ("vast1", "vast", "{}"),
        ("small0", "small", "{}"),
        ("small1", "small", "{}"),
    ):
        work = ToolWork(name, 0, 1, 0, "call", "weather", arguments, tenant=tenant)
        await server.client.xadd(calls.stream, {name: encode(work)})
    await server.client.xadd(
        calls.stream, {"old": msgspec.msgpack.encode(["old", 0, 1, 0, "call", "weather", "{}", None])}
    )
    await server.client.xadd(calls.stream, {"odd": b"no msgpack"})
    _, _, taken = await calls.ask(7)
    names = [next(iter(fields(each))).decode() for each in taken]
    assert {*names[:4]} == {"big0", "vast0", "small0", "old"}
    assert {*names[4:]} == {"big1", "small1", "odd"}
    await server.client.delete(calls.stream, *order_keys(calls.stream))
