"""Readers that were there before the number of partitions changed, and some that come after it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Self

from tests.contract.client.listed import Listed
from tests.contract.client.writer import Writer
from tests.waiting import eventually
from tokenbus import Chunk, Client, Cursor
from tokenbus.bus import layout as repartition
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment, learn
from tokenbus.bus.server.server import Server
from tokenbus.client.subscriptions.sentences import Sentence
from tokenbus.events.topics import TopicEvent

BEFORE = [f"before-{n}" for n in range(8)]
AFTER = [f"after-{n}" for n in range(16)]
NUMBER = 7


async def change(server: Server, keys: Keys, number: int) -> None:
    """What `tokenbus repartition` does; there are no workers to wait for."""
    await repartition.announce(server, keys, await repartition.layout(server, keys), number)
    await repartition.place(server, keys, await repartition.layout(server, keys))
    await learn(server, keys)


class Readers:
    """Readers of a topic that are open when the number changes, and what each has had."""

    def __init__(self, bus: Client) -> None:
        self.ordered = bus.subscribe("visible", kinds=Chunk)
        self.group = bus.subscribe("visible", kinds=Chunk, group="app")
        self.voice = bus.sentences(group="voice", hold_s=600)
        self.seen: tuple[list[TopicEvent], list[TopicEvent]] = [], []
        self.spoken: list[Sentence] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        async def note(event: TopicEvent) -> None:
            self.seen[0].append(event)

        async def note_shared(event: TopicEvent) -> None:
            self.seen[1].append(event)

        async def note_spoken(sentence: Sentence) -> None:
            self.spoken.append(sentence)

        for subscription in (self.ordered, self.group, self.voice):
            await subscription.__aenter__()
        works = (self.ordered.each(note), self.group.each(note_shared), self.voice.each(note_spoken))
        self._tasks = [asyncio.create_task(work) for work in works]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in (self.ordered, self.group, self.voice):
            await subscription.aclose()

    async def check(self, written: set[tuple[str, int]], texts: dict[str, str]) -> None:
        """Each has had each event once, and each run's in order."""
        for seen in self.seen:
            await eventually(lambda seen=seen: len(seen) >= len(written))
            assert Counter((e.run, e.seq) for e in seen) == Counter(written)
            for run in texts:
                seqs = [e.seq for e in seen if e.run == run]
                assert seqs == sorted(seqs)
        whole = lambda: sum(len(s.text) for s in self.spoken) >= sum(map(len, texts.values()))  # noqa: E731
        await eventually(whole)
        for run, text in texts.items():
            pieces = [s.text for s in self.spoken if s.run == run]
            assert "".join(pieces) == text
            assert "And " not in pieces or text.endswith("And "), f"a sentence of {run} is torn: {pieces}"


async def check_readers(server: Server, url: str, keys: Keys) -> None:
    """Readers that are open have the runs of both numbers; later ones what is new; cursors hold."""
    await join_deployment(server, keys)
    listed = Listed(server, keys)
    old = [Writer(server, keys, run) for run in BEFORE]
    async with (
        Client(url, prefix=keys.prefix, partitions=keys.partitions) as bus,
        Client(url, prefix=keys.prefix, partitions=keys.partitions) as idle,
        Readers(bus) as readers,
    ):
        begin = readers.ordered.cursor
        assert await idle.describe(["nothing"]) == {}

        async def all_owned() -> bool:
            leases = [keys.lease(p, f"visible:{name}") for p in range(keys.partitions) for name in ("app", "voice")]
            return all([await server.client.hget(lease, "owner") for lease in leases])

        await eventually(all_owned)
        for n, writer in enumerate(old):
            await listed.accept(writer.run, 1000 + n, "tenant", "acme" if n % 2 else "other")
            await writer.say("It was ", "said. Now ")
            keys.hold([writer.run], keys.topic(keys.partition_of(writer.run), "events"))  # as the owner does
        await change(server, keys, NUMBER)
        new = [Writer(server, keys, run) for run in AFTER]
        for n, writer in enumerate(new):
            await listed.accept(writer.run, 2000 + n, "tenant", "acme" if n % 2 else "other")
        assert {keys.partition_of(run) for run in AFTER} == set(range(NUMBER))
        for writer in (*old, *new):
            await writer.say("more ", "of it. And ")
        written = {(event.run, event.seq) for writer in (*old, *new) for event in writer.events}

        # A client that knew the deployment and read nothing while it changed.
        async with (
            idle.subscribe("visible", kinds=Chunk) as late,
            idle.subscribe("visible", kinds=Chunk, group="late") as late_group,
        ):
            for writer in new:
                await writer.say("at last. ")
            for writer in (*old, *new):
                await writer.complete()
            last = {(writer.run, 2) for writer in new}
            assert {(e.run, e.seq) for e in [await anext(late) for _ in new]} == last, "none from before it began"
            assert {(e.run, e.seq) for e in [await anext(late_group) for _ in new]} == last
            newest = late.cursor
        written |= last
        texts = dict.fromkeys(AFTER, "more of it. And at last. ") | dict.fromkeys(
            BEFORE, "It was said. Now more of it. And "
        )
        await readers.check(written, texts)
        async with bus.subscribe("visible", kinds=Chunk, from_=Cursor.parse(str(begin))) as again:
            assert {(e.run, e.seq) for e in [await anext(again) for _ in written]} == written
        await check_lists(bus, listed)
    async with (
        Client(url, prefix=keys.prefix) as other,
        other.subscribe("visible", kinds=Chunk, from_=newest) as after,
    ):
        await new[0].say("late")
        assert (await anext(after)).run == AFTER[0]


async def check_lists(bus: Client, listed: Listed) -> None:
    """The runs of both numbers are found, open and ended, of all tenants and of one."""
    await listed.end(BEFORE[0])
    await listed.end(AFTER[0])
    both = {*BEFORE, *AFTER}
    assert {info.run async for info in bus.runs()} == both
    assert {info.run async for info in bus.runs(state="completed")} == {BEFORE[0], AFTER[0]}
    acme = [run for runs in (BEFORE, AFTER) for run in runs[1::2]]
    assert [info.run async for info in bus.runs(tenant="acme", oldest_first=True)] == acme
    assert set(await bus.describe([*both, "nothing"])) == both
