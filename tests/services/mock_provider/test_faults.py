"""What goes wrong on demand, and what the client sees of it."""

from __future__ import annotations

import asyncio
import time

import h11
import httpx
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
from tokenbus_services.mock_provider import (
    CutOff,
    Delivery,
    ErrorEvent,
    Fixed,
    HangUp,
    MockProvider,
    Random,
    Reply,
    Stall,
    Status,
    Whole,
)
from tokenbus_services.mock_provider.script import Cuts

BODIES = {
    MESSAGES: one_message(),
    CHAT: one_message(),
    RESPONSES: {"model": "one-turn", "stream": True, "input": "hello"},
    GEMINI + "?alt=sse": {"contents": [{"parts": [{"text": "hello"}]}]},
}


@pytest.mark.parametrize(
    ("path", "status", "where", "kind"),
    [
        (MESSAGES, 429, ("error", "type"), "rate_limit_error"),
        (MESSAGES, 529, ("error", "type"), "overloaded_error"),
        (MESSAGES, 500, ("error", "type"), "api_error"),
        (CHAT, 429, ("error", "code"), "rate_limit_exceeded"),
        (CHAT, 500, ("error", "type"), "server_error"),
        (RESPONSES, 401, ("error", "code"), "invalid_api_key"),
        (GEMINI + "?alt=sse", 503, ("error", "status"), "UNAVAILABLE"),
    ],
)
async def test_a_status_has_the_error_body_of_its_api(
    path: str, status: int, where: tuple[str, str], kind: str
) -> None:
    async with serving(one_turn(fault=Status(status=status))) as (_, client):
        response = await client.post(path, json=BODIES[path])
    assert response.status_code == status
    assert response.json()[where[0]][where[1]] == kind


async def test_a_status_carries_the_headers_and_body_that_the_script_gives() -> None:
    fault = Status(status=429, headers={"retry-after": "3", "content-type": "text/html"}, body=b"<p>slow down")
    async with serving(one_turn(fault=fault)) as (_, client):
        response = await client.post(MESSAGES, json=one_message())
    assert (response.headers["retry-after"], response.headers["content-type"]) == ("3", "text/html")
    assert response.content == b"<p>slow down"


async def test_the_first_tries_fail_and_the_next_succeeds() -> None:
    script = one_turn(first=(Status(status=429), HangUp(), None, Status(status=500)))
    async with serving(script) as (server, client):
        assert (await client.post(MESSAGES, json=one_message())).status_code == 429
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(MESSAGES, json=one_message())
        assert (await client.post(MESSAGES, json=one_message())).content == EVENTS
        assert (await client.post(MESSAGES, json=one_message())).status_code == 500
        assert (await client.post(MESSAGES, json=one_message())).content == EVENTS
    assert [exchange.attempt for exchange in server.requests] == [0, 1, 2, 3, 4]


async def test_tries_are_counted_for_each_conversation_by_itself() -> None:
    async with serving(one_turn(first=(Status(status=500),))) as (_, client):

        async def tries(text: str) -> list[int]:
            return [(await client.post(MESSAGES, json=one_message(text))).status_code for _ in range(2)]

        assert await asyncio.gather(*(tries(f"run {n}") for n in range(10))) == [[500, 200]] * 10


@pytest.mark.parametrize("path", [MESSAGES, CHAT])
async def test_a_prefilled_retry_counts_as_a_try_of_the_same_turn(path: str) -> None:
    async with serving(one_turn(first=(Status(status=500),))) as (_, client):
        await client.post(path, json=one_message())
        messages = [*one_message()["messages"], {"role": "assistant", "content": "It is"}]
        assert (await client.post(path, json=one_message(messages=messages))).status_code == 200


async def test_a_cut_ends_the_connection_without_the_end_of_the_body() -> None:
    async with serving(one_turn(fault=CutOff(after_events=3))) as (server, client):
        received = bytearray()

        async def read() -> None:
            async with client.stream("POST", MESSAGES, json=one_message()) as response:
                async for read in response.aiter_raw():
                    received.extend(read)

        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            await read()
        assert received == EVENTS[: 3 * 18]
        assert server.requests[0].state == "cut"


async def test_a_cut_after_the_last_byte_still_is_no_clean_end() -> None:
    async with serving(one_turn(fault=CutOff(after_bytes=len(EVENTS)))) as (_, client):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(MESSAGES, json=one_message())


async def test_a_cut_before_the_first_byte_comes_after_the_head() -> None:
    async with (
        serving(one_turn(fault=CutOff())) as (_, client),
        client.stream("POST", MESSAGES, json=one_message()) as response,
    ):
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            await response.aread()


async def test_a_reset_is_seen_as_one() -> None:
    async with serving(one_turn(fault=CutOff(after_events=1, reset=True))) as (_, client):
        with pytest.raises(httpx.ReadError):
            await client.post(MESSAGES, json=one_message())


async def test_a_body_that_is_not_streamed_can_be_cut_too() -> None:
    async with serving(one_turn(Reply(text="Hello"), fault=CutOff(after_bytes=20))) as (_, client):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(CHAT, json=one_message(stream=False))


@pytest.mark.parametrize(
    ("path", "mark"),
    [
        (MESSAGES, b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"'),
        (CHAT, b'data: {"error":{"message"'),
        (RESPONSES, b'event: error\ndata: {"type":"error","code":"server_error"'),
        (GEMINI + "?alt=sse", b'data: {"error":{"code":529'),
    ],
)
async def test_an_error_event_follows_the_events_before_it_and_ends_the_body(path: str, mark: bytes) -> None:
    async with serving(one_turn(fault=ErrorEvent(after_events=2))) as (server, client):
        content = (await client.post(path, json=BODIES[path])).content
    assert content.startswith(b"event: e\ndata: 0\n\nevent: e\ndata: 1\n\n" + mark)
    assert content.endswith((b"\n\n", b"\r\n\r\n"))
    assert b"data: 2" not in content
    assert server.requests[0].state == "sent"


async def test_a_stalled_answer_stays_open_until_the_client_leaves() -> None:
    async with serving(one_turn(fault=Stall(after_events=2))) as (server, client):
        async with client.stream("POST", MESSAGES, json=one_message()) as response:
            reads = response.aiter_raw()
            assert [await anext(reads), await anext(reads)] == [EVENTS[:18], EVENTS[18:36]]
            exchange = await server.requested()
            await server.until(lambda: exchange.state == "stalled")
            assert server.open_connections == 1
        left = await server.disconnected(exchange)
        assert left > exchange.received_at
        assert exchange.reads_sent == 2
        await server.until(lambda: server.open_connections == 0)


@pytest.mark.parametrize(
    "cuts", [Whole(), Fixed(size=7), Random(seed=3, largest=20)], ids=lambda cuts: type(cuts).__name__
)
@pytest.mark.parametrize("place", [1, 18, 107, len(EVENTS)])
async def test_a_stalled_answer_that_continues_is_whole_and_its_connection_serves_the_next(
    cuts: Cuts, place: int
) -> None:
    script = one_turn(delivery=Delivery(cuts=cuts), fault=Stall(after_bytes=place))
    async with serving(script) as (server, client):
        for count in (1, 2):
            answer = asyncio.create_task(client.post(MESSAGES, json=one_message()))
            exchange = await server.requested(count)
            await server.until(lambda exchange=exchange: exchange.state == "stalled")
            server.resume(exchange)
            assert (await answer).content == EVENTS
            assert server.open_connections == 1


async def test_a_server_that_ends_cuts_the_answers_still_open() -> None:
    async with MockProvider([one_turn(fault=Stall(after_events=1))]) as server:
        client = httpx.AsyncClient(base_url=server.url, headers={"anthropic-version": "1"}, trust_env=False)
        call = asyncio.create_task(client.post(MESSAGES, json=one_message()))
        exchange = await server.requested()
        await server.until(lambda: exchange.state == "stalled")
    assert exchange.state == "cut"
    with pytest.raises(httpx.RemoteProtocolError):
        await call
    await client.aclose()


async def test_headers_that_http_forbids_fail_the_test_that_wrote_them() -> None:
    server = MockProvider([one_turn(fault=Status(status=500, headers={"retry-after": "1\r\nx: y"}))])
    with pytest.raises(h11.LocalProtocolError):  # noqa: PT012
        async with server, httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post(CHAT, json=one_message())
            assert server.requests[0].state == "cut"


async def test_clients_that_disconnect_at_any_moment_disturb_no_other() -> None:
    script = one_turn(Reply(text="word " * 300), delivery=Delivery(cuts=Random(seed=5, largest=200)))
    async with serving(script) as (server, client):

        async def leave_after(reads: int) -> None:
            async with client.stream("POST", CHAT, json=one_message()) as response:
                pieces = response.aiter_raw()
                for _ in range(reads):
                    await anext(pieces)

        await asyncio.gather(*(leave_after(reads) for reads in range(40)))
        whole = await client.post(CHAT, json=one_message())
        assert whole.content.endswith(b"data: [DONE]\n\n")
        await server.until(lambda: all(exchange.ended for exchange in server.requests))
        await server.until(lambda: server.open_connections == 1)


async def test_silence_before_the_head_ends_when_the_client_leaves() -> None:
    async with serving(one_turn(delivery=Delivery(delay_s=3600))) as (server, client):
        call = asyncio.create_task(client.post(MESSAGES, json=one_message()))
        exchange = await server.requested()
        call.cancel()
        await server.disconnected(exchange)
    assert (exchange.status, exchange.bytes_sent) == (None, 0)


async def test_a_delay_comes_before_the_head() -> None:
    async with serving(one_turn(delivery=Delivery(delay_s=0.05))) as (server, client):
        start = time.monotonic()
        async with client.stream("POST", MESSAGES, json=one_message()) as response:
            assert time.monotonic() - start > 0.045
            assert await response.aread() == EVENTS
        assert server.requests[0].state == "sent"


async def test_waiting_for_a_disconnect_that_never_comes_is_an_error() -> None:
    async with serving(one_turn()) as (server, client):
        await client.post(MESSAGES, json=one_message())
        with pytest.raises(RuntimeError, match="ended sent"):
            await server.disconnected(server.requests[0])


async def test_a_fault_at_a_text_that_is_not_there_fails_the_test_that_wrote_it() -> None:
    server = MockProvider([one_turn(fault=Stall(after_text="nowhere"))])
    with pytest.raises(ValueError, match="nowhere"):  # noqa: PT012
        async with server, httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            response = await client.post(CHAT, json=one_message())
            assert response.status_code == 500


async def test_what_is_wrong_with_a_request_is_answered_and_is_no_error_of_the_server() -> None:
    upload = {"x-goog-upload-command": "start", "x-goog-upload-header-content-length": "many"}
    async with serving(one_turn()) as (server, client):
        deep = b'{"a":' * 100_000
        assert (await client.post(CHAT, content=deep)).status_code == 400
        assert (await client.post(CHAT, content=b'{"model": "\xff"}')).status_code == 400
        assert (await client.post("/upload/v1beta/files", content=b"{}", headers=upload)).status_code == 400
        assert (await client.post("/upload/v1beta/files", content=b"{", headers=upload)).status_code == 400
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(server.url).port)
        writer.write(b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 404 " in await reader.readline()
        writer.close()
        assert (await client.post(CHAT, json=one_message())).status_code == 200
        assert all(exchange.ended for exchange in server.requests)
    # Leaving the block raises the first error of the server, if there was one.
