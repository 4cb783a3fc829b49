"""The topic `visible` as sentences: each once or at least once, with the seqs of its chunks, to the last word."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.client.writer import LOST, Writer
from tests.waiting import eventually
from tokenbus import BlockComplete, Chunk, Client, Restarted, Sentence, SentenceRules, SentenceSubscription
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.client.subscriptions.sentences import run_outcome

RULES = SentenceRules(least=0)
GROUPS = [None, "tts"]


def speech(bus: Client, group: str | None = None, **how: Any) -> SentenceSubscription:
    return bus.sentences(group=group, from_="start", rules=RULES, **how)


async def end_block(writer: Writer, content: str) -> None:
    await writer.write((BlockComplete, {"block": 0, "kind": "text", "content": content}))


@pytest.mark.parametrize("group", GROUPS)
async def test_sentences_come_with_the_seqs_of_their_chunks_and_the_last_when_the_block_ends(
    bus: Client, group: str | None, writer: Writer
):
    await writer.start()
    async with speech(bus, group) as sentences:
        await writer.say("Hel", "lo there. How", " are", " you? Fi", "ne")
        first, second = await anext(sentences), await anext(sentences)
        last = asyncio.ensure_future(anext(sentences))
        await end_block(writer, "Hello there. How are you? Fine")
        read = [(s.run, s.block, s.text, s.first, s.last) for s in (first, second, await last)]
    assert read == [
        ("r", 0, "Hello there. ", 1, 2),
        ("r", 0, "How are you? ", 2, 4),
        ("r", 0, "Fine", 4, 5),
    ]


async def test_words_are_released_after_the_hold_and_the_rest_follows(bus: Client, writer: Writer):
    await writer.start()
    async with speech(bus, hold_s=0.01) as sentences:
        await writer.say("one two thr")
        assert (await anext(sentences)).text == "one two "
        await writer.say("ee")
        await end_block(writer, "one two three")
        assert (await anext(sentences)).text == "three"


async def test_a_worker_that_dies_gives_its_group_whole_sentences_again(bus: Client, writer: Writer):
    await writer.start()
    await writer.say("One. Tw", "o. Thr", "ee. ")
    sentences = speech(bus, "tts")
    assert (await anext(sentences)).text == "One. "
    assert (await anext(sentences)).text == "Two. "  # "One. " is done, and not the chunk that it shares with this one
    await sentences.aclose()
    await end_block(writer, "One. Two. Three. ")
    async with speech(bus, "tts") as again:
        assert [(await anext(again)).text for _ in range(3)] == ["One. ", "Two. ", "Three. "]


async def test_a_cursor_is_before_the_chunks_of_unacknowledged_sentences(bus: Client, writer: Writer):
    await writer.start()
    await writer.say("One. ", "Two. ", "Three. ")
    await end_block(writer, "One. Two. Three. ")
    async with speech(bus, ack="explicit") as sentences:
        one, two = await anext(sentences), await anext(sentences)
        sentences.ack(two)
        sentences.ack(one)
        cursor = sentences.cursor
    async with bus.sentences(from_=cursor, rules=RULES) as rest:
        assert (await anext(rest)).text == "Three. "


@pytest.mark.parametrize("group", GROUPS)
async def test_runs_are_spoken_side_by_side_and_each_in_order(
    bus: Client, server: Server, keys: Keys, group: str | None
):
    writers = [Writer(server, keys, f"r{i}") for i in range(5)]
    for writer in writers:
        await writer.start()
    await asyncio.gather(*(w.say(f"{w.run} one. ", "Two", ". Three.") for w in writers))
    await asyncio.gather(*(end_block(w, f"{w.run} one. Two. Three.") for w in writers))
    spoken: dict[str, list[str]] = {w.run: [] for w in writers}
    sentences = speech(bus, group)

    async def speak(sentence: Sentence) -> None:
        spoken[sentence.run].append(sentence.text)
        if sum(map(len, spoken.values())) == 15:
            await sentences.aclose()

    await sentences.each(speak, concurrency=3)
    assert spoken == {w.run: [f"{w.run} one. ", "Two. ", "Three."] for w in writers}


async def test_a_loop_that_is_left_leaves_no_task(bus: Client, writer: Writer):
    await writer.start()
    await writer.say("One. Two. ", "Three")
    tasks = asyncio.all_tasks()
    async for sentence in speech(bus, "tts"):
        assert sentence.text == "One. "
        break
    await eventually(lambda: asyncio.all_tasks() == tasks)


def test_what_follows_in_the_log_says_what_becomes_of_a_block():
    at: dict[str, Any] = {"run": "r", "seq": 0, "turn": 0, "attempt": 1}
    more = Chunk(**at, block=0, kind="text", text="a", visible=True, depth=0)
    other = Chunk(**at, block=1, kind="text", text="a", visible=True, depth=0)
    end = BlockComplete(**at, block=0, kind="text", content="a")
    again: dict[str, Any] = {**at, "error": LOST, "next_attempt": 2, "delay_ms": 0}
    assert run_outcome(0, []) == "open"
    assert run_outcome(0, [other, more, end]) == "open"
    assert run_outcome(0, [other, end, more]) == "complete"
    assert run_outcome(0, [Restarted(**again, drop_from=0), end]) == "void"
    assert run_outcome(0, [Restarted(**again, drop_from=1)]) == "open"


async def test_a_run_has_not_ended_if_another_runs_look_learnt_the_new_number_of_partitions(
    server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch
):
    """Several logs are looked at together: the new number may come after a log was missed by the old one."""
    exists = server.client.exists

    async def exists_then_learn(log: str) -> int:
        found = await exists(log)
        keys.apply([7], 7, 1, [4, 7])
        return found

    async def nothing_new(*, older_than_s: float) -> None:
        assert older_than_s == 0

    monkeypatch.setattr(server.client, "exists", exists_then_learn)
    sentences: Any = object.__new__(SentenceSubscription)
    reads = SimpleNamespace(reads=asyncio.Semaphore())
    sentences._deployment = SimpleNamespace(hub=reads, server=server, refresh=nothing_new)
    voice = SimpleNamespace(run="r", attempt=1, seq=2, block=0)
    assert await sentences._fate(keys, voice) == "open"
    assert await sentences._fate(keys, voice) == "complete", "by the new number it is not there either"
