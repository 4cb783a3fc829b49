"""A provider whose answer is very many short blocks: no script writes much at once, and runs elsewhere end as usual."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import sender
from tests.e2e.fleet import PIPELINE, ended, fleet
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.commit import COMMIT_VALUES
from tokenbus.bus.server.run_scripts import JOINED_VALUES
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Turn, Wire
from tokenbus_services.process.embedded_server import EmbeddedServer

PARTS = 100_000
EVENTS, PARTS_AN_EVENT = 10, 4000
"""The same in events that are small enough."""
SLOW_US = 2000
"""Scripts that took this long are looked at: a large one takes longer on any machine."""


def stream(events: int, number: int) -> bytes:
    """A stream of Gemini's API with this many events of so many parts."""
    parts = [{"text": "x", "thought": bool(n % 2)} for n in range(number)]
    event = json.dumps({"candidates": [{"content": {"parts": parts, "role": "model"}, "index": 0}]})
    end = json.dumps({"candidates": [{"content": {"parts": []}, "index": 0, "finishReason": "STOP"}]})
    return f"data: {event}\r\n\r\n".encode() * events + f"data: {end}\r\n\r\n".encode()


SCRIPTS = [
    Script(name="at-once", turns=(Turn(says=Wire(stream=stream(1, PARTS))),)),
    Script(name="many", turns=(Turn(says=Wire(stream=stream(EVENTS, PARTS_AN_EVENT))),)),
    Script(name="small", turns=(Turn(says=Reply(text="a word or two")),)),
]


@pytest.mark.parametrize(("script", "ends"), [("at-once", "failed"), ("many", "completed")])
async def test_an_answer_of_many_blocks_is_written_in_small_steps_beside_other_runs(
    tmp_path: Path, script: str, ends: str
) -> None:
    keys = Keys(prefix="many", partitions=2)
    with EmbeddedServer(binary=binary()) as process:
        async with (
            MockProvider(SCRIPTS) as provider,
            fleet(tmp_path, process.url, keys, provider.url, PIPELINE),
            Server(process.url) as server,
        ):
            await server.client.config_set("slowlog-log-slower-than", SLOW_US)
            await server.client.config_set("slowlog-max-len", 100_000)
            await server.client.slowlog_reset()
            send = sender(server, keys)
            large, *_ = _names(keys, 0, "large")
            await send(script, provider="gemini", id=large)
            away, beside = _names(keys, 1, "probe"), 0
            while await server.client.hget(keys.run(large), "status") in (None, b"open"):
                run = await send("small", id=away[beside], provider="openai-chat")
                beside += 1

                async def over(run: str = run) -> bool:
                    return await server.client.hget(keys.run(run), "status") == b"completed"

                await eventually(over)
            log = (await ended(server.client, keys, [large]))[large]
            slow: list[dict[str, Any]] = await server.client.slowlog_get(100_000)
    assert beside
    judge.check(log)
    last: Any = log[-1]
    assert last["type"] == ends
    if ends == "failed":
        assert last["error"]["code"] == "too_large"
    else:
        assert sum(event["type"] == "block_complete" for event in log) >= EVENTS * PARTS_AN_EVENT - EVENTS
    evals = [one for one in slow if one["command"].startswith((b"EVALSHA", b"EVAL "))]
    assert max((_arguments(one["command"]) for one in evals), default=0) < max(COMMIT_VALUES, JOINED_VALUES) + 1000


def _names(keys: Keys, partition: int, prefix: str) -> list[str]:
    """Names of runs of the partition."""
    return [name for name in (f"{prefix}-{n}" for n in range(5000)) if keys.partition_of(name) == partition]


def _arguments(command: bytes) -> int:
    """How many arguments a command of the slow log had."""
    more = re.search(rb"\.\.\. \((\d+) more arguments\)$", command)
    return int(more[1]) + 31 if more else command.count(b" ")
