"""Who acts in the model, one step at a time: stage workers, provider attempts and tool calls, on the real scripts.

Each keeps in memory what its counterpart in the services keeps, and can be left standing at any step: what then wakes
up again is a zombie.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import redis
from redis.exceptions import NoScriptError

from tests.model.story import frames_of
from tokenbus.bus import scripts
from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.run_record import RunLifetimes
from tokenbus.bus.scripts import RawPart, ScriptCall
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.bus.stage.chain import AheadFlush, Flush, NotAhead
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.bus.stage.partition import Partition
from tokenbus.events.frames import ANY_FRAME, Lost, RawFrame, ToolWork, TurnWork, encode
from tokenbus_services.parser.logic import ParserLogic

TTL_MS = 600_000
"""Nothing expires by itself: the model says when time has passed."""
_numbers = count(1)
"""Of writers. Each puts its own into its frames, in place of the time."""


class Wire:
    """The server, asked one thing at a time."""

    def __init__(self, url: str) -> None:
        self.redis: Any = redis.Redis.from_url(url, protocol=2)

    def run(self, call: ScriptCall) -> Any:
        try:
            return self.redis.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
        except NoScriptError:
            return self.redis.execute_command("EVAL", call.script.text, len(call.keys), *call.keys, *call.args)


class StageWorker:
    """One worker of an ordered stage on partition 0, as `tokenbus.bus.stage.stage` works it."""

    def __init__(
        self, wire: Wire, keys: Keys, *, name: str, group: str, topic: InternalTopic, logic: Callable[[], StageLogic]
    ) -> None:
        self.name = name
        self.part: Partition | None = None
        self.pending: ScriptCall | None = None
        """A commit that is not answered yet."""
        self._wire = wire
        self._keys = keys
        self._group = group
        self._topic: InternalTopic = topic
        self._logic = logic

    def take(self) -> Partition | None:
        """Ask for the lease, and rebuild the partition's state; the caller settles its numbers with `recall`."""
        lease, stream = self._keys.lease(0, self._group), self._keys.topic(0, self._topic)
        call = scripts.acquire(lease, stream, owner=self.name, ttl_ms=TTL_MS, mirror=self._group)
        token, offset, watermark = self._wire.run(call)[:3]
        if not token:
            return None
        held = Lease(0, token.decode(), offset.decode(), watermark.decode())
        part = Partition(held, self._logic(), keys=self._keys, topic=self._topic, group=self._group)
        part.restore(self._wire.redis.hgetall(part.state_key))
        if held.offset != held.watermark:
            part.replay(self._wire.redis.xrange(stream, f"({held.watermark}", held.offset))
        part.finish_replay(held.offset)
        self.part, self.pending = part, None
        return part

    def recall(self, runs: list[str]) -> None:
        """What the runs' hashes know better than a replay."""
        assert self.part
        for run in runs:
            if seq := self._wire.redis.hget(self._keys.run(run), "seq"):
                self.part.logic.recall(run, int(seq))

    def prepare(self, count: int) -> bool:
        """Read this many entries and apply them; the commit waits in `pending`."""
        assert self.part
        begin = self.part.offset
        entries: list[Entry] = self._wire.redis.xrange(self.part.stream, f"({begin}", count=count)
        if not entries:
            return False
        work = self.part.apply_and_build(entries)
        self.pending = work.commit.call(
            token=self.part.token,
            ttl_ms=TTL_MS,
            begin=begin,
            end=self.part.offset,
            watermark=self.part.watermark,
            entries=len(entries),
            size=work.size,
            mirror=self._group,
            entries_read=True,
            topic_entries=10_000,
        )
        return True

    def send(self, *, reply_lost: bool) -> str:
        """Send the commit and return the verdict. Without a reply the worker sends it again."""
        assert self.pending
        reply = self._wire.run(self.pending)
        verdict: str = reply[0].decode()
        if not reply_lost:
            self.pending = None
            if verdict not in ("ok", "already"):
                self.part = None
        return verdict

    def crash(self) -> None:
        """All that it remembers is gone."""
        self.part = self.pending = None


def parsers(wire: Wire, keys: Keys) -> dict[str, StageWorker]:
    """Two parsers of partition 0, of which one may be a zombie, and one that ends what they left."""
    life = RunLifetimes(TTL_MS, TTL_MS, TTL_MS)
    return {
        name: StageWorker(
            wire,
            keys,
            name=name,
            group="parser",
            topic="events",
            logic=lambda: ParserLogic(0, keys, topics=("visible", "chunks", "blocks"), lifetimes=life),
        )
        for name in ("first", "second", "last")
    }


class ChainedWorker:
    """A process with both stages, which writes frames the short way, as `tokenbus.bus.stage.chain` does."""

    def __init__(self, wire: Wire, first: StageWorker, second: StageWorker) -> None:
        self.pending: tuple[AheadFlush, Attempt] | None = None
        """A flush that both stages have applied, and whose script is not answered yet."""
        self._wire = wire
        self._stages = first, second

    @property
    def idle(self) -> bool:
        """Whether both stages could take a flush now."""
        parts = [stage.part for stage in self._stages]
        free = all(part and part.can_run_ahead for part in parts) and not any(s.pending for s in self._stages)
        return free and self.pending is None

    def owns(self, redis: Any, keys: Keys) -> bool:
        """Whether both leases are this worker's."""
        leases = [redis.hget(keys.lease(0, group), "token").decode() for group in ("normalizer", "parser")]
        return leases == [stage.part.token for stage in self._stages if stage.part]

    def prepare(self, attempt: Attempt) -> None:
        """Apply the attempt's next frame in both stages; the script waits in `pending`."""
        first, second = (stage.part for stage in self._stages)
        assert first
        assert second
        ahead = AheadFlush(Flush(0, [attempt.next_part()]), first, second)
        self.pending = ahead, attempt
        try:
            ahead.apply()
        except NotAhead:
            self.crash()

    def send(self, *, reply_lost: bool) -> str:
        """Send the script; what comes of it for the worker and its attempt. The verdict."""
        assert self.pending
        ahead, attempt = self.pending
        call = ahead.call(ttl_ms=TTL_MS, entries_read=True, topic_entries=10_000, policy_lease=None)
        reply = self._wire.run(call)
        verdict: str = reply[0].decode()
        if reply_lost:
            return verdict
        if verdict in ("ok", "already"):
            ahead.first.written(reply[1].decode())
            ahead.second.written(reply[2].decode())
            attempt.chained()
            self.pending = None
            return verdict
        if verdict == "unread":
            try:
                ahead.take_in(reply)
            except NotAhead:
                self.crash()
            return verdict
        self.crash()
        return verdict

    def crash(self) -> None:
        """Both stages are rebuilt; the frame goes the long way, some time."""
        if self.pending:
            for stage in self._stages:
                stage.crash()
        self.pending = None


class Attempt:
    """One worker's try at a turn: its frames, one after the other."""

    def __init__(self, wire: Wire, keys: Keys, consumer: str, entry_id: str, work: TurnWork) -> None:
        self.consumer = consumer
        self.entry_id = entry_id
        self.work = work
        self._wire = wire
        self._keys = keys
        self._number = next(_numbers)
        self._name = f"writer {self._number}"
        self._frames = frames_of(work.turn)
        self._next = 0

    def write(self, *, reply_lost: bool = False) -> bool:
        """Write the next frame; whether the attempt is over for this worker."""
        verdict = self._append(self._next, self._frame(), final=self._next == len(self._frames) - 1)
        if reply_lost:
            return False
        if verdict not in ("ok", "already"):
            if verdict.startswith(("frame", "writer")):
                self.lose()
            return True
        self._next += 1
        return self._next == len(self._frames)

    @property
    def over(self) -> bool:
        """Whether all frames are written."""
        return self._next == len(self._frames)

    def next_part(self) -> RawPart:
        """The next frame, for the short way."""
        return self._part(self._next, self._frame(), final=self._next == len(self._frames) - 1)

    def chained(self) -> None:
        """The next frame was written the short way."""
        self._next += 1

    def lose(self) -> None:
        """End the attempt as lost."""
        self._append(ANY_FRAME, RawFrame(self.work.turn, self.work.attempt, ANY_FRAME, 0, [Lost("lost")]), final=True)

    def finish(self) -> None:
        """The item is done, if it is still this worker's."""
        stream = self._keys.topic(0, "turns")
        self._wire.run(scripts.finish(stream, group="fetcher", consumer=self.consumer, ids=[self.entry_id]))

    def again(self, consumer: str) -> Attempt:
        """The same item in another worker's hands."""
        return Attempt(self._wire, self._keys, consumer, self.entry_id, self.work)

    def _frame(self) -> RawFrame:
        return RawFrame(self.work.turn, self.work.attempt, self._next, self._number, self._frames[self._next])

    def _part(self, n: int, frame: RawFrame, *, final: bool) -> RawPart:
        run = self.work.run
        return RawPart(run, self._keys.run(run), self.work.attempt, n, final, encode(frame), self._name)

    def _append(self, n: int, frame: RawFrame, *, final: bool) -> str:
        keys, part = self._keys, self._part(n, frame, final=final)
        reply = self._wire.run(scripts.append_raw(keys.topic(0, "raw"), keys.lease(0, "normalizer"), [part]))
        return reply[0].decode()


class ToolCall:
    """One call in an executor's hands."""

    def __init__(self, wire: Wire, keys: Keys, entry_id: str, work: ToolWork) -> None:
        self.work = work
        self._entry_id = entry_id
        self._wire = wire
        self._keys = keys

    def hand_in(self, frame: msgspec.Raw | bytes) -> int:
        """Send the result, for the first time or again; return whether it was accepted."""
        keys, work = self._keys, self.work
        return self._wire.run(
            scripts.tool_result(
                keys.run(work.run),
                keys.topic(0, "events"),
                keys.lease(0, "parser"),
                run=work.run,
                block=work.block,
                attempt=work.attempt,
                frame=bytes(frame),
            )
        )
