"""`tokenbus repartition` on a Cluster of three nodes: clients of the gateway read each event once, without a gap."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.fleet import PIPELINE, fleet
from tests.servers import cluster_group
from tests.services.cli.process import run as command
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import read_layout
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, Turn

BEFORE, AFTER = 3, 11
TEXT = " ".join(f"word{n}" for n in range(40))
SURFACES = ("chat", "responses", "native")
SCRIPTS = [
    *(
        Script(name=f"slow-{s}", turns=(Turn(says=Reply(text=TEXT), fault=Stall(after_text="word9")),))
        for s in SURFACES
    ),
    *(Script(name=f"quick-{s}-{n}", turns=(Turn(says=Reply(text=TEXT)),)) for s in SURFACES for n in range(2)),
]


class Reader:
    """Reads one answer of a gateway to its end."""

    def __init__(self, http: httpx.AsyncClient, surface: str, name: str) -> None:
        self.surface = surface
        self.name = name
        self.run = ""
        self.events: list[dict[str, Any]] = []
        self._http = http

    async def read(self) -> None:
        headers = {"accept": "text/event-stream"}
        async with self._http.stream("POST", self._path, json=self._body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            self.run = answer.headers["x-tokenbus-run"]
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line.removeprefix("data: ")))

    @property
    def _path(self) -> str:
        return {"chat": "/api/chat", "responses": "/v1/responses", "native": "/runs"}[self.surface]

    @property
    def _body(self) -> dict[str, Any]:
        model = f"anthropic/{self.name}"
        if self.surface == "chat":
            request = {"id": "m1", "role": "user", "parts": [{"type": "text", "text": self.name}]}
            return {"id": f"chat-{self.name}", "model": model, "messages": [request]}
        if self.surface == "responses":
            return {"model": model, "input": self.name, "stream": True}
        return {"id": self.name, "model": model, "messages": [{"role": "user", "content": self.name}]}

    def check(self, seqs: list[int]) -> None:
        """The text is whole and once, and nothing was left out or repeated. ``seqs``: those of the run's log."""
        if self.surface == "chat":
            assert "".join(e["delta"] for e in self.events if e["type"] == "text-delta") == TEXT
            assert [e["type"] for e in self.events].count("finish") == 1
        elif self.surface == "responses":
            deltas = [e["delta"] for e in self.events if e["type"] == "response.output_text.delta"]
            assert "".join(deltas) == TEXT
            assert [e["sequence_number"] for e in self.events] == list(range(len(self.events)))
            assert self.events[-1]["type"] == "response.completed"
        else:
            assert [e["seq"] for e in self.events] == seqs


async def test_open_answers_of_a_gateway_continue_during_a_change_and_new_ones_begin_in_added_partitions(
    tmp_path: Path,
) -> None:
    keys = Keys("moved", BEFORE)
    with cluster_group() as group:
        async with (
            MockProvider(SCRIPTS) as provider,
            fleet(tmp_path, group.url, keys, provider.url, (*PIPELINE, "gateway"), "[gateway]") as running,
            Server(group.url) as server,
            httpx.AsyncClient(base_url=running.worker_of("gateway").url, timeout=120) as http,
            asyncio.TaskGroup() as tasks,
        ):
            slow = [Reader(http, surface, f"slow-{surface}") for surface in SURFACES]
            reading = [tasks.create_task(reader.read()) for reader in slow]
            await provider.until(lambda: sum(e.state == "stalled" for e in provider.requests) == len(slow))
            await eventually(lambda: all(reader.events for reader in slow), timeout=60)

            changed = await command("repartition", str(AFTER), TOKENBUS_CONFIG=str(tmp_path / "tokenbus.toml"))
            assert changed.code == 0, changed.error

            async def fenced() -> bool:
                layout = await read_layout(server, keys)
                epochs = [await server.client.hget(keys.lease(p, "parser"), "epoch") for p in range(AFTER)]
                return layout is not None and set(epochs) == {str(layout.epoch).encode()}

            await eventually(fenced, timeout=60)
            # A gateway that starts now has the earlier number in its settings.
            [late] = await running.start("gateway")
            async with httpx.AsyncClient(base_url=late.url, timeout=120) as through_late:
                quick = [
                    Reader(through_late if n else http, surface, f"quick-{surface}-{n}")
                    for surface in SURFACES
                    for n in range(2)
                ]
                await asyncio.gather(*(reader.read() for reader in quick))
                assert not any(task.done() for task in reading), "they are open over the whole change"
                for exchange in provider.requests:
                    if exchange.state == "stalled":
                        provider.resume(exchange)
                await asyncio.gather(*reading)
                for through in (http, through_late):
                    for reader in (*slow, *quick):
                        found = (await through.get(f"/runs/{reader.run}")).json()
                        assert (found["status"], found["text"]) == ("completed", TEXT)
            async with Client(group.url, prefix=keys.prefix, partitions=BEFORE) as bus:
                for reader in (*slow, *quick):
                    reader.check([event.seq async for event in bus.follow(reader.run)])
            for reader, number in ((slow, BEFORE), (quick, AFTER)):
                for run in (each.run for each in reader):
                    places = [p for p in range(AFTER) if await server.client.exists(keys.within(p).run(run))]
                    place = Keys(keys.prefix, number).partition_of(run)
                    assert places == [place], "each run is in one partition, by its number"
            nodes = {group.master_of(keys.topic(p, "events")).port for p in range(AFTER)}
            assert len(nodes) == 3
