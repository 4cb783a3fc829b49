"""Calls that last: neither a provider nor a tenant takes a fetcher from the others, and each call ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Send
from tests.e2e.fleet import PIPELINE, ended, fleet, provider_table
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, Fixed, MockProvider, Reply, Script, Turn, Wire

SLOTS = 4
COMMENT = b": wait\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def endless(name: str, keeps_open: bytes) -> Script:
    """An answer that only says that it is coming."""
    delivery = Delivery(cuts=Fixed(size=len(keeps_open)), pace=20)
    return Script(name=name, turns=(Turn(says=Wire(stream=keeps_open * 20_000), delivery=delivery),))


COMMENTS, PINGS = endless("comments", COMMENT), endless("pings", PING)
STORY = Script(name="story", turns=(Turn(says=Reply(text="word " * 5_000), delivery=Delivery(pace=20)),))
FINE = Script(name="fine", turns=(Turn(says=Reply(text="Hello there.")),))
FEW = f"\n[limits]\nruns_per_fetcher = {SLOTS}\n[retry]\nmax_attempts = 1\n"


@pytest.mark.parametrize(
    ("greedy", "modest"),
    [
        ({"provider": "anthropic", "metadata": {"tenant": "a"}}, {"provider": "healthy", "metadata": {"tenant": "b"}}),
        (
            {"provider": "anthropic", "metadata": {"tenant": "a"}},
            {"provider": "anthropic", "metadata": {"tenant": "b"}},
        ),
        ({"provider": "anthropic"}, {"provider": "healthy"}),
    ],
    ids=["another tenant at another provider", "another tenant", "another provider"],
)
async def test_calls_that_only_drip_comments_take_a_fetcher_from_nobody_else(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send, greedy: Any, modest: Any
) -> None:
    async with MockProvider([COMMENTS, FINE]) as provider:
        healthy = provider_table("healthy", "anthropic", provider.url)
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, healthy + FEW):
            dripping = [await send("comments", **greedy) for _ in range(5 * SLOTS)]
            await provider.requested(SLOTS)
            others = [await send("fine", **modest) for _ in range(5)]
            logs = await ended(server.client, keys, others)
            assert [logs[run][-1]["type"] for run in others] == ["completed"] * 5
            for run in dripping:
                assert await server.client.hget(keys.run(run), "status") == b"open"
                await server.client.xadd(keys.requests, {"__data__": json.dumps({"type": "cancel", "run": run})})
            await ended(server.client, keys, dripping)


@pytest.mark.parametrize(
    ("model", "setting", "code"),
    [
        ("comments", "progress_timeout_s", "no_progress"),
        ("pings", "progress_timeout_s", "no_progress"),
        ("story", "call_timeout_s", "call_timeout"),
    ],
)
async def test_a_call_without_progress_and_one_that_never_ends_are_ended(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send, model: str, setting: str, code: str
) -> None:
    async with MockProvider([COMMENTS, PINGS, STORY]) as provider:
        brief = provider_table("brief", "anthropic", provider.url, f"{setting} = 1.0")
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, brief + FEW):
            run = await send(model, provider="brief")
            logs: Any = await ended(server.client, keys, [run])
    last = logs[run][-1]
    assert (last["type"], last["error"]["code"]) == ("incomplete", code)
    assert len(provider.requests) == 1
