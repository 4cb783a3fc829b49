"""Publishing, cancelling and joining a deployment, against a real server."""

from __future__ import annotations

import asyncio
from uuid import UUID

import msgspec
import pytest

from tests.contract.client.writer import LOST, Writer
from tests.waiting import eventually
from tokenbus import Client, Completed, Generate, Message, Run
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server
from tokenbus.client.publishing import COMMANDS
from tokenbus.core.request.parse import decode_request
from tokenbus.errors import (
    DeploymentMismatch,
    PublishQueueFull,
    RequestInvalid,
    RequestTooLarge,
    RunFailed,
    RunNotFound,
    ServerFull,
    ServerUnavailable,
)
from tokenbus.events.public import RunFailedEvent, Timing
from tokenbus.events.requests import Cancel, Request
from tokenbus_services.process.embedded_server import EmbeddedServer, free_port

REQUEST = Generate(provider="p", model="m", messages=[Message(role="user", content="Hi")])


async def inbound(server: Server, keys: Keys) -> list[Request]:
    """The requests on the inbound stream, read as intake reads them."""
    return [decode_request(fields) for _, fields in await server.client.xrange(keys.requests)]


async def test_a_published_request_is_on_the_inbound_stream_with_an_id(bus: Client, server: Server, keys: Keys):
    run = await bus.publish(REQUEST)
    assert UUID(run.id).version == 7
    assert await inbound(server, keys) == [msgspec.structs.replace(REQUEST, id=run.id)]


async def test_a_mapping_is_published_as_well(bus: Client, server: Server, keys: Keys):
    run = await bus.publish(
        {"provider": "p", "model": "m", "id": "mine", "messages": [{"role": "user", "content": "Hi"}]}
    )
    assert run.id == "mine"
    assert await inbound(server, keys) == [msgspec.structs.replace(REQUEST, id="mine")]


async def test_a_cancel_by_handle_or_id_is_on_the_inbound_stream(bus: Client, server: Server, keys: Keys):
    await bus.cancel("r", "barge-in", heard_through=-1)
    await Run("r", bus).cancel()
    assert await inbound(server, keys) == [Cancel(run="r", reason="barge-in", heard_through=-1), Cancel(run="r")]


async def test_an_invalid_or_oversized_request_is_refused_here_and_nothing_is_sent(
    server_url: str, server: Server, keys: Keys
):
    async with Client(server_url, prefix=keys.prefix, max_request_bytes=200) as bus:
        with pytest.raises(RequestInvalid):
            await bus.publish({"provider": "p", "messages": []})
        with pytest.raises(RequestTooLarge) as caught:
            await bus.publish(msgspec.structs.replace(REQUEST, system="x" * 200))
        assert isinstance(caught.value.request, Generate)
        assert caught.value.request.id
    assert not await server.client.exists(keys.requests)


async def test_a_full_inbound_stream_refuses_requests_and_still_takes_cancels(
    server_url: str, server: Server, keys: Keys
):
    async with Client(server_url, prefix=keys.prefix, max_waiting=2) as bus:
        await bus.publish(REQUEST)
        await bus.publish(REQUEST)
        with pytest.raises(ServerFull, match="2 requests wait") as caught:
            await bus.publish(REQUEST)
        assert caught.value.retryable
        await bus.cancel("r")
        await server.client.xtrim(keys.requests, maxlen=1, approximate=False)
        assert isinstance(caught.value.request, Generate)
        again = await bus.publish(caught.value.request)
        assert again.id == caught.value.request.id


async def test_thousands_published_at_once_share_a_few_connections(server_url: str, server: Server, keys: Keys):
    await join_deployment(server, keys)
    async with Client(server_url, prefix=keys.prefix) as bus:
        before = (await server.client.info("stats"))["total_connections_received"]
        runs = await asyncio.gather(*(bus.publish(REQUEST) for _ in range(3_000)))
        after = (await server.client.info("stats"))["total_connections_received"]
    assert after - before <= COMMANDS
    assert {request.id for request in await inbound(server, keys) if isinstance(request, Generate)} == {
        run.id for run in runs
    }


async def test_a_caller_that_does_not_wait_gets_an_error_if_the_queue_is_full(
    server_url: str, server: Server, keys: Keys
):
    async with Client(server_url, prefix=keys.prefix, max_queued=10) as bus:
        tries = [bus.publish(REQUEST, wait=False) for _ in range(100)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        refused = [error for error in results if isinstance(error, PublishQueueFull)]
        runs = [run for run in results if isinstance(run, Run)]
        assert (len(refused), len(runs)) == (90, 10)
        assert {(error.code, error.retryable) for error in refused} == {("publish_queue_full", True)}
        request = refused[0].request
        assert isinstance(request, Generate)
        assert (await bus.publish(request, wait=False)).id == request.id
        assert await server.client.xlen(keys.requests) == len(runs) + 1


async def test_each_of_many_that_fail_together_has_its_own_request_in_its_error():
    with EmbeddedServer() as process:
        async with Server(process.url) as server:
            await join_deployment(server, Keys())
        async with Client(process.url) as bus:
            await bus.publish(REQUEST)
            await asyncio.to_thread(process.stop)
            requests = [msgspec.structs.replace(REQUEST, id=f"run{n}") for n in range(50)]
            errors = await asyncio.gather(*(bus.publish(request) for request in requests), return_exceptions=True)
            assert [e.request for e in errors if isinstance(e, ServerUnavailable)] == requests


async def test_a_cancel_is_sent_before_requests_that_wait_in_the_client(bus: Client, server: Server, keys: Keys):
    await join_deployment(server, keys)
    publishing = [asyncio.create_task(bus.publish(REQUEST)) for _ in range(3_000)]
    await asyncio.sleep(0)
    await bus.cancel("r")
    await asyncio.gather(*publishing)
    found = await inbound(server, keys)
    # In the order of the calls it would be the last of all; how many were on their way already, the machine says.
    assert found.index(Cancel(run="r")) < len(found) - 100


async def test_what_waits_when_the_client_closes_is_an_error_and_nothing_hangs(
    server_url: str, server: Server, keys: Keys
):
    await join_deployment(server, keys)
    async with Client(server_url, prefix=keys.prefix) as bus:
        publishing = [asyncio.create_task(bus.publish(REQUEST)) for _ in range(3_000)]
        await asyncio.sleep(0)
    results = await asyncio.gather(*publishing, return_exceptions=True)
    assert all(isinstance(result, Run | RuntimeError) for result in results)


async def test_an_entry_has_its_tenant_in_a_field_so_that_the_server_need_not_parse_it(
    bus: Client, server: Server, keys: Keys
):
    await bus.publish(msgspec.structs.replace(REQUEST, metadata={"tenant": "acme"}))
    await bus.publish({"provider": "p", "model": "m", "messages": [{"role": "user", "content": "x"}], "metadata": None})
    entries = [fields.get(b"tenant") for _, fields in await server.client.xrange(keys.requests)]
    assert entries == [b"acme", None]


async def test_a_server_without_memory_is_full():
    with EmbeddedServer() as process:
        async with Client(process.url) as bus, Server(process.url) as server:
            await server.client.config_set("maxmemory", 1)
            with pytest.raises(ServerFull, match="out of memory"):
                await bus.publish(REQUEST)


async def test_an_outage_leaves_the_request_intact_for_another_try():
    with EmbeddedServer() as process:
        async with Client(process.url) as bus:
            await asyncio.to_thread(process.stop)
            with pytest.raises(ServerUnavailable) as caught:
                await bus.publish(REQUEST)
            await asyncio.to_thread(process.start)
            assert isinstance(caught.value.request, Generate)
            run = await bus.publish(caught.value.request)
            assert run.id == caught.value.request.id
            async with Server(process.url) as server:
                assert await inbound(server, Keys()) == [caught.value.request]


async def test_no_server_at_all_is_an_error_on_entering():
    with pytest.raises(ServerUnavailable):
        async with Client(f"redis://127.0.0.1:{free_port()}"):
            pass


async def test_partitions_come_from_the_deployment(server_url: str, server: Server, keys: Keys, writer: Writer):
    await join_deployment(server, keys)
    await writer.start()
    await writer.complete()
    async with Client(server_url, prefix=keys.prefix) as bus:
        assert (await bus.result("r")).events == 2


async def test_other_partitions_than_the_deployments_are_an_error_on_entering(
    server_url: str, server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch
):
    await join_deployment(server, keys)
    with pytest.raises(DeploymentMismatch, match="partitions is 5 here but 4 on the server"):
        async with Client(server_url, prefix=keys.prefix, partitions=5):
            pass
    monkeypatch.setenv("TOKENBUS_PARTITIONS", "6")
    with pytest.raises(DeploymentMismatch, match="partitions is 6 here but 4 on the server"):
        async with Client(server_url, prefix=keys.prefix):
            pass


async def test_another_wire_version_is_an_error_on_entering(server_url: str, server: Server, keys: Keys):
    await server.client.hset(keys.meta, mapping={"partitions": 4, "wire_version": 999})
    with pytest.raises(DeploymentMismatch, match="wire_version"):
        async with Client(server_url, prefix=keys.prefix):
            pass


async def test_a_client_that_started_first_learns_the_partitions_from_the_deployment(
    server_url: str, server: Server, keys: Keys
):
    async with Client(server_url, prefix=keys.prefix) as bus:
        task = asyncio.create_task(bus.result("r", wait_s=None))
        await eventually(lambda: _reads(server))
        await join_deployment(server, keys)
        writer = Writer(server, keys, "r")
        await writer.start()
        await writer.complete()
        assert (await task).events == 2


async def _reads(server: Server) -> bool:
    return any(c["cmd"] == "xread" for c in await server.client.client_list())


async def test_a_stream_gives_everything_from_publish_to_the_terminal_event(
    bus: Client, server: Server, keys: Keys, writer: Writer
):
    request = msgspec.structs.replace(REQUEST, id="r")
    events = bus.stream(request)
    first = asyncio.ensure_future(anext(events))
    await eventually(lambda: server.client.exists(keys.requests))
    await writer.start()
    await writer.block("Hello")
    await writer.complete()
    seen = [await first] + [event async for event in events]
    assert seen == writer.events
    assert isinstance(seen[-1], Completed)


async def test_a_result_waits_for_the_end_and_folds_the_events(bus: Client, writer: Writer):
    run = await bus.publish(msgspec.structs.replace(REQUEST, id="r"))
    task = asyncio.create_task(run.result())
    await writer.start()
    await writer.block("Hello")
    await writer.complete()
    result = await task
    assert (result.status, result.text, result.events) == ("completed", "Hello", 5)


async def test_a_failed_run_streams_to_its_end_and_raises_as_a_result(bus: Client, writer: Writer):
    await writer.start()
    await writer.block("Hello")
    await writer.write((RunFailedEvent, {"finish": "error", "timing": Timing(total_ms=1), "error": LOST}))
    assert [event async for event in bus.follow("r")] == writer.events
    with pytest.raises(RunFailed) as caught:
        await bus.result("r")
    assert caught.value.result
    assert caught.value.result.text == "Hello"


async def test_the_result_of_an_unknown_run_is_not_found(bus: Client):
    with pytest.raises(RunNotFound):
        await bus.result("nobody", wait_s=0.05)
