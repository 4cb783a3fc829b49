"""What a script may do at its largest arguments and state is bounded, so nobody takes the server for long.

`python -m tests.bench --only scripts` measures the times of the same calls.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.bus.scripts.largest import LARGEST, SMALL, largest_call
from tests.contract.bus.scripts.scenes import SCENES, World
from tests.servers import binary
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.commit import MOST_TAKEN_BYTES
from tokenbus.bus.scripts.sessions import MOST_WAITING
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus_services.process.embedded_server import EmbeddedServer

pytestmark = pytest.mark.leaves_pending

MOST_COMMANDS = 6_000
"""A server takes 1 to 3 µs for each."""
UNBOUNDED = re.compile(
    r"'(?:HGETALL|HKEYS|HVALS|SMEMBERS|KEYS|DEL|SORT)'"
    r"|'Z(?:REV)?RANGE', \w+, 0, -1"
    r"|'Z(?:REV)?RANGEBYSCORE'(?!.*'LIMIT')"
    r"|'X(?:REV)?RANGE', (?!.*'COUNT')(?!stream, (\w+|p\[1\]), (\w+|p\[1\])\))"
)
"""A command that reads or frees as much as there is."""
GROWS = re.compile(r"\b(?:for|while|repeat)\b.*\bdo\b|\bunpack\b|^--   \w+\.\.\.|'X(?:REV)?RANGE'", re.MULTILINE)
"""What makes a script's time depend on its arguments or on the state."""
BOUNDED_BY = {
    "limits.reserve": ("HGETALL", "MAX_PLACES fields: a worker beyond them waits without a place"),
    "gateway.count_use": ("HKEYS", "four fields a day for a year, and one for each price in the settings"),
    "layout.change": ("HKEYS", "one field for each worker"),
}
"""Those that other code bounds, and how."""


@pytest.fixture(scope="module")
def alone() -> Generator[EmbeddedServer]:
    """A server whose commands are only this module's."""
    with EmbeddedServer(binary=binary()) as server:
        yield server


async def _commands(world: World) -> int:
    stats: dict[str, Any] = await world.client.info("commandstats")
    return sum(each["calls"] for each in stats.values())


@pytest.mark.parametrize("name", sorted(LARGEST))
async def test_a_script_at_its_largest_runs_a_bounded_number_of_commands(name: str, alone: EmbeddedServer):
    async with Server(f"redis://127.0.0.1:{alone.port}") as server:
        world = World(server, Keys(re.sub(r"\W+", "-", name), 4))
        await world.build()
        call = await largest_call(name, world)
        await world.client.script_load(call.script.text)
        before = await _commands(world)
        await run_script(server, call)
        assert await _commands(world) - before < MOST_COMMANDS


@pytest.mark.parametrize("what", ["the end of a session's run", "what steers a session's run"])
async def test_of_what_waits_a_session_takes_as_much_at_once_as_one_step_may_write_and_the_rest_in_order(
    what: str, alone: EmbeddedServer
):
    async with Server(f"redis://127.0.0.1:{alone.port}") as server:
        world = World(server, Keys(re.sub(r"\W+", "-", f"waiting-{what}"), 4))
        await world.build()
        call = await largest_call(f"commit, {what}", world)
        assert (await run_script(server, call))[0] == b"ok"
        _, appends, queue, history = world.keys.of_session(world.session)
        left = [each.decode() for each in await world.client.zrange(queue, 0, -1)]
        assert 0 < len(left) < MOST_WAITING
        assert left == [f"w{n}" for n in range(MOST_WAITING - len(left), MOST_WAITING)]
        assert [name for name in left if not await world.client.hexists(appends, f"!{name}")] == []
        taken = await world.client.hget(history, "in:1" if "end" in what else "steer:0")
        assert MOST_TAKEN_BYTES * 0.9 < len(taken) <= MOST_TAKEN_BYTES
        kept = sum([await world.client.hstrlen(appends, f"!{name}") for name in left])
        assert int(await world.client.hget(world.keys.session(world.session), "waiting")) == kept


def test_no_script_reads_or_frees_as_much_as_there_is():
    room = Path(scripts.__file__).parent
    found = {
        path.name.removesuffix(".lua"): hit[0]
        for path in room.rglob("*.lua")
        for line in path.read_text().splitlines()
        if not line.startswith("--") and (hit := UNBOUNDED.search(line))
    }
    assert found.keys() == BOUNDED_BY.keys()
    assert all(BOUNDED_BY[name][0] in hit for name, hit in found.items())


def test_each_script_has_a_largest_call_or_costs_the_same_whatever_it_gets():
    largest = {name.partition(",")[0] for name in LARGEST}
    assert not largest & SMALL
    assert largest | SMALL == set(SCENES)


def test_a_script_without_a_largest_call_has_no_loop_and_no_list():
    texts = {
        path.name.removesuffix(".lua"): path.read_text()
        for path in Path(scripts.__file__).parent.rglob("*.lua")
        if path.parent.name != "pieces"
    }
    found = {name: hits for name in SMALL if (hits := GROWS.findall(texts[name]))}
    assert found == {}
