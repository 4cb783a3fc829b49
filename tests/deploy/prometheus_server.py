"""A real Prometheus of its own, for tests: Debian's, with our alerts."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from tokenbus_services.process.embedded_server import free_port

OBSERVABILITY = Path("deploy/observability")

needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus here")


_TIMES = re.compile(r"(for: |offset |\[)\d+[smhd](:\d+[smhd])?")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _shorter(times: str, faster: int) -> str:
    return re.sub(r"(\d+)([smhd])", lambda one: f"{max(1, int(one[1]) * _UNITS[one[2]] // faster)}s", times)


class Prometheus:
    """A Prometheus of its own, which looks each second."""

    def __init__(self, url: str, targets: Path) -> None:
        self._url = url
        self._targets = targets

    def watch(self, targets: list[str]) -> None:
        """Look at these workers from now on."""
        new = self._targets.with_suffix(".new")
        new.write_text(json.dumps([{"targets": targets}]))
        new.rename(self._targets)

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
        values = await self.values(expression)
        return values[0] if values else None

    async def values(self, expression: str) -> list[float]:
        """Of each series that the expression finds."""
        result = (await self.get(f"query?query={quote(expression)}"))["result"]
        return [float(series["value"][1]) for series in result]


@asynccontextmanager
async def prometheus(
    directory: Path, targets: list[str], *, quick: bool = True, faster: int = 1, key: str = ""
) -> AsyncGenerator[Prometheus]:
    """Start one with our rules.

    ``quick``: they wait a second in place of minutes. ``faster``: all their times are so many times shorter.
    ``key``: for a gateway's metrics.
    """
    directory.mkdir()  # noqa: ASYNC240 - before anything runs
    rules = (OBSERVABILITY / "alerts.yml").read_text()
    if quick:
        rules = re.sub(r"for: \d+m", "for: 1s", rules)
    if faster > 1:
        rules = _TIMES.sub(lambda found: _shorter(found[0], faster), rules)
    (directory / "rules.yml").write_text(rules)
    watching = Prometheus(f"http://127.0.0.1:{(port := free_port())}", directory / "targets.json")
    watching.watch(targets)
    config: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "tokenbus", "file_sd_configs": [{"files": ["targets.json"]}]}],
    }
    if key:
        config["scrape_configs"][0]["authorization"] = {"credentials": key}
    (directory / "prometheus.yml").write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield watching
    finally:
        process.terminate()
        await process.wait()
