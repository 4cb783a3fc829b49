"""The server accepts every script."""

from __future__ import annotations

from tests.rows import over_rows
from tokenbus.bus.scripts.script import LuaScript, all_scripts
from tokenbus.bus.server.server import Server


@over_rows("one", all_scripts(), ids=lambda one: one.name)
async def test_the_server_compiles_a_script_and_knows_it_by_the_same_sha(server: Server, one: LuaScript) -> None:
    assert await server.client.script_load(one.text) == one.sha
