"""A run whose checkpoint another version wrote: its end is published, and its partition continues."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.commits import commit_call
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import RunLifetimes
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.logic import RunPosition
from tokenbus.bus.stage.stage import Stage, StageOptions
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import Accepted, EventFrame, RunLimits, encode, event_decoder
from tokenbus.events.normalized import Cut
from tokenbus_services.normalizer.logic import NormalizerLogic
from tokenbus_services.parser.logic import ParserLogic


async def test_the_parser_ends_it_failed_under_the_number_that_comes_next(server: Server, keys: Keys):
    keys = Keys(keys.prefix, 1)
    run, beside = "run-lost", "run-beside"
    await server.client.hset(keys.run(run), mapping={"status": "open", "turn": 0, "attempt": 2, "seq": 7})
    await server.client.hset(keys.state(0, "parser"), run, b"\xc1")
    await server.client.xadd(keys.log(run), {"__data__": "{}"}, id="2-6")
    rules = RunLimits()
    accepted = Accepted(provider="anthropic", model="m", on_failure="fail", max_tool_depth=0, rules=rules, tools=[])
    await server.client.xadd(keys.topic(0, "events"), {beside: encode(EventFrame(0, 0, 5, [accepted]))})

    def logic(partition: int) -> ParserLogic:
        return ParserLogic(partition, keys, topics=["visible"], lifetimes=RunLifetimes(60_000, 60_000))

    stage = Stage(server, keys, StageOptions(group="parser", topic="events", worker="w"), logic)
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


async def test_the_blocks_that_are_open_in_its_log_end_as_cut(server: Server, keys: Keys):
    keys = Keys(keys.prefix, 1)
    run = "run-open"
    chunks: list[dict[str, Any]] = [
        {"type": "started", "provider": "p", "model": "m"},
        {"type": "block_start", "block": 0, "kind": "thinking"},
        {"type": "chunk", "block": 0, "kind": "thinking", "text": "Hm", "visible": False, "depth": 0},
        {"type": "block_complete", "block": 0, "kind": "thinking", "content": "Hm"},
        {"type": "block_start", "block": 1, "kind": "text"},
        {"type": "chunk", "block": 1, "kind": "text", "text": "Once ", "visible": True, "depth": 0},
        {"type": "an event of a newer version", "block": 1},
        {"type": "block_start", "block": 2, "kind": "tool_call", "tool_id": "t", "tool_name": "f"},
        {"type": "chunk", "block": 1, "kind": "text", "text": "upon", "visible": True, "depth": 0},
    ]
    for part, text in (("name", "f"), ("id", "t"), ("input", '{"a":')):
        chunk = {"type": "chunk", "block": 2, "kind": "tool_call", "text": text, "visible": False, "depth": 0}
        chunks.append({**chunk, "tool_call_part": part, "tool_id": "t", "tool_name": "f"})
    for seq, event in enumerate(chunks):
        data = msgspec.json.encode({"run": run, "seq": seq, "turn": 0, "attempt": 1, **event})
        await server.client.xadd(keys.log(run), {"__data__": data}, id=f"1-{seq}")
    await server.client.pexpire(keys.log(run), 60_000)
    await server.client.hset(keys.run(run), mapping={"status": "open", "turn": 0, "attempt": 1, "seq": len(chunks)})
    await server.client.hset(keys.state(0, "parser"), run, b"\xc1")

    def logic(partition: int) -> ParserLogic:
        return ParserLogic(partition, keys, topics=["visible", "blocks"], lifetimes=RunLifetimes(60_000, 60_000))

    stage = Stage(server, keys, StageOptions(group="parser", topic="events", worker="w"), logic)
    await stage.open()

    async def published() -> list[dict[str, Any]]:
        entries = await server.client.xrange(keys.log(run), f"1-{len(chunks)}")
        return [msgspec.json.decode(fields[b"__data__"]) for _, fields in entries]

    async def ended() -> bool:
        return len(await published()) >= 3

    await eventually(ended)
    await stage.close()
    events = await published()
    assert [(e["type"], e["seq"], e.get("block"), e.get("cut")) for e in events] == [
        ("block_complete", len(chunks), 1, True),
        ("block_complete", len(chunks) + 1, 2, True),
        ("failed", len(chunks) + 2, None, None),
    ]
    assert events[0]["content"] == "Once upon"
    assert (events[1]["arguments"], events[1]["tool_id"]) == ('{"a":', "t")


def test_the_normalizer_says_that_the_attempt_is_lost_so_that_the_next_may_follow(keys: Keys):
    logic = NormalizerLogic(0, keys)
    logic.fail_unreadable("r", ErrorInfo(code="state_unreadable", kind="internal", message="why"), RunPosition(1, 3, 0))
    commit = Commit("lease", "stream")
    logic.flush(commit)
    call = commit_call(commit)
    frame = event_decoder.decode(call.args[list(call.args).index("r") + 1])  # pyright: ignore[reportArgumentType]
    assert (frame.turn, frame.attempt) == (1, 3)
    [cut] = frame.events
    assert isinstance(cut, Cut)
    assert cut.error
    assert cut.error.retryable
