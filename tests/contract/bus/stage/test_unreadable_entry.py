"""An input entry that breaks each connection that reads it: its run ends, and the partition continues."""

from __future__ import annotations

import pytest

from tests.censoring import FORBIDDEN, UPSTREAM_FAILURE, censoring
from tests.contract.bus.stage.test_unreadable import EndingLogic
from tests.contract.bus.toys import GROUP, Bench, Outputs, saying, working
from tests.waiting import eventually
from tokenbus.bus.server.server import Server
from tokenbus.bus.unreadable import type_and_id

FAULTS = pytest.mark.parametrize("instead", [b"", UPSTREAM_FAILURE], ids=["connection broken", "error reply"])


@FAULTS
async def test_an_unreadable_frame_ends_only_its_run_among_those_in_its_entry(
    bench: Bench, server_url: str, instead: bytes
):
    bad, inside, beside = bench.runs(0, 3)
    await bench.feed(0, {bad: b"+1", inside: b"+1"}, {bad: b"+1" + FORBIDDEN, inside: b"+1"}, {beside: b"+1"})
    await bench.feed(0, {inside: b"end"}, {bad: b"+1"}, {beside: b"end"})
    async with (
        censoring(server_url, instead=instead) as url,
        Server(url) as proxied,
        working(bench.stage("a", proxied)),
    ):
        await eventually(bench.through)
    found = await Outputs.of(bench.server, bench.keys, 0)
    assert [data for _, data in found.logs[bad]][:2] == [saying(bad, 0, 1), saying(bad, 1, "poison")]
    expected = Outputs.expected([{inside: b"+1"}, {inside: b"+1"}, {inside: b"end"}, {beside: b"+1"}, {beside: b"end"}])
    assert (found.logs[inside], found.logs[beside]) == (expected.logs[inside], expected.logs[beside])
    arrived, done = await bench.server.client.hmget(bench.keys.lease(0, GROUP), ["arrived", "done"])
    assert arrived == done


@FAULTS
async def test_a_new_owner_replays_past_an_entry_whose_runs_were_ended(bench: Bench, server_url: str, instead: bytes):
    long, bad = bench.runs(0, 2)
    await bench.feed(0, {long: b"+1"}, {bad: FORBIDDEN}, {long: b"+2"})
    async with censoring(server_url, instead=instead) as url, Server(url) as proxied:
        async with working(bench.stage("a", proxied)):
            await eventually(bench.through)
        await bench.feed(0, {long: b"end"})
        async with working(bench.stage("b", proxied, logic=EndingLogic)):
            await eventually(bench.through)
    found = await Outputs.of(bench.server, bench.keys, 0)
    assert found.logs[long] == Outputs.expected([{long: b"+1"}, {long: b"+2"}, {long: b"end"}]).logs[long]


async def test_what_an_earlier_owner_could_read_ends_as_a_run_whose_state_cannot_be_read(bench: Bench, server_url: str):
    long, lost = bench.runs(0, 2)
    frame = b"+000000000001"
    await bench.feed(0, {long: b"+1"}, {lost: b"+1"}, {lost: frame}, {long: b"+2"})
    async with working(bench.stage("a")):
        await eventually(bench.through)
    await bench.feed(0, {lost: b"+1"}, {long: b"end"})
    async with censoring(server_url, word=frame) as url, Server(url) as proxied:
        for worker in "bc":
            async with working(bench.stage(worker, proxied, logic=EndingLogic)):
                await eventually(bench.through)
            await bench.feed(0, {lost: b"+1"})
    found = await Outputs.of(bench.server, bench.keys, 0)
    assert found.logs[long] == Outputs.expected([{long: b"+1"}, {long: b"+2"}, {long: b"end"}]).logs[long]
    ends = [data for _, data in found.logs[lost] if b"state_unreadable" in data]
    assert ends == [saying(lost, 2, "state_unreadable")]


REQUEST = (
    b'{"messages":[{"id":"not this","text":"a \\"quoted\\" {[ \\\\"}],"type":"generate","n":[1,{"id":2}],"id":"run-7"}'
)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (REQUEST, ("generate", "run-7")),
        (
            b"\x89BIN\r\n\x1a\n\x00\x01" + (20).to_bytes(4) + (22).to_bytes(4) + b"\0\0h\0" + REQUEST,
            ("generate", "run-7"),
        ),
        (b'{"type": "cancel", "run": "r"}', ("cancel", "")),
        (b'{"type":"generate","id":"r', ("generate", "")),
        (b"\x82\xa4type\xa8generate\xa2id\xa5run-7", ("", "")),
        (b'{"data": "{\\"type\\": \\"generate\\", \\"id\\": \\"run-7\\"}"}', ("", "")),
        (b'["id",' * 100_000, ("", "")),
        (b"", ("", "")),
    ],
)
async def test_the_server_finds_the_id_of_a_request_in_json_and_returns_nothing_else(
    bench: Bench, data: bytes, expected: tuple[str, str]
):
    entry_id = await bench.server.client.xadd(bench.keys.requests, {"tenant": "t", "__data__": data})
    assert await type_and_id(bench.server, bench.keys.requests, entry_id.decode()) == expected
