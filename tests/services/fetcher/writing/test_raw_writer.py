"""Which events wait for a flush. Linger and `max_added_ms` are a minute here, so an event that arrives did not wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ResponseError

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import BYPASSED
from tokenbus.bus.server.server import Server
from tokenbus.errors import AttemptRefused
from tokenbus.events.frames import Data, Ended, Lost, RawFrame, RawItem, raw_decoder
from tokenbus.events.requests import Generate, Message
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.fetcher.calls.provider_call import fetch
from tokenbus_services.fetcher.writing import raw_writer
from tokenbus_services.fetcher.writing.attempt_writer import FRAME_BYTES, AttemptWriter, FramesRefused
from tokenbus_services.fetcher.writing.raw_writer import RawWriter
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, Turn
from tokenbus_services.settings import ProviderSettings

RUN = "r1"
LINGER_S = 60.0
LAG_BYTES = 2**20


@pytest.fixture
async def run(server: Server, keys: Keys) -> str:
    """A run whose first attempt is open, as intake leaves it."""
    await server.client.hset(keys.run(RUN), mapping={"status": "open", "attempt": 1, "raw": 0})
    await server.client.pexpire(keys.run(RUN), 60_000)
    return RUN


@asynccontextmanager
async def writing(
    server: Server, keys: Keys, run: str, *, held: bool = False, max_added_s: float = 0.0
) -> AsyncGenerator[AttemptWriter]:
    writer = RawWriter(server, keys, linger_s=LINGER_S, lag_bytes=LAG_BYTES, max_added_s=max_added_s)
    await writer.open()
    try:
        yield writer.attempt(run, 0, 1, lambda reason: None, held=held)
    finally:
        await writer.close()


async def frames(server: Server, keys: Keys, run: str) -> list[RawFrame]:
    entries = await server.client.xrange(keys.topic(keys.partition_of(run), "raw"))
    return [raw_decoder.decode(fields[run.encode()]) for _, fields in entries]


async def items(server: Server, keys: Keys, run: str) -> list[list[RawItem]]:
    """What each flush carried."""
    return [frame.items for frame in await frames(server, keys, run)]


async def flushed(server: Server, keys: Keys, run: str, *expected: list[RawItem]) -> None:
    async def so() -> bool:
        return await items(server, keys, run) == list(expected)

    await eventually(so)


async def test_a_write_while_idle_is_flushed_at_once(server: Server, keys: Keys, run: str) -> None:
    async with writing(server, keys, run) as attempt:
        await attempt.write(Data(b"a"))
        await flushed(server, keys, run, [Data(b"a")])


async def test_under_load_reads_are_gathered_until_one_is_urgent(server: Server, keys: Keys, run: str) -> None:
    async with writing(server, keys, run) as attempt:
        await attempt.write(Data(b"a"))
        await flushed(server, keys, run, [Data(b"a")])
        for piece in (b"b", b"c"):
            await attempt.write(Data(piece))
        await attempt.write(Data(b"d"), urgent=True)
        await flushed(server, keys, run, [Data(b"a")], [Data(b"bcd")])


async def test_an_urgent_read_right_after_another_does_not_wait_either(server: Server, keys: Keys, run: str) -> None:
    async with writing(server, keys, run) as attempt:
        for n in range(5):
            await attempt.write(Data(b"%d" % n), urgent=True)
            await flushed(server, keys, run, *_alone(n + 1))


def _alone(count: int) -> list[list[RawItem]]:
    return [[Data(b"%d" % n)] for n in range(count)]


async def test_data_waits_for_an_urgent_read_as_long_as_its_run_allows(server: Server, keys: Keys, run: str) -> None:
    async with writing(server, keys, run, max_added_s=60.0) as attempt:
        await attempt.write(Data(b"a"), urgent=True)
        await flushed(server, keys, run, [Data(b"a")])
        await attempt.write(Data(b"b"))
        await asyncio.sleep(0.05)  # far longer than a flush takes
        await flushed(server, keys, run, [Data(b"a")])
        await attempt.write(Data(b"c"), urgent=True)
        await flushed(server, keys, run, [Data(b"a")], [Data(b"bc")])


async def test_data_goes_when_its_time_is_over(server: Server, keys: Keys, run: str) -> None:
    async with writing(server, keys, run) as attempt:
        attempt.max_added_s = 0.1
        begin = asyncio.get_running_loop().time()
        for piece in (b"a", b"b"):
            await attempt.write(Data(piece))
        await flushed(server, keys, run, [Data(b"ab")])
        assert asyncio.get_running_loop().time() - begin >= 0.099


async def test_the_run_that_may_wait_least_says_when_all_go(server: Server, keys: Keys, run: str) -> None:
    await server.client.hset(keys.run("prompt"), mapping={"status": "open", "attempt": 1, "raw": 0})
    await server.client.pexpire(keys.run("prompt"), 60_000)
    async with writing(server, keys, run, max_added_s=60.0) as patient:
        prompt = AttemptWriter(patient.writer, "prompt", 0, 1, lambda reason: None, held=False)
        await patient.write(Data(b"a"))
        await prompt.write(Data(b"b"))
        await flushed(server, keys, "prompt", [Data(b"b")])
        await flushed(server, keys, run, [Data(b"a")])


async def test_the_end_of_an_attempt_takes_along_what_was_gathered(server: Server, keys: Keys, run: str) -> None:
    async with writing(server, keys, run) as attempt:
        await attempt.write(Data(b"a"))
        await flushed(server, keys, run, [Data(b"a")])
        await attempt.write(Data(b"b"))
        await attempt.end(Ended())
        assert await items(server, keys, run) == [[Data(b"a")], [Data(b"b"), Ended()]]


async def test_a_blocks_boundaries_and_its_first_chunk_are_forwarded_at_once(
    server: Server, keys: Keys, run: str
) -> None:
    # The provider falls silent after each of these: what is not forwarded at once never comes.
    for upto in ("message_start", "content_block_start", "first", "content_block_stop"):
        await _forwarded(server, keys, run, upto)


async def _forwarded(server: Server, keys: Keys, run: str, upto: str) -> None:
    await server.client.unlink(keys.topic(keys.partition_of(run), "raw"))
    await server.client.hset(keys.run(run), mapping={"raw": 0})
    says = Reply(text="first second third")
    script = Script(name="m", turns=(Turn(says=says, fault=Stall(after_text=upto)),))
    async with MockProvider([script]) as provider, writing(server, keys, run, max_added_s=60.0) as attempt:
        settings = ProviderSettings(api="anthropic", base_url=provider.url, api_key_env="")
        endpoint = Endpoint("anthropic", settings, {})
        request = Generate(provider="anthropic", model="m", messages=[Message(role="user", content="Go")])
        call = endpoint.api.build(request, [], settings.quirks).call
        calling = asyncio.create_task(fetch(endpoint, request, call, writer=attempt, deadline=None))
        try:
            await eventually(lambda: _holds(server, keys, run, upto.encode()))
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            await endpoint.close()


async def _holds(server: Server, keys: Keys, run: str, text: bytes) -> bool:
    data = [item.data for each in await items(server, keys, run) for item in each if isinstance(item, Data)]
    return text in b"".join(data)


async def test_an_attempt_whose_frames_the_server_lost_ends_as_lost(server: Server, keys: Keys, run: str) -> None:
    async with writing(server, keys, run) as attempt:
        for _ in range(2):
            await attempt.write(Data(b"a"), urgent=True)
            await eventually(lambda: not attempt.items)
        await server.client.hset(keys.run(run), "raw", 1)  # the second is forgotten
        with pytest.raises(AttemptRefused):
            await attempt.end(Ended())
    assert await items(server, keys, run) == [[Data(b"a")]] * 2 + [[Lost("the server lost frames of this attempt")]]
    assert await server.client.hget(keys.run(run), "closed") == b"1"


async def test_of_two_writers_of_one_attempt_none_continues(server: Server, keys: Keys, run: str) -> None:
    async with writing(server, keys, run) as first, writing(server, keys, run) as second:
        await first.write(Data(b"a"), urgent=True)
        await eventually(lambda: not first.items)
        with pytest.raises(AttemptRefused, match="frame 1"):
            await second.end(Ended())
        with pytest.raises(AttemptRefused, match="closed"):
            await first.end(Ended())
    assert await items(server, keys, run) == [[Data(b"a")], [Lost("the server lost frames of this attempt")]]


async def behind(server: Server, keys: Keys, stage: str, by: int) -> None:
    lease = keys.lease(keys.partition_of(RUN), stage)
    await server.client.hset(lease, mapping={"arrived": by, "done": 0})


async def test_a_run_that_policies_judge_waits_for_their_stage_and_no_other_run_does(
    server: Server, keys: Keys, run: str
) -> None:
    await behind(server, keys, "policy", LAG_BYTES + 1)
    async with writing(server, keys, run, held=True) as attempt:
        await attempt.write(Data(b"a"), urgent=True)  # what is read already is written
        await eventually(lambda: attempt.must_wait)
        beside = AttemptWriter(attempt.writer, "r2", 0, 1, lambda reason: None, held=False)
        assert not beside.must_wait
        waiting = asyncio.create_task(attempt.room())
        await behind(server, keys, "policy", LAG_BYTES // 2)
        await waiting
        assert not attempt.must_wait


async def test_a_run_that_its_policies_released_does_not_wait(server: Server, keys: Keys, run: str) -> None:
    await behind(server, keys, "policy", LAG_BYTES + 1)
    async with writing(server, keys, run, held=True) as attempt:
        await attempt.write(Data(b"a"), urgent=True)
        await eventually(lambda: attempt.must_wait)
        await server.client.hset(keys.run(run), BYPASSED, 1)
        await attempt.room()
        assert not attempt.must_wait


async def test_a_run_that_ended_while_it_waited_for_its_policies_is_refused(
    server: Server, keys: Keys, run: str
) -> None:
    await behind(server, keys, "policy", LAG_BYTES + 1)
    async with writing(server, keys, run, held=True) as attempt:
        await attempt.write(Data(b"a"), urgent=True)
        await eventually(lambda: attempt.must_wait)
        await server.client.hset(keys.run(run), "status", "failed")
        with pytest.raises(AttemptRefused):
            await attempt.room()


async def test_a_run_that_ended_while_it_waited_for_the_normalizer_is_refused(
    server: Server, keys: Keys, run: str
) -> None:
    await behind(server, keys, "normalizer", LAG_BYTES + 1)
    async with writing(server, keys, run) as attempt:
        await attempt.write(Data(b"a"), urgent=True)
        await eventually(lambda: attempt.must_wait)
        await server.client.hset(keys.run(run), "status", "failed")
        with pytest.raises(AttemptRefused):
            await attempt.room()


async def test_time_without_a_reader_does_not_count_as_the_providers_silence(
    server: Server, keys: Keys, run: str
) -> None:
    idle_s, clock = 0.05, asyncio.get_running_loop().time
    await behind(server, keys, "normalizer", LAG_BYTES + 1)
    says = Reply(text="word " * 20_000, chunk_size=5)
    async with (
        MockProvider([Script(name="m", turns=(Turn(says=says),))]) as provider,
        writing(server, keys, run) as attempt,
    ):
        settings = ProviderSettings(
            api="anthropic", base_url=provider.url, api_key_env="", first_event_timeout_s=120, idle_timeout_s=idle_s
        )
        endpoint = Endpoint("anthropic", settings, {})
        request = Generate(provider="anthropic", model="m", messages=[Message(role="user", content="Go")])
        call = endpoint.api.build(request, [], settings.quirks).call
        calling = asyncio.create_task(fetch(endpoint, request, call, writer=attempt, deadline=None))
        try:
            await eventually(lambda: attempt.must_wait)
            until = clock() + 4 * idle_s
            await eventually(lambda: clock() > until)
            ends = [item for each in await items(server, keys, run) for item in each if isinstance(item, Ended)]
            assert ends == []
            assert not calling.done()
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            await endpoint.close()


async def test_a_writer_that_a_defect_ended_raises_its_error(
    server: Server, keys: Keys, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise TypeError("a defect")

    writer = RawWriter(server, keys, linger_s=LINGER_S, lag_bytes=2**20)
    await writer.open()
    try:
        assert writer.healthy
        monkeypatch.setattr("tokenbus_services.fetcher.writing.raw_writer.run_scripts", broken)
        await writer.attempt(run, 0, 1, lambda reason: None).write(Data(b"a"), urgent=True)
        await eventually(lambda: not writer.healthy)
    finally:
        await writer.close()


async def test_an_end_that_a_full_server_never_takes_ends_its_own_attempt_alone(monkeypatch: pytest.MonkeyPatch):
    async with Server("redis://127.0.0.1:1") as server:
        writer = RawWriter(server, Keys("t", 1), linger_s=0.0, lag_bytes=LAG_BYTES)
        replies: list[list[list[object]]] = [[[b"full", b"ok", 0]]]

        async def send(calls: object, *, tries: int = 0) -> list[list[object]]:
            if replies:
                return replies.pop()
            raise ResponseError("upstream failure")

        monkeypatch.setattr(raw_writer, "FULL_PATIENCE_S", 0.0)
        monkeypatch.setattr(writer, "_send", send)
        full, other = (writer.attempt(run, 0, 1, lambda reason: None) for run in ("full", "other"))
        for attempt in (full, other):
            attempt.write_item(Data(b"text"), urgent=True)
        await writer.open()
        with pytest.raises(FramesRefused, match="upstream failure"):
            await full.end(Ended())
        assert not other.items
        assert writer.healthy
        await writer.close()


@pytest.fixture
async def refused(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The first flush is sent twice. The second command is refused by a full server, when this is set; the first one
    arrives before the next flush.
    """
    send, late, refused = RawWriter._send, list[Any](), asyncio.Event()

    async def sent(writer: RawWriter, calls: list[Any], *, tries: int = 1) -> list[list[Any]]:
        if not refused.is_set():
            refused.set()
            late.append(calls)
            return [[b"full", 0]]
        while late:
            await send(writer, late.pop())
        return await send(writer, calls, tries=tries)

    monkeypatch.setattr(RawWriter, "_send", sent)
    monkeypatch.setattr(raw_writer, "FULL_POLL_S", 0.0)
    return refused


@pytest.mark.parametrize("rest", [Data(b"b"), Ended()], ids=["more", "the end"])
async def test_a_frame_that_a_full_server_refused_and_that_arrives_late_loses_nothing(
    server: Server, keys: Keys, run: str, rest: Data | Ended, refused: asyncio.Event
) -> None:
    async with writing(server, keys, run) as attempt:
        attempt.write_item(Data(b"a"), urgent=True)
        await refused.wait()
        await (attempt.end(rest) if isinstance(rest, Ended) else attempt.write(rest, urgent=True))
        await flushed(server, keys, run, [Data(b"a")], [rest])
        assert not attempt.items
        assert not attempt.waiting


async def test_an_attempt_whose_late_frame_cannot_be_looked_at_ends_alone(
    server: Server, keys: Keys, run: str, refused: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreadable(*_: object) -> None:
        raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")

    monkeypatch.setattr(raw_writer, "read_attempt", unreadable)
    other = next(f"other{n}" for n in range(100) if keys.partition_of(f"other{n}") == keys.partition_of(run))
    await server.client.hset(keys.run(other), mapping={"status": "open", "attempt": 1, "raw": 0})
    await server.client.pexpire(keys.run(other), 60_000)
    async with writing(server, keys, run) as attempt:
        writer = attempt.writer
        assert isinstance(writer, RawWriter)
        attempt.write_item(Data(b"a"), urgent=True)
        await refused.wait()
        beside = writer.attempt(other, 0, 1, lambda reason: None)
        beside.write_item(Data(b"b"), urgent=True)
        with pytest.raises(FramesRefused, match="WRONGTYPE"):
            await attempt.end(Ended())
        await beside.end(Ended())
        assert writer.healthy


async def test_a_large_item_and_how_far_it_brings_the_providers_job_are_one_frame(
    server: Server, keys: Keys, run: str
) -> None:
    """A fetcher that takes the job over would else read the item again."""
    text = b"x" * (2 * FRAME_BYTES)
    async with writing(server, keys, run) as attempt:
        attempt.write_item(Data(text), urgent=True, job=b"as far as this")
        await flushed(server, keys, run, [Data(text)])
        await eventually(lambda: not attempt.items)
        assert await server.client.hget(keys.run(run), "job") == b"as far as this"
        assert len(await frames(server, keys, run)) == 1
