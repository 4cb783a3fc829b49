"""Events whose handlers fail: their run waits, their tries are counted on the server, then they are dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.contract.client.writer import Writer
from tests.waiting import eventually
from tokenbus import Chunk, Client, Sentence, SharedSubscription
from tokenbus.bus.dead_letters import DeadLetter, StoredDeadLetter, drop_dead_letter, give_back, newest_dead_letters
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.client.subscriptions.sentences import SentenceSubscription
from tokenbus.errors import CannotRetry

Source = SharedSubscription[Chunk] | SentenceSubscription


class Handling:
    """A worker of a group whose handler fails for what it is told to."""

    def __init__(self, source: Source, fails: Callable[[Chunk | Sentence], bool], *, tries: int) -> None:
        self.seen: list[tuple[str, str]] = []
        self.fails = fails
        self._source = source
        each: Callable[..., Awaitable[None]] = source.each
        self._task = asyncio.ensure_future(each(self._handle, concurrency=1, tries=tries))

    async def _handle(self, event: Chunk | Sentence) -> None:
        self.seen.append((event.run, event.text))
        if self.fails(event):
            raise ZeroDivisionError(event.text)

    async def stop(self) -> None:
        await self._source.aclose()
        await self._task


async def dead(server: Server, keys: Keys) -> list[StoredDeadLetter]:
    return [letter async for letter in newest_dead_letters(server, keys, most=10)]


def chunks(bus: Client) -> SharedSubscription[Chunk]:
    return bus.subscribe("visible", kinds=Chunk, group="tts", from_="start")


async def test_only_the_run_of_an_event_that_fails_waits(bus: Client, server: Server, keys: Keys):
    failing, other = Writer(server, keys, "failing"), Writer(server, keys, "other")
    await failing.say("a", "b")
    left = 2

    def fails(event: Chunk | Sentence) -> bool:
        nonlocal left
        left -= event.text == "a"
        return event.text == "a" and left >= 0

    worker = Handling(chunks(bus), fails, tries=5)
    await eventually(lambda: len(worker.seen) == 1)
    await other.say("x", "y", "z")
    await eventually(lambda: len(worker.seen) == 7)
    await worker.stop()
    assert [text for run, text in worker.seen if run == "failing"] == ["a", "a", "a", "b"]
    assert worker.seen.index(("other", "z")) < len(worker.seen) - 1
    assert not await dead(server, keys)
    partition = keys.partition_of("failing")
    assert not await server.client.exists(keys.failed_tries(partition, "visible:tts"))


async def test_what_failed_too_often_is_a_dead_letter_that_can_be_given_back(
    bus: Client, server: Server, keys: Keys, writer: Writer
):
    await writer.say("a", "poison", "b")
    worker = Handling(chunks(bus), lambda event: event.text == "poison", tries=2)
    await eventually(lambda: ("r", "b") in worker.seen)
    assert [text for _, text in worker.seen] == ["a", "poison", "poison", "b"]
    (letter,) = await dead(server, keys)
    e = letter.entry
    assert (e.run, e.seq, e.group, e.stream) == ("r", 1, "visible:tts", keys.topic(keys.partition_of("r"), "visible"))
    assert e.reason == "failed 2 times: ZeroDivisionError('poison')"
    assert await server.client.xrange(e.stream, e.entry, e.entry), "its place in the topic"

    worker.fails = lambda event: False
    assert await give_back(server, keys, letter) == "visible:tts"
    await drop_dead_letter(server, keys, [letter.id])
    await eventually(lambda: len(worker.seen) == 5)
    assert worker.seen[-1] == ("r", "poison")
    await worker.stop()
    assert not await server.client.xlen(keys.returned(keys.partition_of("r"), "visible:tts"))
    assert not await dead(server, keys)


async def test_what_is_given_back_waits_for_a_worker_and_may_fail_again(
    bus: Client, server: Server, keys: Keys, writer: Writer
):
    await writer.say("poison")
    worker = Handling(chunks(bus), lambda event: True, tries=1)
    await eventually(lambda: dead(server, keys))
    (first,) = await dead(server, keys)

    async def is_behind() -> bool:
        """Else it comes again from the topic, too."""
        offset = await server.client.hget(keys.lease(keys.partition_of("r"), "visible:tts"), "offset")
        return offset == first.entry.entry.encode()

    await eventually(is_behind)
    await worker.stop()
    await give_back(server, keys, first)
    await drop_dead_letter(server, keys, [first.id])
    again = Handling(chunks(bus), lambda event: True, tries=2)
    await eventually(lambda: dead(server, keys))
    await again.stop()
    assert again.seen == [("r", "poison")] * 2


async def test_sentences_are_buried_and_given_back_whole(bus: Client, server: Server, keys: Keys, writer: Writer):
    await writer.start()
    await writer.block("All is well here. This one is poison. And this is not.")
    await writer.complete()
    source = bus.sentences(group="tts", from_="start")
    worker = Handling(source, lambda event: "poison" in event.text, tries=2)
    await eventually(lambda: len(worker.seen) == 4)
    assert [text for _, text in worker.seen][1:3] == ["This one is poison. "] * 2
    (letter,) = await dead(server, keys)
    assert (letter.entry.run, letter.entry.group) == ("r", "visible:tts")
    worker.fails = lambda event: False
    await give_back(server, keys, letter)
    await eventually(lambda: len(worker.seen) == 5)
    assert worker.seen[-1] == ("r", "This one is poison. ")
    await worker.stop()


async def test_the_tries_of_a_worker_count_for_the_next(bus: Client, server: Server, keys: Keys, writer: Writer):
    await writer.say("poison", "b")
    first = Handling(chunks(bus), lambda event: event.text == "poison", tries=3)
    await eventually(lambda: len(first.seen) == 2)
    await first.stop()
    second = Handling(chunks(bus), lambda event: event.text == "poison", tries=3)
    await eventually(lambda: ("r", "b") in second.seen)
    await second.stop()
    assert len([text for _, text in first.seen + second.seen if text == "poison"]) == 3
    assert len(await dead(server, keys)) == 1


async def test_impossible_tries_are_refused(bus: Client, server: Server, keys: Keys):
    with pytest.raises(ValueError, match="tries"):
        await chunks(bus).each(_nothing, tries=0)
    with pytest.raises(ValueError, match="group"):
        await bus.sentences().each(_nothing, tries=2)
    stage = DeadLetter(reason="", stage="parser", stream=keys.topic(0, "events"), entry="1-0", bytes=b"{}")
    with pytest.raises(CannotRetry, match="neither a group"):
        await give_back(server, keys, StoredDeadLetter("1-0", stage))


async def _nothing(event: object) -> None: ...
