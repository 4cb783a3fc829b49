"""What the services show on `/metrics`, and that dashboard and alerts ask for nothing else."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64decode
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import WITH_TOOLS, Kind, Worker, ended, fleet
from tests.services.webhooks.test_receiver import AWAY, OLD
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Picture, Reply, Script, ToolCall, Turn

OBSERVABILITY = Path(__file__).parents[3] / "deploy" / "observability"
SERVICES = Path(__file__).parents[3] / "services"
FORECAST = Script(
    name="forecast",
    turns=(
        Turn(says=Reply(text="Let me look.", tool_calls=(ToolCall(name="weather", arguments={"city": "Zürich"}),))),
        Turn(says=Reply(text="Take it along.")),
    ),
)
PNG = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==")
PAINTED = Script(name="painted", turns=(Turn(says=Reply(pictures=(Picture(data=PNG),))),))
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}


class Seen:
    """All that the workers show."""

    def __init__(self) -> None:
        self.names: set[str] = {"up"}
        """Of samples; `up` is Prometheus's own."""
        self.labels: dict[str, set[str]] = {}
        self.samples: list[tuple[str, dict[str, str], float]] = []

    def add(self, page: str) -> None:
        for family in text_string_to_metric_families(page):
            self.names |= {family.name + suffix for suffix in SUFFIXES.get(family.type, ())}
            for sample in family.samples:
                self.labels.setdefault(sample.name, set()).update(sample.labels)
                self.samples.append((sample.name, sample.labels, sample.value))

    def sum(self, metric: str, **labels: str) -> float:
        return sum(value for name, has, value in self.samples if name == metric and labels.items() <= has.items())


async def scraped(workers: list[Worker]) -> Seen:
    seen = Seen()
    for worker in workers:
        seen.add(await asyncio.to_thread(lambda url=worker.url: urlopen(f"{url}/metrics").read().decode()))
    return seen


@pytest.fixture(autouse=True)
def _with_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", OLD)


@asynccontextmanager
async def everything(directory: Path, redis_url: str, keys: Keys, provider_url: str) -> AsyncGenerator[list[Worker]]:
    """The workers of all services, a store and a recorder among them."""
    stores, others = directory / "stores", directory / "others"
    stores.mkdir()
    others.mkdir()
    async with fleet(stores, redis_url, keys, provider_url, ("blobs",)) as store:
        toml = f'[gateway]\n[records]\n{AWAY}[blobs]\nservice_url = "{store.workers[0].url}"\n'
        kinds: tuple[Kind, ...] = (*WITH_TOOLS, "recorder", "webhooks", "policy", "gateway")
        async with fleet(others, redis_url, keys, provider_url, kinds, toml) as services:
            yield [*store.workers, *services.workers]


def asked() -> Iterator[str]:
    """The expressions of the dashboard and of the alerts."""
    dashboard: Any = json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for group in yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


async def test_the_pages_have_metrics_of_runs_calls_and_queues_and_all_that_dashboard_and_alerts_use(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
):
    async with (
        MockProvider([FORECAST, PAINTED]) as provider,
        everything(tmp_path, server_url, keys, provider.url) as workers,
    ):
        runs = [await send("forecast", tools=[WEATHER], record=True) for _ in range(3)]
        painted = await send("painted", provider="gemini")
        bad = await send("forecast", provider="nobody")
        await ended(server.client, keys, [*runs, painted, bad])

        async def metrics() -> Seen:
            seen = await scraped(workers)
            check_sums(seen, runs=len(runs), partitions=keys.partitions)
            return seen

        seen = await eventually(metrics)  # a worker counts its writes after the server's reply

    assert {has["queue"] for name, has, _ in seen.samples if name == "tokenbus_deployment_queue_entries"} == {
        "requests",
        "turns",
        "tools",
        "records",
        "notices",
    }

    expressions = list(asked())
    assert len(expressions) > 30
    for expression in expressions:
        named = set(re.findall(r"\b(?:tokenbus_[a-z_]+|process_[a-z_]+|up(?=\{))", expression))
        assert named, expression
        assert named <= seen.names, f"{expression}: no worker exports {named - seen.names}"
        [by] = re.findall(r"\bby \(([a-z, ]+)\)", expression)[:1] or [""]
        wanted = {label.strip() for label in by.split(",") if label} - {"job", "le"}
        for name in set(re.findall(r"\btokenbus_[a-z_]+", expression.partition("scalar(")[0])) & set(seen.labels):
            assert wanted <= seen.labels[name], f"{expression}: {name} has no {wanted - seen.labels[name]}"


def check_sums(seen: Seen, *, runs: int, partitions: int) -> None:
    """The metrics of this many runs with a tool, one that generates an image, and one that fails."""
    assert seen.sum("tokenbus_runs_started_total") == runs + 1
    assert seen.sum("tokenbus_runs_ended_total", status="completed") == runs + 1
    assert seen.sum("tokenbus_runs_ended_total", status="failed") == 1
    assert seen.sum("tokenbus_failures_total", error="invalid_request") == 1
    assert seen.sum("tokenbus_tool_results_total", outcome="ok") == runs
    assert seen.sum("tokenbus_tool_call_seconds_count", outcome="ok") == runs
    assert seen.sum("tokenbus_chunks_total", kind="text") >= 2 * runs
    assert seen.sum("tokenbus_first_text_seconds_count") == runs
    assert seen.sum("tokenbus_provider_attempts_total", outcome="ok") == 2 * runs + 1
    assert seen.sum("tokenbus_provider_call_seconds_count") == 2 * runs + 1
    assert seen.sum("tokenbus_provider_first_text_seconds_count") == 2 * runs
    for stage in ("normalizer", "parser"):
        assert seen.sum("tokenbus_partitions", stage=stage) == partitions
        assert seen.sum("tokenbus_deployment_owned_partitions", stage=stage) == partitions
    assert seen.sum("tokenbus_images_total", location="blob") == 1
    assert seen.sum("tokenbus_records_total", status="completed") == runs
    assert seen.sum("tokenbus_record_raw_bytes_total") > 0
    assert seen.sum("tokenbus_deployment_partitions") == partitions
    assert seen.sum("tokenbus_dead_letters_total", kind="rejected") == 1
    assert seen.sum("tokenbus_dead_letters_total", kind="crashed") == 0
    assert seen.sum("tokenbus_deployment_dead_entries", kind="rejected") == 1
    assert seen.sum("tokenbus_deployment_dead_entries", kind="crashed") == 0
    assert seen.sum("tokenbus_deployment_open_runs") == seen.sum("tokenbus_lag_bytes", stage="parser") == 0


def test_every_metric_of_the_services_is_on_the_dashboard_or_in_an_alert():
    """By their names in the code; FastStream's own are another matter."""
    code = "".join(path.read_text() for path in SERVICES.rglob("*.py"))
    made = set(re.findall(r"""(?:Counter|[Gg]auge|Histogram)\(\s*"(tokenbus_[a-z_]+)\"""", code))
    shown = " ".join(asked())
    assert len(made) > 25
    assert {name for name in made if not re.search(rf"\b{name}(?:_total|_bucket|_count|_sum)?\b", shown)} == set()


def test_every_panel_has_its_own_id_and_says_what_it_shows():
    dashboard: Any = json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel.get("description") for panel in panels if panel["type"] != "row")
