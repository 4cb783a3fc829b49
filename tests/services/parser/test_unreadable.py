"""A run whose checkpoint another version wrote: its end is told, and its partition is worked on."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.partition import Standing
from tokenbus.bus.stage.stage import Stage
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import Accepted, EventFrame, Rules, encode, event_decoder
from tokenbus.events.normalized import Cut
from tokenbus_services.normalizer.logic import NormalizerLogic
from tokenbus_services.parser.logic import ParserLogic


async def test_the_parser_ends_it_failed_under_the_number_that_comes_next(server: Server, keys: Keys):
    keys = Keys(keys.prefix, 1)
    run, beside = "run-lost", "run-beside"
    await server.client.hset(keys.run(run), mapping={"status": "open", "turn": 0, "attempt": 2, "seq": 7})
    await server.client.hset(keys.state(0, "parser"), run, b"\xc1")
    await server.client.xadd(keys.log(run), {"__data__": "{}"}, id="2-6")
    accepted = Accepted("anthropic", "m", "fail", 0, Rules(), [])
    await server.client.xadd(keys.topic(0, "events"), {beside: encode(EventFrame(0, 0, 5, [accepted]))})

    def logic(partition: int) -> ParserLogic:
        return ParserLogic(partition, keys, topics=["visible"], open_run_ms=60_000, finished_run_ms=60_000)

    stage = Stage(server, keys, group="parser", topic="events", worker="w", logic=logic)
    await stage.open()

    async def worked() -> bool:
        await stage.process(await stage.read(block_ms=20))
        return await server.client.xlen(keys.log(beside)) == 1

    await eventually(worked)
    await stage.close()
    await server.client.pexpire(keys.run(beside), 60_000)  # as intake does
    entry_id, fields = (await server.client.xrevrange(keys.log(run), count=1))[0]
    end: dict[str, Any] = msgspec.json.decode(fields[b"__data__"])
    assert (entry_id, end["type"], end["error"]["code"], end["seq"]) == (b"2-7", "failed", "state_unreadable", 7)
    assert await server.client.hget(keys.run(run), "status") == b"failed"


def test_the_normalizer_says_that_the_attempt_is_lost_so_that_the_next_may_follow(keys: Keys):
    logic = NormalizerLogic(0, keys)
    logic.end_unread("r", ErrorInfo(code="state_unreadable", kind="internal", message="why"), Standing(1, 3, 0))
    commit = Commit("lease", "stream")
    logic.flush(commit)
    call = commit.call(
        token="t",
        ttl_ms=1,
        begin="0-0",
        end="0-0",
        watermark="0-0",
        entries=0,
        size=0,
        mirror="",
        entries_read=True,
        topic_entries=1,
    )
    frame = event_decoder.decode(call.args[list(call.args).index("r") + 1])  # pyright: ignore[reportArgumentType]
    assert (frame.turn, frame.attempt) == (1, 3)
    [cut] = frame.events
    assert isinstance(cut, Cut)
    assert cut.error
    assert cut.error.retryable
