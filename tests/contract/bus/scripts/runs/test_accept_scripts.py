"""The gates of a run: accept, cancel, raw append and tool result, refusals included (guarantee 4)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.bus.state import everything
from tests.run_calls import accept_call, cancel_call
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import call_field, child_field
from tokenbus.bus.scripts import RawPart
from tokenbus.bus.scripts.script import MAX_VALUES
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.events.child_runs import child_id
from tokenbus.events.frames import ANY_FRAME, Lost, RawFrame, raw_decoder

TTL_MS = 60_000


class Scene:
    """Runs of partition 0."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.keys = keys
        self.client = server.client
        self.names = [name for name in (f"r{i}" for i in range(9000)) if keys.partition_of(name) == 0]
        self.run = self.names[0]

    def topic(self, name: Any) -> str:
        return self.keys.topic(0, name)

    async def accept(self, run: str | None = None, work: bytes = b"work", parent: str = "") -> bytes:
        child: dict[str, Any] = {"parent_call": call_field(3), "parent_child": child_field(3)} if parent else {}
        call = accept_call(self.keys, run or self.run, work=work, parent=parent, **child)
        return await run_script(self.server, call)

    async def cancel(self) -> bytes:
        return await run_script(self.server, cancel_call(self.keys, self.run))

    def part(
        self,
        n: int,
        data: bytes = b"data",
        *,
        run: str = "",
        attempt: int = 1,
        final: bool = False,
        writer: str = "first",
    ) -> RawPart:
        run = run or self.run
        return RawPart(run, self.keys.run(run), attempt, n, final, data, writer)

    async def append(self, *parts: RawPart) -> list[Any]:
        call = scripts.append_raw(self.topic("raw"), self.keys.lease(0, "normalizer"), parts)
        *verdicts, lag = await run_script(self.server, call)
        return [*(v.decode() for v in verdicts), lag]

    async def tool_result(self, block: int = 3, attempt: int = 1) -> int:
        call = scripts.tool_result(
            self.keys.run(self.run),
            self.topic("events"),
            self.keys.lease(0, "parser"),
            run=self.run,
            block=block,
            attempt=attempt,
            frame=b"result",
        )
        return await run_script(self.server, call)

    async def tool_progress(self, block: int = 3, attempt: int = 1) -> int:
        call = scripts.tool_progress(
            self.keys.run(self.run),
            self.topic("events"),
            self.keys.lease(0, "parser"),
            run=self.run,
            block=block,
            attempt=attempt,
            frame=b"progress",
        )
        return await run_script(self.server, call)

    async def entries(self, topic: Any) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in await self.client.xrange(self.topic(topic))]

    async def arrived(self, group: str) -> int:
        return int(await self.client.hget(self.keys.lease(0, group), "arrived") or 0)

    async def set(self, **fields: str | int) -> None:
        await self.client.hset(self.keys.run(self.run), mapping=fields)

    async def get(self, *fields: str) -> list[bytes | None]:
        return await self.client.hmget(self.keys.run(self.run), *fields)

    async def refused(self, *parts: RawPart) -> list[str]:
        """The verdicts, after a look that nothing was written."""
        before = await everything(self.server, self.keys)
        *verdicts, _ = await self.append(*parts)
        assert await everything(self.server, self.keys) == before
        return verdicts


@pytest.fixture
def scene(server: Server, keys: Keys) -> Scene:
    return Scene(server, keys)


@pytest.fixture
async def accepted(scene: Scene) -> Scene:
    await scene.accept()
    return scene


# --- accept -----------------------------------------------------------------------------------------------------


async def test_a_run_is_made_with_its_first_event_and_its_first_turn(scene: Scene):
    assert await scene.accept() == b"new"
    assert await scene.entries("events") == [{scene.run.encode(): b"accepted"}]
    assert await scene.entries("turns") == [{scene.run.encode(): b"work"}]
    assert await scene.get("status", "attempt", "request") == [b"open", b"1", b"{}"]
    assert await scene.arrived("parser") == len(b"accepted")
    assert 0 < await scene.client.pttl(scene.keys.run(scene.run)) <= TTL_MS


async def test_a_repeated_request_is_the_same_run(accepted: Scene):
    before = await everything(accepted.server, accepted.keys)
    assert await accepted.accept() == b"open"
    await accepted.set(status="completed")
    assert await accepted.accept() == b"completed"
    await accepted.set(status="open")
    assert await everything(accepted.server, accepted.keys) == before


async def test_a_child_run_is_accepted_once_and_while_its_parents_call_is_open(accepted: Scene):
    child, scene = child_id(accepted.run, 3), accepted

    async def accept() -> bytes:
        return await scene.accept(child, parent=scene.run)

    assert scene.keys.partition_of(child) == 0
    assert await accept() == b"orphan", "no call waits for it"
    assert await scene.client.exists(scene.keys.run(child)) == 0
    await scene.set(**{call_field(3): "1", "status": "cancelling"})
    assert await accept() == b"orphan", "the parent is about to end"
    await scene.set(status="open")
    assert await accept() == b"new"
    assert await accept() == b"open"
    await scene.client.delete(scene.keys.run(child))
    assert await accept() == b"orphan", "it expired, and no second one begins"


async def test_a_run_without_work_gets_no_turn(scene: Scene):
    assert await scene.accept(work=b"") == b"new"
    assert await scene.entries("turns") == []


async def test_the_log_of_an_expired_run_of_the_same_id_goes(scene: Scene):
    await scene.client.xadd(scene.keys.log(scene.run), {"old": "1"}, id="9-9")
    await scene.accept()
    assert await scene.client.exists(scene.keys.log(scene.run)) == 0


async def test_a_cancel_before_its_run_takes_effect_when_the_run_arrives(scene: Scene):
    assert await scene.cancel() == b"awaited"
    assert await scene.entries("events") == []
    assert 0 < await scene.client.pttl(scene.keys.run(scene.run)) <= TTL_MS
    assert await scene.accept() == b"new"
    run = scene.run.encode()
    assert await scene.entries("events") == [{run: b"accepted"}, {run: b"cancelled"}]
    assert await scene.entries("turns") == []
    assert await scene.get("status", "cancel") == [b"cancelling", None]
    assert await scene.arrived("parser") == len(b"acceptedcancelled")


# --- cancel -----------------------------------------------------------------------------------------------------


async def test_a_cancel_ends_the_attempt_and_notifies_parser_and_workers(accepted: Scene):
    await accepted.set(turn=2, attempt=5)
    assert await accepted.cancel() == b"cancelling"
    assert (await accepted.entries("events"))[1] == {accepted.run.encode(): b"cancelled"}
    assert await accepted.entries("control") == [{accepted.run.encode(): b"told"}]
    [raw] = await accepted.entries("raw")
    frame = raw[accepted.run.encode()]
    assert raw_decoder.decode(frame) == RawFrame(2, 5, ANY_FRAME, 0, [Lost("the run was cancelled")])
    assert await accepted.arrived("normalizer") == len(frame)
    assert await accepted.refused(accepted.part(0, attempt=5)) == ["cancelling"]


async def test_a_second_cancel_writes_nothing(accepted: Scene):
    await accepted.cancel()
    before = await everything(accepted.server, accepted.keys)
    assert await accepted.cancel() == b"cancelling"
    assert await everything(accepted.server, accepted.keys) == before


async def test_a_run_that_is_over_cannot_be_cancelled(accepted: Scene):
    await accepted.set(status="completed")
    before = await everything(accepted.server, accepted.keys)
    assert await accepted.cancel() == b"completed"
    assert await everything(accepted.server, accepted.keys) == before


async def test_a_cancel_between_attempts_ends_no_attempt_twice(accepted: Scene):
    await accepted.append(accepted.part(0, final=True))
    await accepted.cancel()
    assert len(await accepted.entries("raw")) == 1


# --- raw append -------------------------------------------------------------------------------------------------


async def test_frames_are_taken_in_their_order(accepted: Scene):
    assert await accepted.append(accepted.part(0, b"one")) == ["ok", 3]
    assert await accepted.append(accepted.part(1, b"two")) == ["ok", 6]
    run = accepted.run.encode()
    assert await accepted.entries("raw") == [{run: b"one"}, {run: b"two"}]


async def test_the_lag_is_what_the_normalizer_has_not_done(accepted: Scene):
    await accepted.client.hset(accepted.keys.lease(0, "normalizer"), mapping={"arrived": 10, "done": 4})
    assert await accepted.append(accepted.part(0, b"one")) == ["ok", 9]


async def test_the_same_frame_again_is_known_and_not_written(accepted: Scene):
    await accepted.append(accepted.part(0))
    assert await accepted.refused(accepted.part(0)) == ["already"]
    await accepted.append(accepted.part(1, final=True))
    assert await accepted.refused(accepted.part(1, final=True)) == ["already"]


async def test_a_frame_that_leaves_a_gap_or_comes_late_is_refused(accepted: Scene):
    assert await accepted.refused(accepted.part(1)) == ["frame 0"]
    for n in range(3):
        await accepted.append(accepted.part(n))
    assert await accepted.refused(accepted.part(4)) == ["frame 3"]
    assert await accepted.refused(accepted.part(1)) == ["frame 3"]


async def test_frames_of_two_writers_of_one_attempt_are_never_mixed(accepted: Scene):
    await accepted.append(accepted.part(0))
    assert await accepted.refused(accepted.part(0, writer="second")) == ["frame 1"]
    assert await accepted.refused(accepted.part(1, writer="second")) == ["writer first"]
    assert await accepted.append(accepted.part(1)) == ["ok", 8]
    await accepted.set(attempt=2, raw=0)
    assert await accepted.append(accepted.part(0, attempt=2, writer="second")) == ["ok", 12]
    assert await accepted.refused(accepted.part(1, attempt=2)) == ["writer second"]


async def test_an_attempt_that_is_not_the_present_one_is_refused(accepted: Scene):
    await accepted.set(attempt=2)
    assert await accepted.refused(accepted.part(0)) == ["attempt 2"]
    assert await accepted.refused(accepted.part(0, attempt=3)) == ["attempt 2"]
    assert await accepted.append(accepted.part(0, attempt=2)) == ["ok", 4]


async def test_nothing_follows_the_last_frame_of_an_attempt(accepted: Scene):
    await accepted.append(accepted.part(0, final=True))
    assert await accepted.refused(accepted.part(1)) == ["closed"]
    assert await accepted.refused(accepted.part(ANY_FRAME, final=True)) == ["closed"]


async def test_an_end_written_by_another_fits_after_any_frame(accepted: Scene):
    await accepted.append(accepted.part(0))
    assert await accepted.append(accepted.part(ANY_FRAME, final=True)) == ["ok", 8]
    assert await accepted.refused(accepted.part(1)) == ["closed"]
    await accepted.set(attempt=2, raw=0)
    assert await accepted.append(accepted.part(ANY_FRAME, attempt=2, final=True)) == ["ok", 12]


async def test_the_earlier_writer_of_a_job_is_told_that_another_took_it(accepted: Scene):
    await accepted.append(accepted.part(0))
    await accepted.set(job="of the provider")
    take = scripts.take_job(accepted.keys.run(accepted.run), attempt=1, writer="second")
    assert await run_script(accepted.server, take) == [1, b"of the provider", 1]
    assert await accepted.refused(accepted.part(1)) == ["taken"]
    assert await accepted.refused(accepted.part(2)) == ["taken"]
    assert await accepted.append(accepted.part(1, writer="second")) == ["ok", 8]


async def test_an_expired_or_ended_run_accepts_nothing(accepted: Scene):
    for status in ("cancelling", "failed", "completed"):
        await accepted.set(status=status)
        assert await accepted.refused(accepted.part(0)) == [status]
    assert await accepted.refused(accepted.part(0, run=accepted.names[1])) == ["gone"]


async def test_each_run_of_an_entry_is_judged_for_itself(accepted: Scene):
    good, over, gone = accepted.names[1:4]
    for run in (good, over):
        await accepted.accept(run)
    await accepted.client.hset(accepted.keys.run(over), "status", "failed")
    parts = [accepted.part(0, run=run) for run in (over, accepted.run, gone, good)]
    assert await accepted.append(*parts) == ["failed", "ok", "gone", "ok", 8]
    assert await accepted.entries("raw") == [{accepted.run.encode(): b"data", good.encode(): b"data"}]
    assert await accepted.client.hget(accepted.keys.run(over), "raw") == b"0"


async def test_any_number_of_runs_may_arrive_at_once(scene: Scene):
    runs = scene.names[: MAX_VALUES // 2 + 10]
    pipe = scene.client.pipeline(transaction=False)
    for run in runs:
        pipe.hset(scene.keys.run(run), mapping={"status": "open", "attempt": 1, "raw": 0})
        pipe.pexpire(scene.keys.run(run), TTL_MS)
    await pipe.execute()
    reply = await scene.append(*(scene.part(0, b"x", run=run) for run in runs))
    assert reply == ["ok"] * len(runs) + [len(runs)]
    entries = await scene.entries("raw")
    assert [run.decode() for entry in entries for run in entry] == runs
    assert len(entries) == 2


# --- tool result ------------------------------------------------------------------------------------------------


async def test_a_tool_result_enters_once_and_only_for_its_open_call(accepted: Scene):
    await accepted.set(**{call_field(3): 1})
    assert await accepted.tool_result(block=4) == 0
    assert await accepted.tool_result(attempt=2) == 0
    assert await accepted.tool_result() == 1
    assert await accepted.tool_result() == 0
    assert (await accepted.entries("events"))[1:] == [{accepted.run.encode(): b"result"}]
    assert await accepted.arrived("parser") == len(b"acceptedresult")


async def test_progress_enters_while_its_call_is_open_and_does_not_close_it(accepted: Scene):
    await accepted.set(**{call_field(3): 1})
    assert await accepted.tool_progress(block=4) == 0
    assert await accepted.tool_progress(attempt=2) == 0
    assert [await accepted.tool_progress(), await accepted.tool_progress(), await accepted.tool_result()] == [1, 1, 1]
    assert await accepted.tool_progress() == 0, "the result is in"
    run = accepted.run.encode()
    assert (await accepted.entries("events"))[1:] == [{run: b"progress"}, {run: b"progress"}, {run: b"result"}]
    assert await accepted.arrived("parser") == len(b"acceptedprogressprogressresult")


async def test_progress_of_a_cancelled_run_is_refused(accepted: Scene):
    await accepted.set(**{call_field(3): 1})
    await accepted.cancel()
    before = await everything(accepted.server, accepted.keys)
    assert await accepted.tool_progress() == 0
    assert await everything(accepted.server, accepted.keys) == before


async def test_a_tool_result_for_a_cancelled_run_is_refused(accepted: Scene):
    await accepted.set(**{call_field(3): 1})
    await accepted.cancel()
    before = await everything(accepted.server, accepted.keys)
    assert await accepted.tool_result() == 0
    assert await everything(accepted.server, accepted.keys) == before
