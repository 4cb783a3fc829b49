"""Limits, paths and settings go by the model that is asked for, however the request spells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import PIPELINE, ended, fleet, provider_table
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn

HELLO = Script(name="hello", turns=(Turn(says=Reply(text="Hello there")),))
SILENT = Script(name="silent", turns=(Turn(says=Reply(text="late"), delivery=Delivery(delay_s=3600)),))
LIMITS = "[limits.providers.gemini.models.silent]\nconcurrency = 1\n"


async def test_no_spelling_of_a_name_passes_a_models_limit_by(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    def choose(_: object) -> Script:
        return SILENT

    async with (
        MockProvider([SILENT], choose=choose) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE, LIMITS),
    ):
        spellings = ["silent", "models/silent", " Silent ", "models/models/SILENT"]
        runs = [await send(model, provider="gemini") for model in spellings]

        async def limits() -> set[str]:
            return {key.decode() async for key in server.client.scan_iter(keys.limit("model:*"))}

        async def all_asked() -> bool:
            """One has the place, and the others were refused by the same limit."""
            assert await limits() == {keys.limit("model:gemini/silent"), keys.limit("model:gemini/silent:held")}
            waiting = [await server.client.hget(keys.run(run), "status") for run in runs]
            return waiting == [b"open"] * len(runs) and len(provider.requests) == 1

        await eventually(all_asked)
        for run in runs:
            await server.client.xadd(keys.requests, {"__data__": f'{{"type":"cancel","run":"{run}"}}'})
        logs: Any = await ended(server.client, keys, runs)
        assert len(provider.requests) <= len(runs)
    assert {log[-1]["type"] for log in logs.values()} == {"cancelled"}


@pytest.mark.parametrize("model", ["../../../x", "x/../../y", "a%2f..%2fb", "x\\..\\y"])
async def test_a_model_that_would_choose_the_path_never_reaches_the_provider(
    server: Server, keys: Keys, send: Send, model: str, deployed: Deploy
) -> None:
    async with deployed([HELLO], PIPELINE) as (provider, _):
        run = await send(model, provider="gemini")
        log: Any = (await ended(server.client, keys, [run]))[run]
        assert not provider.requests
    assert (log[-1]["error"]["code"], log[-1]["error"]["where"]) == ("request_invalid", "model")


async def test_an_alias_is_the_model_that_the_settings_say(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with MockProvider([HELLO]) as provider:
        aliases = 'model_aliases = { "hello-latest" = "hello" }'
        table = provider_table("aliased", "gemini", provider.url, aliases)
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, table):
            runs = [await send(model, provider="aliased") for model in ("hello-latest", " models/Hello-Latest")]
            logs: Any = await ended(server.client, keys, runs)
    for log in logs.values():
        assert (log[0]["model"], log[-1]["type"]) == ("hello", "completed")
