"""The alerts hold what they promise: promtool with series for each state, and a Prometheus over a scaled fleet."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

import pytest

from tests.e2e.fleet import PIPELINE, fleet
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus_services.process.embedded_server import free_port

OBSERVABILITY = Path("deploy/observability")
STATES = Path(__file__).with_name("alerts.test.yml")

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here")
needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus here")


def promtool(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=directory, capture_output=True, text=True, check=False)


@needs_promtool
def test_each_state_raises_its_alert_and_no_other_state_does(tmp_path: Path) -> None:
    shutil.copy(OBSERVABILITY / "alerts.yml", tmp_path)
    shutil.copy(STATES, tmp_path)
    done = promtool(tmp_path, "test", "rules", STATES.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_state_that_raises_it() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", (OBSERVABILITY / "alerts.yml").read_text()))
    raised = set(re.findall(r"alertname: (\w+)\n\s+exp_alerts", STATES.read_text()))
    raised |= set(re.findall(r'alertname="(\w+)"', STATES.read_text()))
    assert alerts == raised


class Prometheus:
    """A Prometheus of its own, which looks each second."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str) -> Any:
        try:
            text = await asyncio.to_thread(lambda: urlopen(f"{self._url}/api/v1/{path}").read())
        except URLError as e:
            raise AssertionError(str(e)) from e  # not up yet
        return json.loads(text)["data"]

    async def firing(self) -> set[tuple[str, str]]:
        """Name and stage of the alerts that fire."""
        alerts = (await self.get("alerts"))["alerts"]
        return {(a["labels"]["alertname"], a["labels"].get("stage", "")) for a in alerts if a["state"] == "firing"}

    async def value(self, expression: str) -> float | None:
        result = (await self.get(f"query?query={quote(expression)}"))["result"]
        return float(result[0]["value"][1]) if result else None


@asynccontextmanager
async def prometheus(directory: Path, targets: list[str]) -> AsyncGenerator[Prometheus]:
    """Start one with our rules, which wait a second where they wait a minute."""
    rules = re.sub(r"for: \d+m", "for: 1s", (OBSERVABILITY / "alerts.yml").read_text())
    (directory / "rules.yml").write_text(rules)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "tokenbus", "static_configs": [{"targets": targets}]}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        await process.wait()


@needs_prometheus
async def test_a_scaled_fleet_raises_nothing_and_a_stage_that_dies_raises_its_alert_until_it_is_back(
    server_url: str, keys: Keys, tmp_path: Path
) -> None:
    (tmp_path / "prometheus").mkdir()
    async with fleet(tmp_path, server_url, keys, "http://127.0.0.1:9", (*PIPELINE, "fetcher", "parser")) as services:
        targets = [urlsplit(worker.url).netloc for worker in services.workers]
        async with prometheus(tmp_path / "prometheus", targets) as watching:

            async def all_seen() -> bool:
                owned = await watching.value("min(max by (stage) (tokenbus_deployment_owned_partitions))")
                up = await watching.value("sum(up)")
                return owned == keys.partitions and up == len(targets) and await watching.firing() == set()

            await eventually(all_seen)
            parsers = [worker for worker in services.workers if worker.kind == "parser"]
            for parser in parsers:
                parser.kill()
            orphaned = ("TokenbusPartitionsWithoutOwner", "parser")

            async def fires() -> bool:
                return orphaned in await watching.firing()

            await eventually(fires)
            assert ("TokenbusPartitionsWithoutOwner", "normalizer") not in await watching.firing()
            await services.start("parser")

            async def quiet() -> bool:
                return orphaned not in await watching.firing()

            await eventually(quiet)
