"""Subscribers that know only design.md: plain redis-py with json, and a plain FastStream subscriber."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis.asyncio as redis

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import WITH_TOOLS, ended
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, Fixed, Script, Turn
from tokenbus_services.mock_provider.demo import DEMO_MODEL, DEMO_PROMPT, demo_scripts


async def follow(url: str, streams: list[str], events: list[dict[str, Any]], end: asyncio.Event) -> None:
    """A subscriber as a user would write it."""
    client = redis.from_url(url)
    last: dict[str, str] = dict.fromkeys(streams, "0-0")
    while not end.is_set():
        found: Any = await client.xread(last, block=200, count=100)  # pyright: ignore[reportArgumentType]
        for name, entries in found:
            for entry_id, fields in entries:
                last[name.decode()] = entry_id.decode()
                events.append(json.loads(fields[b"__data__"]))
    await client.aclose()


@asynccontextmanager
async def faststream_listener(url: str, keys: Keys) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A FastStream service beside ours."""
    script = str(Path(__file__).parent / "faststream_listener.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        script,
        url,
        keys.prefix,
        str(keys.partitions),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def test_plain_subscribers_follow_visible_and_blocks(
    server: Server, server_url: str, keys: Keys, send: Send, deployed: Deploy
) -> None:
    visible: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    end = asyncio.Event()
    topics = {t: [f"{keys.prefix}:{{{n}}}:{t}" for n in range(keys.partitions)] for t in ("visible", "blocks")}
    [demo] = demo_scripts()
    cut = [Turn(says=turn.says, delivery=Delivery(cuts=Fixed(size=23))) for turn in demo.turns]
    async with (
        deployed([Script(name=DEMO_MODEL, turns=tuple(cut))], WITH_TOOLS),
        faststream_listener(server_url, keys) as listener,
    ):
        readers = [
            asyncio.create_task(follow(server_url, topics["visible"], visible, end)),
            asyncio.create_task(follow(server_url, topics["blocks"], blocks, end)),
        ]
        run = await send(DEMO_MODEL, DEMO_PROMPT, tools=[WEATHER])
        [log] = (await ended(server.client, keys, [run])).values()
        wanted = [e for e in log if e["type"] == "chunk" and e["visible"]]
        assert listener.stdout
        by_faststream = [(await listener.stdout.readline()).decode().strip() for _ in wanted]
        await eventually(lambda: len(visible) >= len(wanted))
        end.set()
        await asyncio.gather(*readers)
    judge.check(log)  # pyright: ignore[reportArgumentType]
    assert log[-1]["type"] == "completed"
    assert visible == wanted
    assert by_faststream == [f"{e['seq']} {e['text']!r}" for e in wanted]
    assert blocks == [e for e in log if e["type"] in ("block_start", "block_complete")]
    assert [e["kind"] for e in blocks if e["type"] == "block_complete"] == [
        "thinking",
        "text",
        "tool_call",
        "tool_result",
        "text",
    ]
    [result] = [e for e in blocks if e["type"] == "block_complete" and e["kind"] == "tool_result"]
    assert json.loads(result["content"])["sky"] == "light rain"
    assert "Zürich" in str([e.get("input") for e in blocks])
