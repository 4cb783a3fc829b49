"""No key takes the gateway: what it holds in streams, sockets, bodies and frames leaves room for health and others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from tests.waiting import eventually
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.keys.key import NewKey, new_key
from tokenbus_services.mock_provider import Reply, Stall, Turn

ADA, BOB = new_key(), new_key()
CONNECTIONS = 24
SETTINGS = f"""
[gateway]
connections = {CONNECTIONS}
body_bytes = 2000000
inbound_bytes = 6000000
[console]
[gateway.keys.ada]
sha256 = "{ADA.sha256}"
console = ["see_runs"]
[gateway.keys.bob]
sha256 = "{BOB.sha256}"
console = ["see_runs"]
"""
USER = [{"role": "user", "content": "hello"}]
SLOW: Any = {"model": "anthropic/slow", "messages": USER, "stream": True}
TEXT: Any = {"model": "anthropic/text", "messages": USER}


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("text", Reply(text="one two three"))
        running.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
        yield running


def auth(key: NewKey) -> dict[str, str]:
    return {"authorization": f"Bearer {key.text}"}


@asynccontextmanager
async def client(bus: LocalBus, key: NewKey) -> AsyncGenerator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=bus.gateway, timeout=60, headers=auth(key), limits=limits) as http:
        yield http


async def works(http: httpx.AsyncClient) -> bool:
    return (await http.post("/v1/chat/completions", json=TEXT)).status_code == 200


async def test_streams_and_sockets_of_one_key_leave_places_for_others_and_for_probes(bus: LocalBus) -> None:
    port = bus.gateway.rpartition(":")[2]
    async with client(bus, ADA) as ada, client(bus, BOB) as bob:
        async with AsyncExitStack() as held:
            sockets: list[ClientConnection] = []
            for _ in range(4):
                place = connect(f"ws://127.0.0.1:{port}/v1/responses", additional_headers=auth(ADA))
                sockets.append(await held.enter_async_context(place))
            codes: list[str] = []
            for _ in range(CONNECTIONS - 4):
                answer = await held.enter_async_context(ada.stream("POST", "/v1/chat/completions", json=SLOW))
                if answer.status_code != 200:
                    codes.append(json.loads(await answer.aread())["error"]["code"])
            assert codes == ["too_many_requests"] * (CONNECTIONS // 2)
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"ws://127.0.0.1:{port}/api/chat", additional_headers=auth(ADA))
            assert refused.value.response.status_code == 429
            for _ in range(3):
                assert await works(bob)
                assert (await bob.get("/health")).status_code == 200
            assert not await works(ada)
        await eventually(lambda: works(ada))


async def page_of(key: NewKey, http: httpx.AsyncClient) -> None:
    """Log in at the console."""
    csrf = (await http.get("/console/api/session")).json()["csrf"]
    answer = await http.post("/console/api/login", json={"key": key.text}, headers={"x-console-csrf": csrf})
    assert answer.status_code == 200, answer.text


async def test_pages_of_the_console_and_sockets_without_a_key_of_their_own_count_for_the_key_that_uses_them(
    bus: LocalBus,
) -> None:
    port = bus.gateway.rpartition(":")[2]
    message = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "hello"}]}
    send = {"type": "send", "requestId": "r", "id": "c", "trigger": "submit-message", "messages": [message]}
    frame = json.dumps({**send, "body": {"model": "anthropic/text"}, "headers": auth(ADA)})
    async with client(bus, ADA) as ada, client(bus, BOB) as bob:
        await page_of(ADA, ada)
        await page_of(BOB, bob)
        async with AsyncExitStack() as held:
            for _ in range(CONNECTIONS // 4):
                socket = await held.enter_async_context(connect(f"ws://127.0.0.1:{port}/api/chat"))
                await socket.send(frame)
                assert json.loads(await socket.recv())["type"] == "start"
            pages = [
                await held.enter_async_context(ada.stream("GET", "/console/api/stream"))
                for _ in range(CONNECTIONS // 2)
            ]
            assert [page.status_code for page in pages].count(429) >= CONNECTIONS // 4
            async with bob.stream("GET", "/console/api/stream") as page:
                assert page.status_code == 200
            assert (await bob.get("/console/api/session")).status_code == 200
            async with connect(f"ws://127.0.0.1:{port}/api/chat") as socket:
                await socket.send(frame.replace(ADA.text, BOB.text))
                assert json.loads(await socket.recv())["type"] == "start"
        await eventually(lambda: works(ada))


async def test_unfinished_bodies_of_one_key_leave_room_for_others(bus: LocalBus) -> None:
    port = int(bus.gateway.rpartition(":")[2])
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADA.text}\r\n"
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
    for n, (_, writer) in enumerate(streams):
        declared = "content-length: 1500000" if n % 2 else "transfer-encoding: chunked"
        writer.write(f"{head}{declared}\r\n\r\n".encode())
        writer.write((b"" if n % 2 else b"16e360\r\n") + b" " * 1_400_000)
    answers = [asyncio.create_task(reader.readline()) for reader, _ in streams]
    done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    assert {each.result() for each in done} == {b"HTTP/1.1 429 Too Many Requests\r\n"}
    async with client(bus, BOB) as bob, client(bus, ADA) as ada:
        padded = json.dumps(TEXT).encode() + b" " * 1_000_000
        assert (await bob.post("/v1/chat/completions", content=padded)).status_code == 200
        for _, writer in streams:
            writer.close()
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await eventually(lambda: works(ada))


async def test_histories_that_one_key_reads_leave_room_for_others(bus: LocalBus) -> None:
    async with client(bus, BOB) as bob, client(bus, ADA) as ada:
        configure = {"type": "configure", "request": {"model": "anthropic/text"}}
        for item in (configure, {"type": "message", "content": "x" * 1_800_000, "run": False}):
            assert (await ada.post("/sessions/long/events", json={"item": item})).status_code == 200
        bobs = asyncio.create_task(works(bob))
        reads = await asyncio.gather(*(ada.get("/sessions/long/messages") for _ in range(12)))
        assert {each.status_code for each in reads} == {200, 429}
        assert await bobs
        await eventually(lambda: works(ada))
        assert (await ada.get("/sessions/long/messages")).status_code == 200


async def test_frames_that_wait_on_a_socket_are_bounded_by_their_bytes(bus: LocalBus) -> None:
    port = bus.gateway.rpartition(":")[2]
    begin = {"type": "response.create", "model": "anthropic/slow", "input": "hello"}
    async with connect(f"ws://127.0.0.1:{port}/v1/responses", additional_headers=auth(ADA)) as socket:
        assert "permessage-deflate" not in (socket.response.headers.get("sec-websocket-extensions") or "")  # type: ignore[union-attr]
        await socket.send(json.dumps(begin))
        while json.loads(await socket.recv())["type"] != "response.output_text.delta":
            pass
        codes: list[str] = []
        for _ in range(6):
            await socket.send(json.dumps(begin) + " " * 900_000)
        while len(codes) < 3:
            event = json.loads(await socket.recv())
            if event["type"] == "error":
                codes.append(event["error"]["code"])
        assert codes == ["too_many_bytes"] * 3
    async with client(bus, ADA) as ada:
        await eventually(lambda: works(ada))


@pytest.mark.parametrize(
    ("messages", "status", "code"),
    [
        (b",".join([b'{"role":"user","content":"x"}'] * 50_000), 413, "request_too_large"),
        (b",".join([b"[]"] * 600_000), 413, "request_too_large"),
        (b",".join([b'{"role":"user","content":"x"}'] * 10_001), 400, "invalid_value"),
        (b'{"role":"user","content":"' + b'[{,\\"\\\\' * 200_000 + b'"}', 200, ""),
    ],
)
async def test_a_body_of_too_many_values_is_refused_before_it_is_translated(
    bus: LocalBus, messages: bytes, status: int, code: str
) -> None:
    body = b'{"model":"anthropic/text","messages":[' + messages + b"]}"
    async with client(bus, BOB) as http:
        answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == status, answer.text[:300]
    assert answer.json().get("error", {}).get("code", "") == code


async def test_a_key_with_control_characters_is_refused(bus: LocalBus) -> None:
    port = int(bus.gateway.rpartition(":")[2])
    for text in (f"\x01{BOB.text}", f"{BOB.text}\x1f", f"{BOB.text[:9]}\x7f{BOB.text[9:]}"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {text}\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_a_client_that_leaves_while_its_frames_are_refused_is_no_failure_of_the_gateway(bus: LocalBus) -> None:
    port = int(bus.gateway.rpartition(":")[2])
    frame = json.dumps({"type": "response.create", "model": "anthropic/slow", "input": "hello"})
    with capture_logs() as lines:
        for _ in range(4):
            async with connect(f"ws://127.0.0.1:{port}/v1/responses", additional_headers=auth(ADA)) as socket:
                for _ in range(200):
                    await socket.send(frame)
                socket.transport.abort()
        await eventually(lambda: [line.get("method") for line in lines].count("CREATE") >= 4)
        async with client(bus, BOB) as http:
            await eventually(lambda: works(http))
    assert [line for line in lines if line["log_level"] == "error"] == []
