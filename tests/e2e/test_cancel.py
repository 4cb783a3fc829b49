"""Cancel: the provider's socket closes, the partial output stays, nothing follows the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Send
from tests.e2e.fleet import PIPELINE, ended, fleet
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server import Server
from tokenbus_services.replay import Delivery, ReplayServer, Reply, Script, Stall, Turn

SLOW = Script(name="slow", turns=(Turn(says=Reply(text="one two three four"), fault=Stall(after_text="three")),))
SILENT = Script(name="silent", turns=(Turn(says=Reply(text="late"), delivery=Delivery(delay_s=3600)),))


async def cancel(server: Server, keys: Keys, run: str, **fields: Any) -> None:
    request = {"type": "cancel", "run": run, **fields}
    await server.client.xadd(keys.requests, {"__data__": json.dumps(request)})


@pytest.mark.parametrize(
    ("model", "stream"), [("slow", True), ("silent", True), ("silent", False)], ids=["mid-stream", "before", "whole"]
)
async def test_a_cancel_closes_the_providers_socket(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, model: str, stream: bool
) -> None:
    async with (
        ReplayServer([SLOW, SILENT]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE),
    ):
        run = await send(model, stream=stream)
        exchange = await provider.requested()
        if model == "slow":

            async def heard() -> bool:
                return b"two" in b"".join([f[b"__data__"] for _, f in await server.client.xrange(keys.log(run))])

            await eventually(heard)
        await cancel(server, keys, run, reason="enough", heard_through=3)
        await provider.disconnected(exchange)
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    end = log[-1]
    assert (end["type"], end["reason"], end["heard_through"]) == ("cancelled", "enough", 3)
    assert judge.text(log) == ("one two three" if model == "slow" else "")
    assert await server.client.hget(keys.run(run), "status") == b"cancelled"


async def test_a_cancel_that_comes_before_its_request_takes_effect(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with ReplayServer([SLOW]) as provider, fleet(tmp_path, server_url, keys, provider.url, PIPELINE):
        await cancel(server, keys, "early")
        await eventually(lambda: server.client.exists(keys.run("early")))
        run = await send("slow", id="early")
        log: Any = (await ended(server.client, keys, [run]))[run]
        assert not provider.requests, "the provider was never called"
    assert [e["type"] for e in log] == ["started", "cancelled"]
