"""Bytes reach the client as the script cuts and paces them."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from tests.services.mock_provider.requests import (
    CHAT,
    EVENTS,
    GEMINI,
    MESSAGES,
    RESPONSES,
    one_message,
    one_turn,
    serving,
)
from tokenbus_services.mock_provider import STAMP, Delivery, Fixed, Offsets, Random, Reply, Stall, Whole, Wire
from tokenbus_services.mock_provider.plan import read_ends, split_at
from tokenbus_services.mock_provider.script import Cuts

ALL_CUTS = [Whole(), Whole(events=5), Fixed(size=1), Fixed(size=7), Random(seed=3, largest=20), Offsets(at=(1, 2, 40))]


@pytest.mark.parametrize("cuts", ALL_CUTS, ids=lambda cuts: type(cuts).__name__)
async def test_cuts_arrive_as_sent(cuts: Cuts) -> None:
    async with (
        serving(one_turn(delivery=Delivery(cuts=cuts))) as (server, client),
        client.stream("POST", MESSAGES, json=one_message()) as response,
    ):
        # httpx gives a piece for each HTTP chunk, also where the kernel joined several.
        reads = [read async for read in response.aiter_raw()]
    assert reads == split_at(EVENTS, read_ends(EVENTS, cuts))
    assert (server.requests[0].reads_sent, server.requests[0].bytes_sent) == (len(reads), len(EVENTS))


@pytest.mark.parametrize("cuts", ALL_CUTS, ids=lambda cuts: type(cuts).__name__)
async def test_on_the_wire_each_read_is_one_http_chunk(cuts: Cuts) -> None:
    async with serving(one_turn(delivery=Delivery(cuts=cuts))) as (server, _):
        head, body = await _raw_exchange(server.url)
    assert b"\r\ntransfer-encoding: chunked" in head.lower()
    reads = split_at(EVENTS, read_ends(EVENTS, cuts))
    assert body == b"".join(b"%x\r\n%b\r\n" % (len(read), read) for read in reads) + b"0\r\n\r\n"


async def test_what_was_sent_has_left_before_more_is_written() -> None:
    """A read is not kept back to travel with the next: no Nagle, no buffer of ours."""
    script = one_turn(delivery=Delivery(cuts=Fixed(size=10)), fault=Stall(after_bytes=10))
    async with serving(script) as (server, client), client.stream("POST", MESSAGES, json=one_message()) as response:
        reads = response.aiter_raw()
        assert await anext(reads) == EVENTS[:10]
        server.resume(server.requests[0])
        assert b"".join([read async for read in reads]) == EVENTS[10:]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, one_message()),
        (CHAT, one_message()),
        (RESPONSES, {"model": "one-turn", "stream": True, "input": "hello"}),
        (GEMINI + "?alt=sse", {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}),
    ],
)
async def test_every_api_serves_a_recording_byte_for_byte(path: str, body: dict[str, object]) -> None:
    async with serving(one_turn()) as (_, client):
        response = await client.post(path, json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.content == EVENTS


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, one_message(stream=False)),
        (CHAT, one_message(stream=False)),
        (RESPONSES, {"model": "one-turn", "input": "hello"}),
        ("/v1beta/models/one-turn:generateContent", {"contents": [{"parts": [{"text": "hello"}]}]}),
    ],
)
async def test_a_request_that_does_not_stream_gets_the_recorded_body(path: str, body: dict[str, object]) -> None:
    async with serving(one_turn(Wire(stream=EVENTS, body=b'{"whole": 1}'))) as (_, client):
        response = await client.post(path, json=body)
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {"whole": 1}


async def test_a_recording_without_a_body_says_so_to_a_request_that_does_not_stream() -> None:
    async with serving(one_turn()) as (_, client):
        response = await client.post(MESSAGES, json=one_message(stream=False))
    assert response.status_code == 501
    assert "does not stream" in response.json()["error"]["message"]


async def test_the_pace_is_never_faster_than_asked() -> None:
    async with serving(one_turn(delivery=Delivery(pace=100))) as (server, client):
        await client.post(MESSAGES, json=one_message())
    exchange = server.requests[0]
    assert exchange.ended_at is not None
    assert exchange.reads_sent == 12
    # Eleven gaps of 10 ms; the loop's clock may wake a tick early.
    assert exchange.ended_at - exchange.received_at > 0.105


async def test_a_paced_answer_arrives_read_by_read() -> None:
    """The client sees the beginning while most of the answer is not yet sent."""
    async with serving(one_turn(Wire(stream=EVENTS * 1000), delivery=Delivery(pace=50))) as (server, client):
        async with client.stream("POST", MESSAGES, json=one_message()) as response:
            reads = response.aiter_raw()
            seen = [await anext(reads) for _ in range(3)]
            exchange = server.requests[0]
            assert exchange.state == "sending"
            assert exchange.reads_sent < 1000
        await server.disconnected(exchange)
    assert b"".join(seen) == EVENTS[: len(b"".join(seen))]


async def test_a_stamp_is_the_time_at_which_its_read_was_written() -> None:
    text = f"at {STAMP} and {STAMP}"
    before = time.monotonic_ns()
    async with serving(one_turn(Reply(text=text), delivery=Delivery(pace=50))) as (_, client):
        body = (await client.post(CHAT, json=one_message())).text
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
    joined = "".join(msgspec.json.decode(event)["choices"][0]["delta"].get("content") or "" for event in events)
    first, second = (int(word) for word in joined.split() if word.isdigit())
    assert before < first < second < time.monotonic_ns()
    assert len(joined) == len(text)


async def test_a_connection_serves_one_request_after_another() -> None:
    async with serving(one_turn()) as (server, client):
        for _ in range(3):
            assert (await client.post(MESSAGES, json=one_message())).content == EVENTS
            assert server.open_connections == 1


async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    async with serving(one_turn()) as (server, _):
        reader, writer = await asyncio.open_connection(*_address(server.url))
        body = msgspec.json.encode(one_message())
        head = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nanthropic-version: 1\r\nexpect: 100-continue\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"POST /v1/messages HTTP/1.0\r\n\r\n", b"505"), (b"no request at all\r\n\r\n", b"400")],
)
async def test_what_is_no_request_gets_a_plain_error_and_a_close(sent: bytes, status: bytes) -> None:
    async with serving(one_turn()) as (server, _):
        reader, writer = await asyncio.open_connection(*_address(server.url))
        writer.write(sent)
        assert (await reader.read()).split()[1] == status
        writer.close()
        await writer.wait_closed()
        await server.until(lambda: server.open_connections == 0)


async def _raw_exchange(url: str) -> tuple[bytes, bytes]:
    """Head and body of one answer, as they are on the socket."""
    reader, writer = await asyncio.open_connection(*_address(url))
    request = httpx.Request("POST", url + MESSAGES, json=one_message(), headers={"anthropic-version": "1"})
    head = b"".join(b"%b: %b\r\n" % field for field in request.headers.raw)
    writer.write(b"POST /v1/messages HTTP/1.1\r\n%bconnection: close\r\n\r\n%b" % (head, request.content))
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port
