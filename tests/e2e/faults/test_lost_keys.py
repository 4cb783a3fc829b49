"""Keys deleted under running services: what waited in a queue is found missing, and nobody waits for a run for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send, sender
from tests.e2e.faults.test_every_await import POLICY
from tests.e2e.faults.test_stopped_workers import passed
from tests.e2e.fleet import PIPELINE, Kind, ended, fleet, log_of
from tests.servers import binary
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import RunLost
from tokenbus.events.public import PublicEvent
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, ToolCall, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer

CALLS = (ToolCall(name="weather", arguments={"city": "Bern"}), ToolCall(name="weather", arguments={"city": "Rome"}))
SCRIPTS = [
    Script(name="short", turns=(Turn(says=Reply(text="One two three.")),)),
    Script(name="long", turns=(Turn(says=Reply(text="word " * 400), delivery=Delivery(pace=20)),)),
    Script(name="calls", turns=(Turn(says=Reply(text="I look.", tool_calls=CALLS)), Turn(says=Reply(text="I see.")))),
]
QUEUED = "[limits]\nruns_per_fetcher = 1\nsilent_run_s = 1\n"
"""One call at a time, so that the other runs wait in the queue."""


async def waiting(server: Server, keys: Keys) -> dict[str, tuple[str, bytes]]:
    """By run: where its turn waits."""
    found: dict[str, tuple[str, bytes]] = {}
    for partition in range(keys.partitions):
        stream = keys.topic(partition, "turns")
        for entry_id, fields in await server.client.xrange(stream):
            found |= {name.decode(): (stream, entry_id) for name in fields}
    return found


async def all_wait(server: Server, keys: Keys, runs: list[str]) -> None:
    async def there() -> bool:
        return set(runs) <= set(await waiting(server, keys))

    await eventually(there)


async def begun(server: Server, keys: Keys, run: str) -> None:
    await eventually(lambda: log_has_text(server, keys, run))


async def log_has_text(server: Server, keys: Keys, run: str) -> bool:
    return any(event["type"] == "chunk" for event in await log_of(server.client, keys, run))


async def test_runs_whose_queue_was_deleted_are_queued_again(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with MockProvider(SCRIPTS) as provider, fleet(tmp_path, server_url, keys, provider.url, PIPELINE, QUEUED):
        first = await send("long")
        await begun(server, keys, first)
        runs = [await send("short") for _ in range(6)]
        await all_wait(server, keys, runs)
        for partition in range(keys.partitions):
            await server.client.delete(keys.topic(partition, "turns"))
        logs: Any = await ended(server.client, keys, [first, *runs])
    for run in runs:
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed"
        [retrying] = [event for event in logs[run] if event["type"] == "retrying"]
        assert retrying["error"]["code"] == "worker_lost"
    # The fetcher that had it stopped when its entry was gone; text that was out is not repeated.
    end = logs[first][-1]
    assert (end["type"], end["error"]["code"], end["error"]["retryable"]) == ("incomplete", "worker_lost", True)


async def test_the_policies_of_a_run_whose_queue_was_deleted_have_their_whole_time(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    """The time that they have for the retry begins with it; their only worker stands for a moment of that."""
    kinds: tuple[Kind, ...] = (*PIPELINE, "policy")
    async with (
        MockProvider(SCRIPTS) as provider,
        fleet(tmp_path, server_url, keys, provider.url, kinds, QUEUED + POLICY) as running,
    ):
        run = await send("long", policies=["nothing"], on_failure="restart")
        await begun(server, keys, run)
        lease = keys.lease(keys.partition_of(run), "policy")

        async def all_judged() -> bool:
            arrived, done = await server.client.hmget(lease, ["arrived", "done"])
            return arrived == done

        async def some_wait() -> bool:
            return not await all_judged()

        running.worker_of("fetcher").kill()
        await eventually(all_judged)
        worker = running.worker_of("policy")
        worker.freeze()
        await server.client.delete(keys.topic(keys.partition_of(run), "turns"))
        await eventually(some_wait)
        await passed(server, 2.0)
        worker.thaw()
        await running.start("fetcher")
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    assert log[-1]["type"] == "completed", log[-1]


async def test_entries_of_cancelled_runs_do_not_hide_one_that_was_lost(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with MockProvider(SCRIPTS) as provider, fleet(tmp_path, server_url, keys, provider.url, PIPELINE, QUEUED):
        first = await send("long")
        await begun(server, keys, first)
        lost = await send("short")
        await all_wait(server, keys, [lost])
        # As many entries of other names as a fetcher can leave behind: of runs that are over.
        stream, entry = (await waiting(server, keys))[lost]
        for n in range(20):
            await server.client.xadd(stream, {f"over-{n}": b"\xc0"})
        await server.client.xdel(stream, entry)
        log: Any = (await ended(server.client, keys, [lost]))[lost]
        await ended(server.client, keys, [first])
        await eventually(lambda: nothing_waits(server, keys))
    assert [event["type"] for event in log if event["type"] in ("retrying", "completed")] == ["retrying", "completed"]


async def nothing_waits(server: Server, keys: Keys) -> bool:
    return not await waiting(server, keys)


async def test_calls_whose_queue_was_deleted_get_an_error_result(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    # No worker of tools runs, so the calls wait.
    async with MockProvider(SCRIPTS) as provider, fleet(tmp_path, server_url, keys, provider.url, PIPELINE, QUEUED):
        run = await send("calls", tools=[WEATHER])
        stream = keys.topic(keys.partition_of(run), "tools")

        async def both_wait() -> bool:
            return await server.client.xlen(stream) == 2

        await eventually(both_wait)
        await server.client.delete(stream)
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    assert log[-1]["type"] == "completed"
    results = [event for event in log if event["type"] == "block_complete" and event["kind"] == "tool_result"]
    assert [event["is_error"] for event in results] == [True, True]
    assert "lost" in results[0]["content"]


async def test_readers_of_a_flushed_server_learn_that_their_runs_are_lost_and_new_runs_work(tmp_path: Path) -> None:
    keys = Keys(prefix="flushed", partitions=2)
    with EmbeddedServer(binary=binary()) as process:
        async with (
            MockProvider(SCRIPTS) as provider,
            fleet(tmp_path, process.url, keys, provider.url, PIPELINE, QUEUED),
            Server(process.url) as server,
            Client(process.url, prefix=keys.prefix, partitions=keys.partitions) as client,
        ):
            send = sender(server, keys)
            runs = [await send("long"), *[await send("short") for _ in range(4)]]
            heard: dict[str, list[PublicEvent]] = {run: [] for run in runs}

            async def read(run: str) -> None:
                async for event in client.follow(run):
                    heard[run].append(event)

            readers = [asyncio.create_task(read(run)) for run in runs]
            await eventually(lambda: all(heard.values()))
            await server.client.flushall()
            found = await asyncio.gather(*readers, return_exceptions=True)
            assert [type(error) for error in found] == [RunLost] * len(runs)
            later = await send("short")
            log: Any = (await ended(server.client, keys, [later]))[later]
            judge.check(log)
            assert log[-1]["type"] == "completed"
