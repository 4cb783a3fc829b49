"""The alerts hold what they promise: promtool with series for each state, and a Prometheus over a scaled fleet."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.deploy.prometheus_server import OBSERVABILITY, needs_prometheus, prometheus
from tests.e2e.fleet import PIPELINE, fleet
from tests.waiting import eventually
from tokenbus.bus.keys import Keys

STATES = Path(__file__).with_name("alerts.test.yml")

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here")


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


def test_every_alert_has_its_place_on_the_page_of_faults_and_no_other_is_there() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", (OBSERVABILITY / "alerts.yml").read_text()))
    assert set(re.findall(r"`(Tokenbus\w+)`", Path("docs/operate/faults.md").read_text())) == alerts


@needs_prometheus
async def test_a_scaled_fleet_raises_nothing_and_a_stage_that_dies_raises_its_alert_until_it_is_back(
    server_url: str, keys: Keys, tmp_path: Path
) -> None:
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
