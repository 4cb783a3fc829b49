"""Subscriptions with a group: its workers share a topic's partitions; at least once, in order per run."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.contract.client.writer import Writer
from tests.waiting import eventually
from tokenbus import Chunk, Client, SharedSubscription
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import CursorTrimmed, ServerUnavailable
from tokenbus_services.process.embedded_server import EmbeddedServer


class Worker:
    """One worker of a group: takes events until it is stopped, and remembers them."""

    def __init__(self, subscription: SharedSubscription[Chunk]) -> None:
        self.subscription = subscription
        self.seen: list[Chunk] = []
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self.subscription as events:
            async for event in events:
                self.seen.append(event)

    async def stop(self) -> None:
        await self.subscription.aclose()
        await self._task


@asynccontextmanager
async def workers(bus: Client, count: int, group: str = "tts") -> AsyncGenerator[list[Worker]]:
    async with AsyncExitStack() as stack:
        made = [Worker(bus.subscribe("visible", kinds=Chunk, group=group, from_="start")) for _ in range(count)]
        for worker in made:
            stack.push_async_callback(worker.stop)
        await eventually(lambda: sorted(p for w in made for p in w.subscription.partitions) == [0, 1, 2, 3])
        yield made


def per_run(seen: Sequence[Chunk]) -> dict[str, list[Chunk]]:
    runs: defaultdict[str, list[Chunk]] = defaultdict(list)
    for event in seen:
        runs[event.run].append(event)
    return dict(runs)


async def say_all(writers: Sequence[Writer], times: int) -> None:
    for _ in range(times):
        await asyncio.gather(*(w.say("a", "b") for w in writers))


async def test_one_worker_has_every_event_once_and_in_order(bus: Client, server: Server, keys: Keys):
    writers = [Writer(server, keys, f"r{i}") for i in range(8)]
    async with workers(bus, 1) as [worker]:
        await say_all(writers, 10)
        await eventually(lambda: len(worker.seen) == 160)
    assert per_run(worker.seen) == {w.run: w.events for w in writers}


async def test_two_workers_share_the_runs_and_neither_sees_the_others(bus: Client, server: Server, keys: Keys):
    writers = [Writer(server, keys, f"r{i}") for i in range(16)]
    async with workers(bus, 2) as [one, two]:
        await eventually(lambda: len(one.subscription.partitions) == len(two.subscription.partitions) == 2)
        await say_all(writers, 10)
        await eventually(lambda: len(one.seen) + len(two.seen) == 320)
    a, b = per_run(one.seen), per_run(two.seen)
    assert a
    assert b
    assert not a.keys() & b.keys()
    assert {**a, **b} == {w.run: w.events for w in writers}


async def test_closing_a_client_that_is_cancelled_in_the_middle_still_closes_it(server_url: str, keys: Keys):
    bus = Client(server_url, prefix=keys.prefix, partitions=keys.partitions)
    await bus.__aenter__()
    subscription = bus.subscribe("visible", kinds=Chunk, group="g")
    await subscription.__aenter__()
    closing = asyncio.create_task(bus.aclose())
    await asyncio.sleep(0)  # so that it waits for the subscription's leases
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(RuntimeError, match="closed"):
        await bus.cancel("r")


async def test_two_groups_have_everything_each(bus: Client, writer: Writer):
    async with workers(bus, 1, "tts") as [tts], workers(bus, 1, "transcript") as [transcript]:
        await writer.say("a", "b")
        await eventually(lambda: tts.seen == writer.events and transcript.seen == writer.events)


async def test_a_group_without_workers_continues_later_at_its_offset(bus: Client, writer: Writer):
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        await writer.say("a")
        assert (await anext(events)).text == "a"
    await writer.say("b", "c")
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        assert (await anext(events)).text == "b"
        assert (await anext(events)).text == "c"


async def test_a_new_group_begins_now_or_at_the_oldest(bus: Client, writer: Writer):
    await writer.say("old")
    async with (
        bus.subscribe("visible", kinds=Chunk, group="now") as now,
        bus.subscribe("visible", kinds=Chunk, group="all", from_="start") as every,
    ):
        await writer.say("new")
        assert (await anext(now)).text == "new"
        assert (await anext(every)).text == "old"


async def test_leaving_by_an_exception_leaves_the_event_in_hand_not_done(bus: Client, writer: Writer):

    async def fail_at_the_second() -> None:
        async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
            await writer.say("a", "b", "c")
            await anext(events)
            await anext(events)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_at_the_second()
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        assert (await anext(events)).text == "b"


async def test_leaving_in_order_makes_the_event_in_hand_done(bus: Client, writer: Writer):
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        await writer.say("a", "b", "c")
        async for event in events:
            if event.text == "b":
                break
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        assert (await anext(events)).text == "c"


WORKER = """
import asyncio, sys
from tokenbus import Client

async def main(url, prefix):
    async with Client(url, prefix=prefix, partitions=4) as bus:
        async with bus.subscribe("visible", group="tts", from_="start") as events:
            async for event in events:
                print(event.run, event.seq, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_an_event_that_is_being_handled_when_the_client_closes_comes_again(
    bus: Client, server_url: str, keys: Keys, writer: Writer
):
    async with Client(server_url, prefix=keys.prefix, partitions=4) as other:
        events = other.subscribe("visible", kinds=Chunk, group="tts", from_="start")
        await writer.say("a", "b")
        assert (await anext(events)).text == "a"
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as again:
        assert (await anext(again)).text == "a"


async def test_what_a_killed_worker_had_not_acknowledged_comes_again_and_nothing_is_lost(
    bus: Client, server: Server, server_url: str, keys: Keys
):
    writers = [Writer(server, keys, f"r{i}") for i in range(8)]
    async with workers(bus, 1) as [worker]:
        doomed = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, server_url, keys.prefix, stdout=PIPE
        )
        assert doomed.stdout
        try:
            await eventually(lambda: len(worker.subscription.partitions) == 2)
            await say_all(writers, 5)
            lines = [await doomed.stdout.readline() for _ in range(3)]
        finally:
            doomed.kill()
            rest = (await doomed.stdout.read()).split(b"\n")[:-1]  # the last line may be cut, and does not count
            await doomed.wait()
        await say_all(writers, 5)
        theirs = {(run.decode(), int(seq)) for run, seq in (line.split() for line in lines + rest)}
        await eventually(lambda: len(theirs | {(e.run, e.seq) for e in worker.seen}) == 160)
    for run, events in per_run(worker.seen).items():
        seqs = [e.seq for e in events]
        assert seqs == list(range(seqs[0], 20)), f"{run} has a gap, or is out of order"


async def test_a_worker_that_comes_late_is_given_a_share_at_once(bus: Client, server: Server, keys: Keys):
    writers = [Writer(server, keys, f"r{i}") for i in range(8)]
    async with workers(bus, 1) as [one]:
        await say_all(writers, 2)
        two = Worker(bus.subscribe("visible", kinds=Chunk, group="tts"))
        await eventually(lambda: len(one.subscription.partitions) == len(two.subscription.partitions) == 2)
        await say_all(writers, 2)
        await eventually(lambda: len(one.seen) + len(two.seen) >= 64)
        await two.stop()
    assert {(e.run, e.seq) for e in one.seen + two.seen} == {(w.run, e.seq) for w in writers for e in w.events}
    assert len(one.seen) + len(two.seen) == 64  # a hand-over in order gives nothing out twice


async def test_a_partition_is_handed_over_after_its_current_event(bus: Client, server: Server, keys: Keys):
    run = next(r for r in (f"r{i}" for i in range(100)) if keys.partition_of(r) == 3)
    writer = Writer(server, keys, run)
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as one:
        await writer.say("a", "b")
        assert await anext(one) == writer.events[0]
        two = Worker(bus.subscribe("visible", kinds=Chunk, group="tts"))
        await eventually(lambda: 3 not in one.partitions)
        assert not two.seen
        done = asyncio.ensure_future(anext(one))  # there is no more for this worker, but "a" is done by this
        await eventually(lambda: two.seen)
        assert two.seen == writer.events[1:]
        done.cancel()
        await asyncio.gather(done, return_exceptions=True)
        await two.stop()


async def test_a_worker_whose_lease_was_lost_acknowledges_nothing_more(
    bus: Client, server: Server, keys: Keys, writer: Writer
):
    partition = keys.partition_of("r")
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        await writer.say("a", "b")
        assert (await anext(events)).text == "a"
        lease = keys.lease(partition, "visible:tts")
        before = await server.client.hget(lease, "offset")
        await server.client.hset(lease, mapping={"token": 99, "owner": "other", "until": 2**52})
        waiting = asyncio.create_task(_next(events))
        await eventually(lambda: partition not in events.partitions)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await server.client.hget(lease, "offset") == before


async def _next(events: SharedSubscription[Chunk]) -> list[Chunk]:
    return [await anext(events) for _ in range(3)]


async def test_a_group_behind_the_trimmed_entries_is_notified_once(bus: Client, server: Server, keys: Keys):
    writer = Writer(server, keys, "r", topic_entries=5)
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        await writer.say("read")
        await anext(events)
    await writer.say(*map(str, range(9)))
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        with pytest.raises(CursorTrimmed):
            await anext(events)
        assert [await anext(events) for _ in range(5)] == writer.events[-5:]
    await writer.say("more")
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        assert (await anext(events)).text == "more"


async def test_a_gap_is_acknowledged_so_that_the_next_worker_does_not_report_it_again(
    bus: Client, server: Server, keys: Keys
):
    writer = Writer(server, keys, "r", topic_entries=5)
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        await writer.say("read")
        await anext(events)
    await writer.say(*map(str, range(9)))
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        with pytest.raises(CursorTrimmed):
            await anext(events)  # and then this worker ends, before it has an event
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        assert [await anext(events) for _ in range(5)] == writer.events[-5:]
        assert events.gaps.trimmed == 0


async def test_handlers_continue_after_a_gap_which_is_logged(
    bus: Client, server: Server, keys: Keys, caplog: pytest.LogCaptureFixture
):
    writer = Writer(server, keys, "r", topic_entries=5)
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        await writer.say("read")
        await anext(events)
    await writer.say(*map(str, range(9)))
    seen: list[Chunk] = []

    async def note(chunk: Chunk) -> None:
        seen.append(chunk)

    task = asyncio.create_task(bus.subscribe("visible", kinds=Chunk, group="tts").each(note))
    await eventually(lambda: seen == writer.events[-5:])
    await writer.say("live")
    await eventually(lambda: seen == writer.events[-6:])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sum("trimmed before they were read" in record.message for record in caplog.records) == 1


async def test_a_callback_receives_the_gap_instead_of_an_error(bus: Client, server: Server, keys: Keys):
    writer = Writer(server, keys, "r", topic_entries=5)
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        await writer.say("read")
        await anext(events)
    await writer.say(*map(str, range(9)))
    gaps: list[CursorTrimmed] = []
    async with bus.subscribe("visible", kinds=Chunk, group="tts", on_trimmed=gaps.append) as events:
        assert [await anext(events) for _ in range(5)] == writer.events[-5:]
    [gap] = gaps
    assert gap.key == keys.topic(keys.partition_of("r"), "visible")


async def test_an_entry_that_is_no_event_costs_a_group_that_entry_alone(
    bus: Client, server: Server, keys: Keys, caplog: pytest.LogCaptureFixture, writer: Writer
):
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        for bad in ({"x": "y"}, {"__data__": "{"}, {"__data__": "[]"}):
            await server.client.xadd(keys.topic(keys.partition_of("r"), "visible"), bad)
        await writer.say("good")
        assert await anext(events) == writer.events[0]
        assert events.gaps.malformed == 3
    assert "entry passed over (1 so far): visible" in caplog.text
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        await writer.say("more")
        assert (await anext(events)).text == "more"


async def test_a_lost_connection_loses_nothing(bus: Client, server: Server, writer: Writer):
    async with workers(bus, 1) as [worker]:
        for i in range(5):
            me = await server.client.client_id()
            for client in await server.client.client_list():
                if int(client["id"]) != me:
                    await server.client.client_kill_filter(_id=client["id"])
            await writer.say(str(i))
            await eventually(lambda: {(e.run, e.seq) for e in worker.seen} == {("r", e.seq) for e in writer.events})


async def test_entering_without_a_server_is_an_error():
    with EmbeddedServer() as process:
        async with Client(process.url, prefix="away") as bus:
            await asyncio.to_thread(process.stop)
            with pytest.raises(ServerUnavailable):
                async with bus.subscribe("visible", kinds=Chunk, group="tts"):
                    pass


@pytest.mark.parametrize("name", ["", "a b", "a:b", "{a}", "x" * 65])
def test_a_group_name_that_is_unsafe_in_a_key_is_refused(bus: Client, name: str):
    with pytest.raises(ValueError, match="group"):
        bus.subscribe("visible", kinds=Chunk, group=name)
