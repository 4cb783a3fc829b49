"""The services of a deployment in one virtual loop, each in a simulated process, and what they call: the provider, and
the endpoint of their tools.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from faststream._internal.endpoint.usecase import Endpoint
from redis.asyncio.connection import AbstractConnection

from tests.chaos import talks
from tests.simulated_faults.virtual import BASE_S, PROCESS, VirtualLoop, by_number
from tokenbus.bus import process_clock
from tokenbus_services.cli import service_registry
from tokenbus_services.cli.worker import Lifespan
from tokenbus_services.fetcher.writing import raw_writer
from tokenbus_services.mock_provider.apis.openai_responses import MockOpenAIResponses
from tokenbus_services.mock_provider.reply import Reply, ToolCall
from tokenbus_services.mock_provider.request import interpret
from tokenbus_services.net import connection
from tokenbus_services.parser import away
from tokenbus_services.runtime import supervision
from tokenbus_services.settings import Settings, load

PROVIDER = "openai-responses"
PARTITIONS = 2
RESTART_S = 0.3
"""How soon a supervisor starts a worker anew."""
LOOK, PAY, DELEGATE = "look", "pay", "delegate"
"""The tools. The second one asks for leave, and the third one begins a child run."""
HELPER = "helper"
"""The model of child runs."""
POLICY, FOUND, REPLACED = "words", "7", "seven"
"""A policy, what it replaces, and by what."""
_SETTINGS = f"""
redis_url = "redis://127.0.0.1:1"
partitions = {PARTITIONS}
log_level = "warning"
[providers.{PROVIDER}]
api = "openai-responses"
base_url = "http://127.0.0.1:2/v1"
api_key_env = ""
[tools.{LOOK}]
kind = "http"
url = "http://127.0.0.1:3/{LOOK}"
allow_private = true
[tools.{PAY}]
kind = "http"
url = "http://127.0.0.1:3/{PAY}"
allow_private = true
approval = "always"
[tools.{DELEGATE}]
kind = "run"
provider = "{PROVIDER}"
model = "{HELPER}"
[policies.{POLICY}]
use = "tokenbus.policy:ReplaceText"
options = {{ rules = [{{ find = "{FOUND}", replace = "{REPLACED}" }}] }}
[durability]
replicas = 0
disk = true
[limits]
policy_executors = 0
"""
for _service in ("pipeline", "fetcher", "normalizer", "parser", "tools", "policy"):
    import_module(service_registry.app_module(_service))


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What one run asks for, and what its model says."""

    run: str
    texts: tuple[str, ...]
    """Of each turn; all but the last call a tool."""
    tool: str = LOOK
    decision: str = "allow"
    """What somebody decides if the tool asks: ``allow`` or ``deny``, or ``both``: two people, one each."""
    policies: tuple[str, ...] = ()
    cancelled: bool = False
    """Somebody cancels it at some time."""
    durable: bool = False
    """What somebody was told of it is not lost with the server's last writes."""

    @property
    def request(self) -> dict[str, object]:
        """As it is published."""
        return {
            "id": self.run,
            "provider": PROVIDER,
            "model": "m",
            "on_failure": "restart",
            "messages": [{"role": "user", "content": f"say {self.run}"}],
            "tools": [{"name": self.tool}] if len(self.texts) > 1 else [],
            "policies": [*self.policies],
            "durability": "replicated" if self.durable else "server",
        }

    def result(self, turn: int) -> str:
        """What the tool's endpoint answers, or the child run."""
        return f"the result of {self.run} in turn {turn}"


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
        (time, "time", lambda: BASE_S + loop.now + loop.ahead_s.get(PROCESS.get(), 0.0)),
        (time, "time_ns", lambda: int(time.time() * 1e9)),
        (os, "urandom", loop.chance.randbytes),
        (os, "getpid", lambda: 1),
        (away, "AWAY_AFTER_MS", 100),  # runs here wait for less than a second
        (away, "LOOK_S", 0.1),
        (raw_writer, "_SCHEDULED", Path("/nonexistent")),
        (connection, "open_socket", open_socket),
        (supervision, "threading", Threading()),
        (Endpoint, "__hash__", by_number),  # a broker starts its subscribers in the order of a set
        (AbstractConnection, "__hash__", by_number),  # and a pool closes its connections so
    ]
    before = [(where, name, getattr(where, name)) for where, name, _ in instead]
    clock = process_clock.install(_ClockOfEachProcess(loop))
    try:
        for where, name, value in instead:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
        process_clock.install(clock)


class _ClockOfEachProcess(process_clock.ProcessClock):
    """One is stopped while the others run."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._virtual = loop
        self._clocks: dict[str, process_clock.ProcessClock] = {}

    @property
    def _own(self) -> process_clock.ProcessClock:
        process = PROCESS.get()
        if process not in self._clocks:
            self._clocks[process] = process_clock.ProcessClock(lambda: self._virtual.now)
        return self._clocks[process]

    def now(self) -> float:
        return self._own.now()

    @property
    def stood_s(self) -> float:
        return self._own.stood_s

    def ticking(self) -> AbstractContextManager[None]:
        return self._own.ticking()


_DELTA = 10
"""Characters."""
_TALK = Reply(text=talks.SAYS, chunk_size=_DELTA)


class Endpoints:
    """The provider, which streams what it is to say in deltas at irregular times, and the endpoint of the tools."""

    def __init__(self, loop: VirtualLoop, cases: Sequence[Case]) -> None:
        self._loop = loop
        self._cases = {case.run: case for case in cases}
        self.answers: dict[Answer, None] = {}
        """The connections that are not closed, oldest first."""
        self.called: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        """By run and turn, the idempotency keys with which its tool was called."""
        loop.serve = lambda protocol: Answer(loop, self, protocol)

    def answer(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[str, list[bytes]]:
        """The media type of the response, and its pieces."""
        if path.startswith("/v1"):
            return "text/event-stream", self._stream(path, headers, body)
        arguments = msgspec.json.decode(body, type=_Arguments)
        self.called[arguments.run, arguments.turn].add(headers["idempotency-key"])
        return "text/plain", [self._cases[arguments.run].result(arguments.turn).encode()]

    def _stream(self, path: str, headers: Mapping[str, str], body: bytes) -> list[bytes]:
        mock, decoded = MockOpenAIResponses(), msgspec.json.decode(body)
        match = mock.route.fullmatch(path)
        assert match
        request = interpret(mock.name, mock.parse(match, headers, {}, decoded), headers, decoded)
        if request.model == talks.MODEL:
            return _events(mock.stream(_TALK, request))
        if request.model == HELPER:
            run, turn = request.user_text.split()
            return _events(mock.stream(Reply(text=self._cases[run].result(int(turn)), chunk_size=_DELTA), request))
        case = self._cases[request.token]
        calls: tuple[ToolCall, ...] = ()
        if request.turn < len(case.texts) - 1:
            arguments: dict[str, object] = {"run": case.run, "turn": request.turn}
            if case.tool == DELEGATE:
                arguments = {"task": f"{case.run} {request.turn}"}
            calls = (ToolCall(name=case.tool, arguments=arguments),)
        said = Reply(text=case.texts[request.turn], tool_calls=calls, chunk_size=_DELTA)
        return _events(mock.stream(said, request))


def _events(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


class _Arguments(msgspec.Struct):
    run: str
    turn: int


class Answer(asyncio.Transport):
    """The transport of a connection to one of the endpoints."""

    def __init__(self, loop: VirtualLoop, endpoints: Endpoints, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop, self._endpoints, self._protocol = loop, endpoints, protocol
        self._process = PROCESS.get()
        self._context = contextvars.copy_context()
        self._asked = b""
        self._closed = False
        endpoints.answers[self] = None
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self._asked += bytes(data)
        head, end, body = self._asked.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines if ": " in line)}
        if end and len(body) >= int(headers.get("content-length", 0)):
            self._asked = b""
            self._answer(*self._endpoints.answer(first.split()[1], headers, body))

    def _answer(self, media_type: str, pieces: list[bytes]) -> None:
        at = self._loop.now + self._loop.chance.uniform(0.01, 0.3)
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {media_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
        for chunk in (head.encode(), *chunks, b"0\r\n\r\n"):
            self._loop.call_at(at, self._deliver, chunk, context=self._context)
            at += self._loop.chance.choice((1e-6, 0.02, 0.1, 0.3))

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
            self._endpoints.answers.pop(self, None)
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)

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
            self._loop.kill(name)  # what it left behind
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
