"""The services of a deployment in one virtual loop, each in a simulated process, and the provider that they call."""

from __future__ import annotations

import asyncio
import contextvars
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from tests.simulated_faults.virtual import BASE_S, PROCESS, VirtualLoop
from tokenbus.bus import process_clock
from tokenbus_services.cli import service_registry
from tokenbus_services.cli.worker import Lifespan
from tokenbus_services.fetcher.writing import raw_writer
from tokenbus_services.mock_provider.apis.openai_responses import MockOpenAIResponses
from tokenbus_services.mock_provider.reply import Reply
from tokenbus_services.mock_provider.request import interpret
from tokenbus_services.net import connection
from tokenbus_services.runtime import supervision
from tokenbus_services.settings import Settings, load

PROVIDER = "openai-responses"
PARTITIONS = 2
RESTART_S = 0.3
"""How soon a supervisor starts a worker anew."""
_SETTINGS = f"""
redis_url = "redis://127.0.0.1:1"
partitions = {PARTITIONS}
log_level = "warning"
[providers.{PROVIDER}]
api = "openai-responses"
base_url = "http://127.0.0.1:2/v1"
api_key_env = ""
"""
for _service in ("pipeline", "fetcher", "normalizer", "parser"):
    import_module(service_registry.app_module(_service))
Texts = dict[str, str]
"""By run, what the provider says."""


def settings_in(directory: Path) -> Settings:
    """The deployment's settings."""
    path = directory / "tokenbus.toml"
    path.write_text(f'data_dir = "{directory}"\n{_SETTINGS}', encoding="utf-8")
    return load({"TOKENBUS_CONFIG": str(path)})


@contextmanager
def simulated(loop: VirtualLoop) -> Generator[None]:
    """Let the code in the block see the loop's time and chance, and no thread of its own."""

    class Timer:
        """In place of `threading.Timer`: ends the simulated process."""

        daemon = False

        def __init__(self, seconds: float, end: Callable[[], object]) -> None:
            self._seconds = seconds

        def start(self) -> None:
            loop.call_later(self._seconds, loop.kill, PROCESS.get())

    class Threading:
        def __getattr__(self, name: str) -> Any:
            return Timer if name == "Timer" else getattr(threading, name)

    async def open_socket(hosts: Sequence[str], port: int) -> socket.socket:
        await asyncio.sleep(loop.latency())
        return socket.socket(socket.AF_UNIX)

    instead: list[tuple[Any, str, Any]] = [
        (time, "monotonic", lambda: loop.now + 1000),
        (time, "perf_counter", lambda: loop.now),
        (time, "thread_time", lambda: 0.0),
        (time, "time", lambda: BASE_S + loop.now),
        (time, "time_ns", lambda: int((BASE_S + loop.now) * 1e9)),
        (os, "urandom", loop.chance.randbytes),
        (os, "getpid", lambda: 1),
        (raw_writer, "_SCHEDULED", Path("/nonexistent")),
        (connection, "open_socket", open_socket),
        (supervision, "threading", Threading()),
    ]
    before = [(where, name, getattr(where, name)) for where, name, _ in instead]
    clock = process_clock.install(process_clock.ProcessClock(lambda: loop.now))
    try:
        for where, name, value in instead:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
        process_clock.install(clock)


class Provider:
    """Streams what it is to say, in deltas at irregular times."""

    def __init__(self, loop: VirtualLoop, texts: Texts) -> None:
        self._loop, self._texts = loop, texts
        self.answers: dict[Answer, None] = {}
        """Those that are not closed, oldest first."""
        loop.serve = lambda protocol: Answer(loop, self, protocol)

    def stream(self, body: bytes) -> list[bytes]:
        """The answer to a request, event by event."""
        mock, decoded = MockOpenAIResponses(), msgspec.json.decode(body)
        match = mock.route.fullmatch("/v1/responses")
        assert match
        request = interpret(mock.name, mock.parse(match, {}, {}, decoded), {}, decoded)
        said = mock.stream(Reply(text=self._texts[request.token], chunk_size=4), request)
        return [event + b"\n\n" for event in said.split(b"\n\n") if event]


class Answer(asyncio.Transport):
    """The transport of a connection to the provider."""

    def __init__(self, loop: VirtualLoop, provider: Provider, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop, self._provider, self._protocol = loop, provider, protocol
        self._process = PROCESS.get()
        self._asked = b""
        self._closed = False
        provider.answers[self] = None
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self._asked += bytes(data)
        head, end, body = self._asked.partition(b"\r\n\r\n")
        sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if end and sizes and len(body) >= int(sizes[0].partition(b":")[2]):
            self._asked = b""
            self._answer(self._provider.stream(body))

    def _answer(self, events: list[bytes]) -> None:
        at = self._loop.now + self._loop.chance.uniform(0.01, 0.3)
        pieces = [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"]
        pieces += [b"%x\r\n%b\r\n" % (len(event), event) for event in events] + [b"0\r\n\r\n"]
        for piece in pieces:
            self._loop.call_at(at, self._deliver, piece)
            at += self._loop.chance.choice((1e-6, 0.005, 0.02, 0.06))

    def _deliver(self, data: bytes) -> None:
        if not self._closed and self._process not in self._loop.dead:
            self._protocol.data_received(data)

    def cut(self) -> None:
        """Reset the connection."""
        self._close(ConnectionResetError("simulated"))

    def close(self) -> None:
        self._close(None)

    abort = close

    def _close(self, error: Exception | None) -> None:
        if not self._closed:
            self._closed = True
            self._provider.answers.pop(self, None)
            self._loop.call_soon(self._protocol.connection_lost, error)

    def is_closing(self) -> bool:
        return self._closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Workers:
    """Keeps a number of workers of each kind running."""

    def __init__(self, loop: VirtualLoop, settings: Settings, kinds: tuple[service_registry.ServiceName, ...]) -> None:
        self._loop, self._settings = loop, settings
        self.alive: dict[str, Lifespan] = {}
        self._started = 0
        self._keepers = [
            loop.create_task(self._keep(kind), context=contextvars.copy_context(), name=f"keeper {n}")
            for n, kind in enumerate(kinds)
        ]
        self._closing = False

    async def _keep(self, kind: service_registry.ServiceName) -> None:
        while not self._closing:
            self._started += 1
            name = f"{kind}{self._started}"
            context = contextvars.copy_context()
            context.run(PROCESS.set, name)
            await asyncio.wait([self._loop.create_task(self._live(kind, name), context=context, name=name)])
            await asyncio.sleep(RESTART_S)

    async def _live(self, kind: service_registry.ServiceName, name: str) -> None:
        # Settings of its own: their `keys` belong to one deployment of one worker.
        with suppress(Exception):
            life = Lifespan(service_registry.create(kind, msgspec.structs.replace(self._settings)))
            await life.start()
            self.alive[name] = life
            try:
                await life.ended()
            finally:
                self.alive.pop(name, None)

    async def close(self) -> None:
        """Stop all in order."""
        self._closing = True
        if stopping := [self._loop.create_task(life.stop()) for life in self.alive.values()]:
            await asyncio.wait(stopping, timeout=60)
