"""The services as real processes, for tests: started, killed, frozen and stopped like any other process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from tests import fork_server
from tests.fork_server import Forked
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server

Kind = Literal[
    "fetcher", "normalizer", "parser", "pipeline", "tools", "blobs", "recorder", "webhooks", "policy", "gateway"
]
SEPARATE: tuple[Kind, ...] = ("fetcher", "normalizer", "parser")
CHAINED: tuple[Kind, ...] = ("pipeline",)
PIPELINE = CHAINED if os.environ.get("TESTS_CHAINED") else SEPARATE
"""The services between requests and public topics: one process with TESTS_CHAINED=1, else three."""
WITH_TOOLS: tuple[Kind, ...] = (*PIPELINE, "tools")


def only_separate(reason: str) -> pytest.MarkDecorator:
    """Mark a test that makes no sense with one process for all services, and say why."""
    return pytest.mark.skipif(PIPELINE == CHAINED, reason=reason)


BASE_PATHS = {
    "anthropic": "",
    "openai-chat": "/v1",
    "openai-responses": "/v1",
    "gemini": "/v1beta",
    "gemini-interactions": "/v1beta",
}
"""Of each provider API, beneath the mock provider's address."""
LAUNCH = "from tokenbus_services.cli.entry import main; main()"


def provider_table(name: str, api: str, url: str, more: str = "") -> str:
    """A table of the settings: this API of the mock provider."""
    return f'''
[providers.{name}]
api = "{api}"
base_url = "{url}{BASE_PATHS[api]}"
api_key_env = ""
{more}
'''


DRAIN = "drain_s = 6\n"
READY_S = 120.0
STOPPED_S = 60.0


class Worker:
    """One service process."""

    def __init__(self, kind: Kind, process: asyncio.subprocess.Process | Forked, out: Path, log: Path) -> None:
        self.kind: Kind = kind
        self.process = process
        self.log = log
        self.url = ""
        self.ends_with: tuple[int, ...] = (0, -signal.SIGKILL)
        """Exit codes that are no failure of the test."""
        self._out = out

    def runs(self, service: str) -> bool:
        """Whether this process runs the service: a pipeline worker runs fetcher, normalizer and parser."""
        return self.kind == service or (self.kind in CHAINED and service in SEPARATE)

    async def ready(self) -> None:
        """Wait until it says so."""

        def says_ready() -> str:
            if self.process.returncode is None:
                lines = self._out.read_text().split("\n")[:-1]
                return next((line.split()[2] for line in lines if line.startswith("ready ")), "")
            raise RuntimeError(f"{self.kind} ended before it was ready:\n{self.log.read_text()}")

        try:
            url = await eventually(says_ready, timeout=READY_S)
        except AssertionError as e:
            raise AssertionError(f"{self.kind}: {e}\n{self.log.read_text()[-4000:]}") from None
        assert url is not None
        self.url = url

    def kill(self) -> None:
        self.process.kill()

    def freeze(self) -> None:
        """SIGSTOP: alive, and doing nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def stop(self) -> int:
        """SIGTERM, and wait. The exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            async with asyncio.timeout(STOPPED_S):
                return await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()
            raise AssertionError(
                f"{self.kind} did not end within {STOPPED_S:g} s of SIGTERM:\n{self.log.read_text()[-4000:]}"
            ) from None


class Fleet:
    """Workers on one server, with one settings file."""

    def __init__(self, directory: Path, redis_url: str, keys: Keys, provider_url: str, toml: str = "") -> None:
        self._directory = directory
        self._config = directory / "tokenbus.toml"
        if "drain_s" not in toml:  # a test's stalled calls are not waited for
            toml = (
                toml.replace("[stages]\n", f"[stages]\n{DRAIN}") if "[stages]" in toml else f"{toml}\n[stages]\n{DRAIN}"
            )
        self._config.write_text(
            f"""
redis_url = "{redis_url}"
prefix = "{keys.prefix}"
partitions = {keys.partitions}
data_dir = "{directory}"

{"".join(provider_table(api, api, provider_url) for api in BASE_PATHS)}
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
{toml}
"""
        )
        self.workers: list[Worker] = []

    async def start(self, *kinds: Kind, env: Mapping[str, str] | None = None, port: int = 0) -> list[Worker]:
        """Start workers side by side; returns when all are ready.

        They are forked from a process that has imported everything. With variables that an interpreter reads at its
        start (PYTHON…) each is an interpreter of its own. ``port``: 0 for a free one.
        """
        started = [await self._spawn(kind, env or {}, port) for kind in kinds]
        await asyncio.gather(*(worker.ready() for worker in started))
        return started

    async def _spawn(self, kind: Kind, more: Mapping[str, str], port: int) -> Worker:
        name = f"{kind}-{len(self.workers)}"
        out, log = self._directory / f"{name}.out", self._directory / f"{name}.log"
        command = ("worker", kind, "--port", str(port))
        env = {**os.environ, "TOKENBUS_CONFIG": str(self._config), **more}
        with out.open("wb") as output, log.open("wb") as errors:
            if any(variable.startswith("PYTHON") for variable in more):
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", LAUNCH, *command), env=env, stdout=output, stderr=errors
                )
            else:
                process = fork_server.shared().start(*command, env=env, stdout=out, stderr=log)
        worker = Worker(kind, process, out, log)
        self.workers.append(worker)
        return worker

    def worker_of(self, service: Kind) -> Worker:
        """The first process that was started and runs this service."""
        return next(worker for worker in self.workers if worker.runs(service))

    async def doctor(self) -> str:
        """What `tokenbus doctor` finds."""
        out = self._directory / "doctor.out"
        out.unlink(missing_ok=True)
        env = {**os.environ, "TOKENBUS_CONFIG": str(self._config)}
        await fork_server.shared().start("doctor", stdout=out, stderr=self._directory / "doctor.log", env=env).wait()
        return out.read_text()

    async def stop(self) -> None:
        """Stop all, and fail for one that did not end well by itself."""
        codes = await asyncio.gather(*(worker.stop() for worker in self.workers))
        for worker, code in zip(self.workers, codes, strict=True):
            assert code in worker.ends_with, f"{worker.kind} ended with {code}:\n{worker.log.read_text()[-4000:]}"


@asynccontextmanager
async def fleet(
    directory: Path, redis_url: str, keys: Keys, provider_url: str, kinds: Sequence[Kind], toml: str = ""
) -> AsyncGenerator[Fleet]:
    running = Fleet(directory, redis_url, keys, provider_url, toml)
    try:
        await running.start(*kinds)
        yield running
    finally:
        await running.stop()


async def log_of(client: object, keys: Keys, run: str) -> list[dict[str, object]]:
    """A run's log as plain JSON, read as any program would read it."""
    entries = await client.xrange(keys.log(run))  # pyright: ignore[reportAttributeAccessIssue]
    return [msgspec.json.decode(fields[b"__data__"]) for _, fields in entries]


async def are_away(server: Server, keys: Keys, runs: Sequence[str]) -> bool:
    """Whether all these runs are put away."""
    return all([await server.client.hexists(keys.run(run), "away") for run in runs])


TERMINAL = ("completed", "incomplete", "failed", "cancelled")


async def ended(
    client: object, keys: Keys, runs: Sequence[str], *, timeout: float = 120
) -> dict[str, list[dict[str, object]]]:
    """The logs of these runs once all of them ended."""
    logs: dict[str, list[dict[str, object]]] = {}

    async def all_ended() -> bool:
        for run in runs:
            if run not in logs:
                log = await log_of(client, keys, run)
                if log and log[-1]["type"] in TERMINAL:
                    logs[run] = log
        return len(logs) == len(runs)

    await eventually(all_ended, timeout=timeout)
    return logs
