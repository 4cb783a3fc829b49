"""Fetcher, normalizer and parser in one process: the same events, and any worker takes over from any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import CHAINED, SEPARATE, ended, fleet, log_of
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Status, ToolCall, Turn

WORDS = " ".join(f"word{n}" for n in range(120))
STORY = Script(name="story", turns=(Turn(says=Reply(text=WORDS), delivery=Delivery(pace=40)),))
ASKS = Script(
    name="asks",
    turns=(
        Turn(
            says=Reply(
                thinking="Hm.", text="Let me look.", tool_calls=(ToolCall(name="weather", arguments={"city": "Oslo"}),)
            )
        ),
        Turn(says=Reply(text="It rains.")),
    ),
)
FAILS = Script(name="fails", turns=(Turn(says=Reply(), fault=Status(status=400)),), repeat_last=True)


async def test_a_pipeline_writes_the_events_that_separate_services_write(
    server: Server, server_url: str, send: Send, keys: Keys, tmp_path: Path
) -> None:
    told: list[dict[str, list[Any]]] = []
    async with MockProvider([STORY, ASKS, FAILS]) as provider:
        for chain in (SEPARATE, CHAINED):
            directory = tmp_path / chain[0]
            directory.mkdir()
            async with fleet(directory, server_url, keys, provider.url, (*chain, "tools")):
                runs = {model: await send(model, tools=[WEATHER]) for model in ("story", "asks", "fails")}
                logs: Any = await ended(server.client, keys, list(runs.values()))
            for run in runs.values():
                judge.check(logs[run])
            told.append({model: judge.without_timing(logs[run]) for model, run in runs.items()})
    assert told[0] == told[1]


async def test_pipelines_and_separate_services_take_over_from_each_other_in_mid_run(
    server: Server, server_url: str, send: Send, keys: Keys, tmp_path: Path
) -> None:
    async with (
        MockProvider([STORY]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, (*CHAINED, "fetcher")) as running,
    ):
        runs = [await send("story", on_failure="restart") for _ in range(8)]

        async def streaming() -> bool:
            return all([len(await log_of(server.client, keys, run)) > 10 for run in runs])

        await eventually(streaming, timeout=60)
        await running.start(*SEPARATE)
        running.workers[0].kill()
        await running.start(*CHAINED)
        runs += [await send("story", on_failure="restart") for _ in range(8)]
        logs: Any = await ended(server.client, keys, runs)
    for run in runs:
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed"
