"""What a hostile provider sends ends its own run with an error that names it, and no run beside it has to wait."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.e2e.conftest import Send, sender
from tests.e2e.fleet import PIPELINE, ended, fleet
from tests.security.hostile_answers import HARM, KEY, hostile_provider
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Turn

HELLO = Script(name="hello", turns=(Turn(says=Reply(text="Hello there")),))
SETTINGS = """
[providers.hostile]
api = "openai-chat"
base_url = "{url}/v1"
api_key_env = "HOSTILE_KEY"
[retry]
base_delay_s = 0.01
max_attempts = 2
[limits]
answer_bytes = 12_582_912
block_characters = 16777216
"""
ENDS: dict[str, tuple[str, str]] = {
    "doubly compressed": ("body_encoding", "protocol"),
    "a bomb": ("body_ratio", "limit"),
    "a bomb of text": ("answer_too_large", "limit"),
    "not compressed": ("body_undecodable", "protocol"),
    "an endless error": ("http_500", "server"),
    "endless headers": ("answer_head", "protocol"),
    "many headers": ("answer_head", "protocol"),
    "long headers": ("http_400", "invalid_request"),
    "interim answers": ("answer_head", "protocol"),
    "wait for ever": ("http_429", "rate_limit"),
    "chunks of a byte": ("", ""),  # those that come in one read are one piece, and cost no more than it
    "a long name": ("too_large", "limit"),
    "a long id": ("too_large", "limit"),
    "comments": ("too_large", "limit"),
    "an endless line": ("too_large", "limit"),
    "blank lines": ("too_large", "limit"),
    "beginnings of a key": ("too_large", "limit"),
}
"""Code and class of each one's error."""
AT_ONCE = {"beginnings of a key": 3}
"""So many of those that are much work to search."""
SLACK_S = 2.0
"""Alone on a machine the probes take no 100 ms longer; here others may be at work."""


@pytest.fixture
def send(server: Server, keys: Keys) -> Send:
    return sender(server, keys)


async def test_each_hostile_answer_ends_its_own_run_by_name_and_other_runs_do_not_wait(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTILE_KEY", KEY)
    assert ENDS.keys() == HARM.keys()
    async with (
        MockProvider([HELLO]) as provider,
        hostile_provider() as hostile,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE, SETTINGS.format(url=hostile)),
    ):

        async def probe() -> float:
            start = time.monotonic()
            run = await send("hello")
            log: Any = (await ended(server.client, keys, [run]))[run]
            assert log[-1]["type"] == "completed", log[-1]
            return time.monotonic() - start

        before = [await probe() for _ in range(10)]
        logs: dict[str, Any] = {}
        took: dict[str, list[float]] = {}
        for model in HARM:
            runs = [await send(model, provider="hostile") for _ in range(AT_ONCE.get(model, 1))]
            ending = asyncio.create_task(ended(server.client, keys, runs))
            took[model] = [await probe()]
            while not ending.done():
                took[model].append(await probe())
            logs[model] = (await ending)[runs[0]]
            summary = f"median {median(took[model]) * 1000:.0f}, worst {max(took[model]) * 1000:.0f} ms"
            print(f"{model:20} {len(took[model]):4} probes, {summary} (alone {median(before) * 1000:.0f})", flush=True)
    for model, (code, kind) in ENDS.items():
        end = logs[model][-1]
        error = end.get("error", {"code": "", "class": ""})
        assert (error["code"], error["class"]) == (code, kind), f"{model}: {end}"
        assert len(str(end)) < 20_000, f"{model}: its end repeats what it was sent"
        longest = median if model in AT_ONCE else max
        assert longest(took[model]) < max(before) + SLACK_S, f"runs beside {model!r} took {took[model]}"
    assert logs["wait for ever"][-1]["error"]["retry_after_s"] == 86_400
