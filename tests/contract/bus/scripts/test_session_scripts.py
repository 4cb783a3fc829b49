"""Scripts of sessions on states that only a fail-over leaves behind, and at their bounds."""

from __future__ import annotations

import json

import pytest

from tests.contract.bus.scripts.scenes import World, append_to
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.commit import FORGOTTEN_AT_ONCE, MOST_EVENT_BYTES
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

pytestmark = pytest.mark.leaves_pending


async def test_a_session_whose_open_run_has_ended_without_it_continues_with_the_next_append(
    server: Server, keys: Keys
) -> None:
    world = World(server, keys)
    await world.build()
    await server.client.hset(keys.run(world.session_run.id), "status", "completed")
    assert await run_script(server, append_to(world, "message", append="next", work=world.work)) == b"ok"
    log, appends, *_ = keys.of_session(world.session)
    told = [json.loads(fields[b"__data__"]) for _, fields in await server.client.xrange(log)][1:]
    ended = {"run": world.session_run.id, "run_seq": 0, "status": "completed"}
    assert told[0].items() >= {"type": "run_ended", **ended}.items()
    assert [event["type"] for event in told] == ["run_ended", "appended", "delivered"]
    assert await server.client.hget(keys.session(world.session), "run") == world.session_run.following.id.encode()
    assert json.loads(await server.client.hget(appends, "next"))["state"] == "delivered"


async def test_a_log_of_large_events_keeps_to_its_bytes_and_the_fate_that_an_old_one_tells_goes_with_it(
    server: Server, keys: Keys
) -> None:
    world = World(server, keys)
    await world.build()
    item = b'"%b"' % (b"x" * 2**20)
    await run_script(server, append_to(world, "configure", append="old", item=item, fields=["version", 1]))
    log, appends, *_ = keys.of_session(world.session)
    assert await server.client.hexists(appends, "old")
    for n in range(MOST_EVENT_BYTES // len(item) + 2):
        assert await run_script(server, append_to(world, "add", append=f"a{n}", item=item, work=b"{}")) == b"ok"
    entries = [(entry.decode(), fields[b"__data__"]) for entry, fields in await server.client.xrange(log)]
    kept = sum(len(event) for _, event in entries)
    assert MOST_EVENT_BYTES * 0.9 < kept <= MOST_EVENT_BYTES
    assert int(await server.client.hget(keys.session(world.session), "told")) == kept - len("{}"), (
        "the scene's own event was not counted"
    )
    assert not await server.client.hexists(appends, "old")
    large = {f"#{entry.partition('-')[2]}" for entry, event in entries if len(event) > len(item)}
    assert large == {name.decode() for name in await server.client.hkeys(appends) if name.startswith(b"#")}


async def test_what_the_runs_before_a_rewrite_added_is_forgotten_in_steps_and_nothing_else(
    server: Server, keys: Keys
) -> None:
    world = World(server, keys)
    await world.build()
    *_, history = keys.of_session(world.session)
    first = 2 * FORGOTTEN_AT_ONCE + 5
    await server.client.hset(
        history, mapping={f"{piece}:{n}": "[]" for n in range(first + 1) for piece in ("in", "out")}
    )
    await server.client.hset(keys.session(world.session), "runs", first + 1)
    for step in range(1, 4):
        call = append_to(world, "rewrite", append=f"r{step}", work=b"[]", subject=str(first), runs=first + 1)
        assert await run_script(server, call) == b"ok"
        begin = min(first, step * FORGOTTEN_AT_ONCE)
        left = {name.decode() for name in await server.client.hkeys(history) if b":" in name}
        assert left == {f"{piece}:{n}" for n in range(begin, first + 1) for piece in ("in", "out")}
