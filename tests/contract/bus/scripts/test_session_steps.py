"""A session's step that fails inside a commit fails no commit, and the server's log tells of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.bus.scripts.scenes import World, end_session_run, steer_session_run
from tests.servers import binary
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.script import ScriptCall
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus_services.process.embedded_server import EmbeddedServer

STEPS = {"end": end_session_run, "steer": steer_session_run}


@pytest.mark.leaves_pending
@pytest.mark.parametrize("name", sorted(STEPS))
async def test_a_step_of_a_session_that_fails_is_in_the_servers_log_and_the_commit_is_done(name: str, tmp_path: Path):
    step: Callable[[World], ScriptCall] = STEPS[name]
    with EmbeddedServer(tmp_path, binary=binary()) as alone:
        async with Server(f"redis://127.0.0.1:{alone.port}") as server:
            world = World(server, Keys("t", 4))
            await world.build()
            call = step(world)
            session, queue = world.keys.session(world.session), world.keys.of_session(world.session)[2]
            await world.client.delete(queue)  # then a key of another type
            await world.client.hset(queue, "a\r\nforged", "line")
            assert (await run_script(server, call))[0] == b"ok"
        lines = (tmp_path / "server.log").read_text(errors="replace").splitlines()
    [line] = [line for line in lines if "session_step_failed" in line]
    assert re.search(rf"session={re.escape(session)} run={world.session_run.id}: .*WRONGTYPE", line)
