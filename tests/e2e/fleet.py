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

from tests.waiting import eventually
from tokenbus.bus.keys import Keys

Kind = Literal["fetcher", "normalizer", "parser", "tools", "blobs", "recorder", "policy"]
PIPELINE: tuple[Kind, ...] = ("fetcher", "normalizer", "parser")
WITH_TOOLS: tuple[Kind, ...] = (*PIPELINE, "tools")
BASE_PATHS = {"anthropic": "", "openai-chat": "/v1", "openai-responses": "/v1", "gemini": "/v1beta"}
"""Of each provider API, beneath the replay provider's address."""
LAUNCH = "from tokenbus_services.cli import main; main()"


def provider_table(name: str, api: str, url: str, more: str = "") -> str:
    """A table of the settings: this API of the replay provider."""
    return f'''
[providers.{name}]
api = "{api}"
base_url = "{url}{BASE_PATHS[api]}"
api_key_env = ""
{more}
'''


class Worker:
    """One service process."""

    def __init__(self, kind: Kind, process: asyncio.subprocess.Process, log: Path) -> None:
        self.kind: Kind = kind
        self.process = process
        self.log = log
        self.url = ""
        self.ends_with: tuple[int, ...] = (0, -signal.SIGKILL)
        """Exit codes that are no failure of the test."""

    async def ready(self) -> None:
        """Wait until it says so."""
        assert self.process.stdout
        async for line in self.process.stdout:
            if line.startswith(b"ready "):
                self.url = line.split()[2].decode()
                return
        raise AssertionError(f"{self.kind} ended before it was ready:\n{self.log.read_text()}")

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()

    def freeze(self) -> None:
        """SIGSTOP: alive, and doing nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    async def stop(self) -> int:
        """SIGTERM, and wait. The exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return await self.process.wait()


class Fleet:
    """Workers on one server, with one settings file."""

    def __init__(self, directory: Path, redis_url: str, keys: Keys, provider_url: str, toml: str = "") -> None:
        self._directory = directory
        self._config = directory / "tokenbus.toml"
        self._config.write_text(
            f"""
redis_url = "{redis_url}"
prefix = "{keys.prefix}"
partitions = {keys.partitions}
data_dir = "{directory}"

{"".join(provider_table(api, api, provider_url) for api in BASE_PATHS)}
[tools.weather]
kind = "python"
call = "tokenbus_services.replay.demo:weather"
{toml}
"""
        )
        self.workers: list[Worker] = []

    async def start(
        self, *kinds: Kind, env: Mapping[str, str] | None = None, launch: Sequence[str] = ("-c", LAUNCH)
    ) -> list[Worker]:
        """Start workers side by side; returns when all are ready. ``launch``: what Python is to run as `tokenbus`."""
        started = [await self._spawn(kind, env or {}, launch) for kind in kinds]
        await asyncio.gather(*(worker.ready() for worker in started))
        return started

    async def _spawn(self, kind: Kind, env: Mapping[str, str], launch: Sequence[str]) -> Worker:
        log = self._directory / f"{kind}-{len(self.workers)}.log"
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *launch,
                "worker",
                kind,
                "--port",
                "0",
                env={**os.environ, "TOKENBUS_CONFIG": str(self._config), **env},
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        worker = Worker(kind, process, log)
        self.workers.append(worker)
        return worker

    async def doctor(self) -> str:
        """What `tokenbus doctor` finds."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LAUNCH, "doctor"),
            env={**os.environ, "TOKENBUS_CONFIG": str(self._config)},
            stdout=asyncio.subprocess.PIPE,
        )
        found, _ = await process.communicate()
        return found.decode()

    async def stop(self) -> None:
        """Stop all, and fail for one that did not end well by itself."""
        codes = await asyncio.gather(*(worker.stop() for worker in self.workers))
        for worker, code in zip(self.workers, codes, strict=True):
            assert code in worker.ends_with, f"{worker.kind} ended with {code}:\n{worker.log.read_text()[-4000:]}"


@asynccontextmanager
async def fleet(
    directory: Path, redis_url: str, keys: Keys, provider_url: str, kinds: Sequence[Kind], toml: str = ""
) -> AsyncGenerator[Fleet]:
    """A running fleet."""
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
