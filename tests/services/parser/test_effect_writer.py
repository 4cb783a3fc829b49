"""What the parser writes again after a fail-over that lost its commits."""

from __future__ import annotations

import json

import pytest

from tests.contract.bus.scripts.scenes import World, of_parser, session_run_ends
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import RunLifetimes
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus_services.parser.effect_writer import EffectWriter


@pytest.mark.leaves_pending  # the world has entries that are held
async def test_a_session_hears_again_of_the_end_of_its_run_that_a_fail_over_lost(server: Server, keys: Keys) -> None:
    world = World(server, keys)
    await world.build()
    client, run = server.client, world.session_run
    lost = session_run_ends(world)
    for _ in range(2):  # the second finds a session that knows it
        again = Commit(world.parser, world.events)
        EffectWriter(0, keys, RunLifetimes(60_000, 60_000, 60_000)).repeat(lost, [run.id], again)
        assert (await run_script(server, of_parser(world, again)))[0] in (b"ok", b"already")
        await client.hdel(world.parser, "owed")
        assert await client.hget(keys.session(world.session), "run") == run.following.id.encode()
        events = [
            json.loads(fields[b"__data__"]) for _, fields in await client.xrange(keys.of_session(world.session)[0])
        ]
        assert [event["type"] for event in events if "type" in event] == ["run_ended", "delivered"]
