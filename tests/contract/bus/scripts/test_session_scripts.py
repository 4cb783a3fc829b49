"""Scripts of sessions on states that only a fail-over leaves behind."""

from __future__ import annotations

import json

import pytest

from tests.contract.bus.scripts.scenes import World, append_to
from tokenbus.bus.keys import Keys
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
