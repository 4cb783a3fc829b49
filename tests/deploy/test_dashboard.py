"""Every panel of the dashboard shows data: its queries, asked of a real Prometheus over a real load."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from tests.deploy.prometheus_server import OBSERVABILITY, Prometheus, needs_prometheus, prometheus
from tests.e2e.conftest import WEATHER, sender
from tests.e2e.fleet import WITH_TOOLS, Fleet, Kind, ended, fleet
from tests.e2e.media.test_media import PNG, message_with, upload
from tests.services.webhooks.test_receiver import AWAY, OLD
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.mock_provider import Delivery, MockProvider, Picture, Reply, Script, Status, ToolCall, Turn

CALL = ToolCall(name="weather", arguments={"city": "Bern"})
EXIT_NOW = {"name": "exit_now", "parameters": {"type": "object", "properties": {}}}
SCRIPTS = [
    Script(name="forecast", turns=(Turn(says=Reply(text="I look.", tool_calls=(CALL,))), Turn(says=Reply(text="Ok.")))),
    Script(
        name="exits",
        turns=(Turn(says=Reply(tool_calls=(ToolCall(name="exit_now", arguments={}),))), Turn(says=Reply(text="Ok."))),
    ),
    Script(name="painted", turns=(Turn(says=Reply(pictures=(Picture(data=PNG * 100),))),)),
    Script(name="retried", turns=(Turn(says=Reply(text="At last."), first=(Status(status=529),)),)),
    Script(name="gone", turns=(Turn(says=Reply(text="never"), fault=Status(status=404)),)),
    Script(name="plain", turns=(Turn(says=Reply(text="swordfish and more. " * 5), delivery=Delivery(pace=20)),)),
]
KEY = new_key()
TOML = f"""
[retry]
base_delay_s = 0.01
[records]
[otel]
endpoint = "http://127.0.0.1:9"
[limits.providers.anthropic]
concurrency = 1
[limits.tenants.acme]
concurrency = 100
[providers.openai-responses.uploads]
[policies.stops]
use = "tests.e2e.policies.guards:StopAt"
[policies.stops.options]
word = "fish"
by = "."
[policies.exits]
use = "tests.e2e.policies.bad_policies:Exits"
on_error = "pass"
[gateway.prices."anthropic/"]
input = 1000
output = 1000
[gateway.keys.web]
sha256 = "{KEY.sha256}"
tenant = "acme"
metrics = true
[tools.exit_now]
kind = "python"
call = "tests.services.tools.python.harmful_tools:exit_now"
"""
"""An unavailable collector, so that the panel of lost spans has data."""
ONLY_AFTER_A_DEFECT = {"sum by (work) (increase(tokenbus_work_failures_total[$__rate_interval]))"}
"""A healthy deployment has no series of these. That their metrics exist, tests/e2e/operating/test_metrics.py sees."""


WINDOW = "10m"
"""In place of the one that Grafana takes: as long as a loaded machine may need for some waves."""


class Query(NamedTuple):
    panel: str
    expression: str


def queries() -> Iterator[Query]:
    for panel in json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["expr"])


async def without_data(watching: Prometheus) -> list[Query]:
    """The queries that find no number now."""
    found: list[Query] = []
    for query in queries():
        values = await watching.values(query.expression.replace("$__rate_interval", WINDOW))
        if not any(math.isfinite(value) for value in values):
            found.append(query)
    return found


@asynccontextmanager
async def everything(directory: Path, redis_url: str, keys: Keys, provider_url: str) -> AsyncGenerator[Fleet]:
    """All services; the store last."""
    stores, others = directory / "stores", directory / "others"
    stores.mkdir()
    others.mkdir()
    async with fleet(stores, redis_url, keys, provider_url, ("blobs",)) as store:
        kinds: tuple[Kind, ...] = ("gateway", *WITH_TOOLS, "recorder", "webhooks", "policy")
        toml = f'{TOML}{AWAY}[blobs]\nservice_url = "{store.workers[0].url}"\n'
        async with fleet(others, redis_url, keys, provider_url, kinds, toml) as services:
            services.workers += store.workers
            try:
                yield services
            finally:
                services.workers.remove(*store.workers)


@needs_prometheus
async def test_every_query_of_every_panel_finds_data_after_a_load(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = sender(server, keys)
    monkeypatch.setenv("MARKS", str(tmp_path))
    monkeypatch.setenv("HOOK_SECRET", OLD)
    async with (
        MockProvider(SCRIPTS) as provider,
        everything(tmp_path, server_url, keys, provider.url) as services,
    ):
        gateway, *_, store = services.workers

        async def load(wave: int) -> None:
            source = await upload(store.url, PNG + bytes([wave]) * 100)

            def of(name: str, **fields: Any) -> Any:
                return send(name, f"{name} {wave} {fields}", metadata={"tenant": "acme"}, **fields)

            seen = send("plain", provider="openai-responses", messages=message_with(source))
            wave_runs = [of("forecast", tools=[WEATHER], record=True), of("painted", provider="gemini"), of("retried")]
            wave_runs.append(of("exits", tools=[EXIT_NOW]))
            wave_runs += [of("plain", policies=["stops"]), of("plain", policies=["exits"]), of("gone"), seen]
            runs = await asyncio.gather(*wave_runs, send("plain", provider="nobody"))
            await asyncio.to_thread(complete, gateway.url, f"gateway {wave}")
            await ended(server.client, keys, runs)

        async with prometheus(
            tmp_path / "prometheus", [urlsplit(each.url).netloc for each in services.workers], key=KEY.text
        ) as p:
            waves = count()

            async def all_have_data() -> bool:
                await load(next(waves))  # a rate needs a series that grew between two looks
                missing = [q for q in await without_data(p) if q.expression not in ONLY_AFTER_A_DEFECT]
                assert not missing, "\n".join(f"{query.panel}: {query.expression}" for query in missing)
                return True

            await eventually(all_have_data, timeout=120)


def complete(gateway: str, text: str) -> None:
    """Ask the gateway, with the tenant's key."""
    body = json.dumps({"model": "anthropic/plain", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"authorization": f"Bearer {KEY.text}", "content-type": "application/json"}
    with urlopen(Request(f"{gateway}/v1/chat/completions", body, headers)) as answer:
        answer.read()
