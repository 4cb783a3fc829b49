"""Open streams without events: `python -m tests.soak.idle [--seconds N] [--clients N]`.

Clients of every protocol of the gateway request an answer whose provider stalls after a word. While they wait, each
receives the keep-alives of its protocol and nothing else, no stream ends, and the gateway neither grows nor leaks. Exit
code 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import uvloop
from websockets.asyncio.client import connect

from tests.bench.procs import cpu_s, resident_kb
from tests.bench.stack import SERVICES, running
from tokenbus_services.gateway.surfaces.ag_ui import AgUiSurface
from tokenbus_services.gateway.surfaces.ai_sdk_ui import AiSdkUiSurface
from tokenbus_services.gateway.surfaces.anthropic_messages import AnthropicMessagesSurface
from tokenbus_services.gateway.surfaces.gemini import GeminiSurface
from tokenbus_services.gateway.surfaces.native import NativeSurface
from tokenbus_services.gateway.surfaces.openai_chat import OpenAIChatSurface
from tokenbus_services.gateway.surfaces.openai_images import OpenAIImagesSurface
from tokenbus_services.gateway.surfaces.openai_responses import OpenAIResponsesSurface
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, Turn
from tokenbus_services.process.embedded_server import free_port

GATEWAY = "gateway"
KEEP_ALIVE_S = 5.0
START_S = 20.0
"""Time until every stream has begun; the gateway's memory for its first keep-alives is not growth."""
SAMPLE_S = 15.0
MOST_GROWTH = 0.05
"""Maximum growth of the gateway's memory, from the first third of the time to the last."""
MOST_NEW_FDS = 4
"""The gateway opens a connection to the server now and then."""
SILENT = Script(name="silent", turns=(Turn(says=Reply(text="word word"), fault=Stall(after_text="word")),))
CONTENT = b"word"
Json = dict[str, Any]


def _answer_events() -> list[Json]:
    return [{"role": "user", "content": f"Hello {uuid4().hex}."}]


class Protocol(msgspec.Struct, frozen=True):
    """How one kind of client sends its request, and what it receives during the silence."""

    keep_alive: bytes
    path: str
    body: Callable[[], Json]


PROTOCOLS: dict[str, Protocol] = {
    "Chat Completions": Protocol(
        OpenAIChatSurface.keep_alive,
        "/v1/chat/completions",
        lambda: {"model": "held/silent", "stream": True, "messages": _answer_events()},
    ),
    "Responses": Protocol(
        OpenAIResponsesSurface.keep_alive,
        "/v1/responses",
        lambda: {"model": "held/silent", "stream": True, "input": _answer_events()},
    ),
    "Responses, background": Protocol(
        OpenAIResponsesSurface.keep_alive,
        "/v1/responses",
        lambda: {"model": "held/silent", "stream": True, "background": True, "store": True, "input": _answer_events()},
    ),
    "Messages": Protocol(
        AnthropicMessagesSurface.keep_alive,
        "/v1/messages",
        lambda: {"model": "held/silent", "stream": True, "max_tokens": 99, "messages": _answer_events()},
    ),
    "Gemini": Protocol(
        GeminiSurface.keep_alive,
        "/v1beta/models/silent:streamGenerateContent?alt=sse",
        lambda: {"contents": [{"role": "user", "parts": [{"text": "Hello."}]}]},
    ),
    "AI SDK UI": Protocol(
        AiSdkUiSurface.keep_alive,
        "/api/chat",
        lambda: {
            "id": uuid4().hex,
            "model": "held/silent",
            "trigger": "submit-message",
            "messages": [{"id": "u", "role": "user", "parts": [{"type": "text", "text": "Hello."}]}],
        },
    ),
    "AG-UI": Protocol(
        AgUiSurface.keep_alive,
        "/agui",
        lambda: {
            "threadId": uuid4().hex,
            "runId": uuid4().hex,
            "messages": [{"id": "u", "role": "user", "content": "Hello."}],
            "tools": [],
            "context": [],
            "state": {},
            "forwardedProps": {"model": "held/silent"},
        },
    ),
    "the bus's own events": Protocol(
        NativeSurface.keep_alive,
        "/runs",
        lambda: {"model": "held/silent", "messages": _answer_events()},
    ),
    "Images": Protocol(
        OpenAIImagesSurface.keep_alive,
        "/v1/images/generations",
        lambda: {"model": "drawn/silent", "stream": True, "prompt": f"A hat {uuid4().hex}."},
    ),
}
WEBSOCKET = "Responses, WebSocket"


class Client(asyncio.Protocol):
    """One connection. Once it is `quiet` it must receive keep-alives only."""

    def __init__(self, url: str, protocol: Protocol) -> None:
        self.quiet = False
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.kept_alive = 0
        self.other = b""
        """Bytes during the silence that are not a keep-alive."""
        self.lost = False
        self._at = urlsplit(url)
        self._protocol = protocol
        self._head = b""
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        body = msgspec.json.encode(self._protocol.body())
        head = (
            f"POST {self._protocol.path} HTTP/1.1\r\nhost: {self._at.netloc}\r\nauthorization: Bearer sk-idle\r\n"
            f"accept: text/event-stream\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        if not self.quiet:
            self._head += data
            if b"\r\n\r\n" in self._head and not self.started.done():
                self.started.set_result(None)
            return
        # Each send of the gateway is one HTTP chunk, and each keep-alive one send.
        self._rest += data
        alive = b"%x\r\n%b\r\n" % (len(self._protocol.keep_alive), self._protocol.keep_alive)
        while self._rest.startswith(alive):
            self._rest = self._rest[len(alive) :]
            self.kept_alive += 1
        if self._rest and not alive.startswith(self._rest):
            self.other += self._rest
            self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.started.done():
            self.started.set_exception(ConnectionError(f"closed: {self._head[:300]!r}"))

    @property
    def is_answer(self) -> bool:
        """Whether a stream began, with the provider's word if it has sent one."""
        has_content = CONTENT in self._head or self._protocol.path == PROTOCOLS["Images"].path
        return self._head.startswith(b"HTTP/1.1 200") and has_content

    @property
    def head(self) -> bytes:
        """The bytes before the silence."""
        return self._head

    def close(self) -> None:
        assert self._transport
        self._transport.abort()


class Sample(msgspec.Struct, frozen=True):
    """The gateway at one moment."""

    at_s: float
    memory_kb: int
    fds: int
    cpu_s: float
    lost: int


class Outcome(msgspec.Struct, frozen=True):
    clients: dict[str, int]
    keep_alives: dict[str, tuple[int, int]]
    """The minimum and maximum per client of the protocol."""
    samples: list[Sample]
    seconds: float
    problems: list[str]


def hold(seconds: float, clients: int, say: Callable[[str], None]) -> Outcome:
    """Keep this many clients connected for this many seconds."""
    port = free_port()
    free = 'api_key_env = ""\nfirst_event_timeout_s = 1000000\nidle_timeout_s = 1000000\n'
    settings = (
        f'[providers.held]\napi = "anthropic"\nbase_url = "http://127.0.0.1:{port}"\n{free}'
        f'[providers.drawn]\napi = "openai-responses"\nbase_url = "http://127.0.0.1:{port}/v1"\n{free}'
        f"[gateway]\ndeadline_s = 100000\nkeep_alive_s = {KEEP_ALIVE_S}\nconnections = {clients + 64}\n"
        '[gateway.aliases]\nsilent = ["held/silent"]\n'
    )
    with running([], services=(*SERVICES, GATEWAY), settings=settings, runs_at_once=clients + 64) as stack:
        return uvloop.run(_hold(stack.urls[GATEWAY], stack.pids[GATEWAY], port, seconds, clients, say))


async def _hold(url: str, pid: int, port: int, seconds: float, count: int, say: Callable[[str], None]) -> Outcome:
    async with MockProvider([SILENT], port=port, keep=10):
        held: dict[str, list[Client]] = {}
        each = max(1, count // (len(PROTOCOLS) + 1))
        for name, protocol in PROTOCOLS.items():
            held[name] = [await _connected(url, protocol) for _ in range(each)]
            say(f"{name}: {len(held[name])}")
        sockets = [await _Socket.connected(url) for _ in range(each)]
        say(f"{WEBSOCKET}: {len(sockets)}")
        everyone = [client for some in held.values() for client in some]
        await asyncio.sleep(START_S)
        for client in everyone:
            client.quiet = True
        begin, samples = time.monotonic(), list[Sample]()
        cpu = cpu_s(pid)
        while (now := time.monotonic() - begin) < seconds:
            await asyncio.sleep(min(SAMPLE_S, seconds - now))
            lost = sum(client.lost for client in everyone) + sum(socket.lost for socket in sockets)
            sample = Sample(time.monotonic() - begin, resident_kb(pid), _fds(pid), cpu_s(pid) - cpu, lost)
            samples.append(sample)
            say(f"{sample.at_s:6.0f} s  {sample.memory_kb / 1024:7.1f} MiB  {sample.fds} fds  {lost} lost")
        lasted = time.monotonic() - begin
        problems = _problems(held, sockets, samples, lasted)
        for client in everyone:
            client.close()
        for socket in sockets:
            await socket.close()
        kept = {name: [client.kept_alive for client in some] for name, some in held.items()}
        return Outcome(
            clients={**{name: len(some) for name, some in held.items()}, WEBSOCKET: len(sockets)},
            keep_alives={name: (min(counts), max(counts)) for name, counts in kept.items()},
            samples=samples,
            seconds=lasted,
            problems=problems,
        )


def _problems(
    held: dict[str, list[Client]], sockets: list[_Socket], samples: list[Sample], seconds: float
) -> list[str]:
    found: Counter[str] = Counter()
    expected = seconds / KEEP_ALIVE_S
    for name, clients in held.items():
        for client in clients:
            if not client.is_answer:
                found[f"{name}: no stream began: {client.head[:200]!r}"] += 1
            if client.lost:
                found[f"{name}: the stream ended"] += 1
            if client.other:
                found[f"{name}: in the silence came {client.other[:80]!r}"] += 1
            if not 0.8 * expected - 2 <= client.kept_alive <= 1.1 * expected + 2:
                found[f"{name}: {client.kept_alive} keep-alives, {expected:.0f} were due"] += 1
    for socket in sockets:
        if socket.lost or CONTENT not in socket.received:
            found[f"{WEBSOCKET}: lost {socket.lost}, received {socket.received[-80:]!r}"] += 1
    third = max(1, len(samples) // 3)
    early, late = (sum(s.memory_kb for s in some) / third for some in (samples[:third], samples[-third:]))
    if late > early * (1 + MOST_GROWTH):
        found[f"memory grew from {early / 1024:.1f} to {late / 1024:.1f} MiB"] += 1
    if max(s.fds for s in samples) > samples[0].fds + MOST_NEW_FDS:
        found[f"file descriptors grew from {samples[0].fds} to {max(s.fds for s in samples)}"] += 1
    return [f"{what} ({times} times)" if times > 1 else what for what, times in found.items()]


class _Socket:
    """A client of the Responses API over a WebSocket; its keep-alives are the pings of WebSocket."""

    def __init__(self, connection: Any) -> None:
        self.received = b""
        self.lost = False
        self._connection = connection
        self._reading = asyncio.create_task(self._read(), name="reader of a socket")

    @classmethod
    async def connected(cls, url: str) -> _Socket:
        connection = await connect(url.replace("http", "ws", 1) + "/v1/responses", ping_interval=None)
        frame: Json = {"type": "response.create", "model": "held/silent", "input": "Hello."}
        await connection.send(msgspec.json.encode(frame).decode())
        return cls(connection)

    async def close(self) -> None:
        self._reading.cancel()
        self._connection.transport.abort()

    async def _read(self) -> None:
        try:
            async for frame in self._connection:
                self.received += str(frame).encode()
        finally:
            self.lost = True


async def _connected(url: str, protocol: Protocol) -> Client:
    at = urlsplit(url)
    assert at.hostname
    assert at.port
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client(url, protocol), at.hostname, at.port)
    async with asyncio.timeout(60):
        await client.started
    return client


def _fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def main() -> None:
    """Keep the streams open, print the result, exit with the verdict."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.idle", description="Keep streams without events open.")
    parser.add_argument("--seconds", type=float, default=3600.0, help="duration in seconds (3600)")
    parser.add_argument("--clients", type=int, default=2000, help="number of clients of all protocols (2000)")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    outcome = hold(options.seconds, options.clients, lambda line: print(line, flush=True))
    for name, count in outcome.clients.items():
        least, most = outcome.keep_alives.get(name, (0, 0))
        print(f"{name}: {count} clients" + (f", {least} to {most} keep-alives each" if most else ""))
    first, last = outcome.samples[0], outcome.samples[-1]
    print(
        f"{outcome.seconds:.0f} s: gateway {first.memory_kb / 1024:.1f} to {last.memory_kb / 1024:.1f} MiB,"
        f" {first.fds} to {last.fds} file descriptors, {100 * last.cpu_s / outcome.seconds:.1f} % of a core"
    )
    for problem in outcome.problems:
        print(problem)
    print("NOT PASSED" if outcome.problems else "passed: all is flat")
    sys.exit(bool(outcome.problems))


if __name__ == "__main__":
    main()
