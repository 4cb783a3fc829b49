"""Two stages and the writer before them in one process: one script writes a flush and what both stages commit on it.

The frames are applied to both partitions first; then one script (scripts/chain.py) writes them together with what both
commit on them. Streams, offsets and outputs are what separate workers would have written, so that any worker can take
over. But the state is ahead of the log until the script accepts. If it does not, nothing was written: the partition is
rebuilt in both stages, and the frames take the long path, as an entry that the stages read. The rebuild takes new
tokens, so that a command that is still on its way writes nothing.

Runs of a partition are independent. So entries of other runs that came in between may be applied after the frames of
this flush, and are committed with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import msgspec
from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import holding
from tokenbus.bus.scripts import Commit, RawPart, ScriptCall
from tokenbus.bus.scripts.chain import MOST_LOAD, MOST_PARTS, MOST_UNREAD, ChainedStage, chain
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.bus.stage.partition import AppliedBatch, Partition
from tokenbus.bus.stage.stage import Stage

log = logging.getLogger(__name__)

TRIES = 3
"""How often a flush applies entries of others that came in between."""
BUSY_S = 0.03
"""A partition is busy while its flushes follow each other within this."""
REST_S = 0.06
"""How long a busy partition is not read after a flush. The flush's reply lists entries of others."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""How long a partition takes the long path after something that the short path does not do."""
_FLUSHES = count(1)


class Flush(msgspec.Struct, frozen=True, eq=False):
    """Frames of one partition."""

    partition: int
    parts: Sequence[RawPart]
    held: bool = False
    """Whether one of the runs is under policies; the reply then holds the policy stage's lag."""


class NotAhead(Exception):
    """A frame of the flush, or an entry that came in between, must be written before it is applied."""


class Side:
    """One stage's side of a flush."""

    def __init__(self, part: Partition) -> None:
        self.part = part
        self.begin = part.offset
        self.commit = Commit(part.lease_key, part.stream)
        self._seen = part.offset
        """The last entry that is applied, besides those of this flush."""
        self._between: list[Entry] = []
        self._ours: list[dict[bytes, bytes]] = []
        self._size = 0

    def apply_ours(self, fields: dict[bytes, bytes]) -> None:
        """Apply an entry that is not written yet. Raises NotAhead."""
        self._take(self.part.apply_ahead(fields))
        self._ours.append(fields)

    def apply_between(self, entries: Sequence[Entry]) -> None:
        """Apply entries that came in between. Raises NotAhead."""
        taken = self.part.apply(entries)
        if len(taken.entries) < len(entries):
            raise NotAhead
        self._take(taken)
        self._between += entries
        self._seen = self.part.offset

    def _take(self, taken: AppliedBatch) -> None:
        if taken.poison or taken.void or self.part.logic.replay_unfinished:
            raise NotAhead
        self.part.add_outputs(taken, self.commit)
        self._size += taken.size

    def for_script(self) -> ChainedStage:
        """This side as the script takes it."""
        self.part.finish_commit(self.commit)
        return ChainedStage(
            token=self.part.token,
            begin=self.begin,
            seen=self._seen,
            watermark=self.part.runs.replay_from,
            entries=len(self._between) + len(self._ours),
            size=self._size,
            commit=self.commit,
            mirror=self.part.group,
        )

    def written(self, offset: str) -> AppliedBatch:
        """The script accepted, and ``offset`` is the last entry of this stage's input: what was committed."""
        self.part.offset = offset
        entries = [*self._between, *((offset.encode(), fields) for fields in self._ours)]
        return AppliedBatch(begin=self.begin, entries=entries, commit=self.commit, size=self._size)


class AheadFlush:
    """A flush that both stages apply before it is written. No IO."""

    def __init__(self, flush: Flush, first: Partition, second: Partition) -> None:
        """Applies nothing yet. Both partitions must allow it (`can_run_ahead`)."""
        self.flush = flush
        self.first = Side(first)
        self.second = Side(second)
        self.began = time.perf_counter()
        self._runs = {part.run.encode() for part in flush.parts}
        self._name = f"{first.token}.{next(_FLUSHES)}"
        """No other flush of this partition has it: no other owner has the token."""
        self._handed_on = 0

    def apply(self) -> None:
        """Apply the frames. If it raises (NotAhead), rebuild both partitions."""
        self.first.apply_ours({part.run.encode(): part.data for part in self.flush.parts})
        self._hand_on()

    def take_in(self, reply: Sequence[Any]) -> None:
        """Apply what came in between, as the script's reply `unread` lists it, before the call is sent again.

        If it raises, rebuild both partitions; NotAhead if an entry is of a run of this flush.
        """
        of_first, of_second = ([(entry_id, _fields(flat)) for entry_id, flat in found] for found in reply[1:3])
        if len(of_first) >= MOST_UNREAD or len(of_second) >= MOST_UNREAD:
            raise NotAhead
        if any(not self._runs.isdisjoint(fields) for _, fields in (*of_first, *of_second)):
            raise NotAhead
        if of_first:
            self.first.apply_between(of_first)
        if of_second:  # they precede the first stage's new outputs
            self.second.apply_between(of_second)
        self._hand_on()

    def _hand_on(self) -> None:
        appended = self.first.commit.appended(self.second.part.stream)
        for fields in appended[self._handed_on :]:
            self.second.apply_ours(fields)
        self._handed_on = len(appended)
        if self.first.commit.load + self.second.commit.load > MOST_LOAD:
            raise NotAhead  # one script must not write that much

    def call(self, *, ttl_ms: int, entries_read: bool, topic_entries: int, policy_lease: str | None) -> ScriptCall:
        """The call that writes it. The same until `take_in`."""
        return chain(
            self.first.for_script(),
            self.second.for_script(),
            self.flush.parts,
            flush=self._name,
            ttl_ms=ttl_ms,
            entries_read=entries_read,
            topic_entries=topic_entries,
            policy_lease=policy_lease,
        )


def _fields(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


class Chain:
    """The short way of one worker. `write` flushes; the stages are opened and closed by their owner."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        first: Stage,
        second: Stage,
        *,
        on_commit: Callable[[Stage, int, float], object] = lambda stage, entries, seconds: None,
    ) -> None:
        """``first`` reads what is flushed, ``second`` what ``first`` writes. ``on_commit`` is called for each stage
        with how many entries a flush committed, and the seconds that took.
        """
        self._server = server
        self._keys = keys
        self._first = first
        self._second = second
        self._options = second.options
        self._on_commit = on_commit
        self._caught_up: dict[int, tuple[Partition, Partition]] = {}
        """Partitions of which both stages had applied all input after the last flush."""
        self._flushed_at: dict[int, float] = {}
        self._pauses: dict[int, tuple[float, float]] = {}
        """Partition -> until when it takes the long path, and how long that is."""
        self._closed = False

    def close(self) -> None:
        """From now on everything takes the long path."""
        self._closed = True

    async def write(self, flushes: Sequence[Flush]) -> list[list[Any] | None]:
        """Write the flushes that can take the short path. The result is None for each other one; nothing of it was
        written.

        A reply is that of `append_raw`. What is None must be written on the long path before the next flush of the run.
        In a Cluster all flushes must be of one partition.
        """
        replies = await self._write(flushes)
        for flush, reply in zip(flushes, replies, strict=True):
            if reply is None:
                self._first.rest(flush.partition, 0.0)
                self._second.rest(flush.partition, 0.0)
        return replies

    async def _write(self, flushes: Sequence[Flush]) -> list[list[Any] | None]:
        replies: list[list[Any] | None] = [None] * len(flushes)
        if self._closed:
            return replies
        possible = [i for i, flush in enumerate(flushes) if await self._is_possible(flush)]
        if not possible:
            return replies
        partition = flushes[possible[0]].partition
        async with holding(self._first.lock_of(partition)), holding(self._second.lock_of(partition)):
            ahead = {i: one for i in possible if (one := self._apply(flushes[i]))}
            try:
                for _ in range(TRIES):
                    if not ahead:
                        break
                    found = await self._send([*ahead.values()])
                    for (i, one), reply in zip([*ahead.items()], found, strict=True):
                        if await self._take(one, reply):
                            del ahead[i]
                            if reply[0] in (b"ok", b"already"):
                                replies[i] = [b"ok"] * len(one.flush.parts) + [0, *reply[3:]]
                    # What is left has taken in entries of others, and is sent again with them.
            except (RedisError, OSError) as e:
                log.warning("chained flush: %s", e)
                for one in ahead.values():
                    self._pause(one.flush.partition)
            finally:
                for one in ahead.values():
                    self._give_up(one)
        return replies

    async def _is_possible(self, flush: Flush) -> bool:
        """Whether both stages can take the flush, with all of their input applied."""
        number, now = flush.partition, asyncio.get_running_loop().time()
        parts = self._parts(number)
        paused = self._pauses.get(number, (0.0, 0.0))[0] > now
        once = len({part.run for part in flush.parts}) == len(flush.parts) <= MOST_PARTS
        if parts is None or paused or not once:
            self._caught_up.pop(number, None)
            return False
        if self._caught_up.get(number) != parts:
            self._caught_up.pop(number, None)
            try:
                if not (await self._first.catch_up(number) and await self._second.catch_up(number)):
                    return False
            except (RedisError, OSError) as e:
                log.debug("partition %d is not caught up with: %s", number, e)
                return False
            if self._parts(number) != parts:
                return False
        # From here on a flush that takes the long path leaves unread input.
        return self._caught_up.setdefault(number, parts) == parts

    def _parts(self, number: int) -> tuple[Partition, Partition] | None:
        first, second = self._first.ready_part(number), self._second.ready_part(number)
        return (first, second) if first and second and first.can_run_ahead and second.can_run_ahead else None

    def _apply(self, flush: Flush) -> AheadFlush | None:
        parts = self._parts(flush.partition)
        if parts is None or self._caught_up.get(flush.partition) != parts:
            self._caught_up.pop(flush.partition, None)
            return None
        one = AheadFlush(flush, *parts)
        if self._has_applied(flush.partition, one.apply):
            return one
        self._pause(flush.partition)
        self._give_up(one)
        return None

    def _has_applied(self, number: int, apply: Callable[[], None]) -> bool:
        """Apply entries to both stages; False if they cannot be applied ahead of the log, or if a logic raises."""
        try:
            apply()
        except NotAhead:
            pass
        except Exception:
            log.exception("partition %d: a chained flush failed", number)
        else:
            return True
        return False

    async def _send(self, ahead: Sequence[AheadFlush]) -> list[list[Any]]:
        calls = [
            one.call(
                ttl_ms=round(self._options.lease_s * 1000),
                entries_read=self._options.entries_read,
                topic_entries=self._options.topic_entries,
                policy_lease=self._keys.lease(one.flush.partition, "policy") if one.flush.held else None,
            )
            for one in ahead
        ]
        return await retry_until_available(
            self._server, lambda: run_scripts(self._server, calls), what="chained flush", stop_if=lambda: self._closed
        )

    async def _take(self, one: AheadFlush, reply: list[Any]) -> bool:
        """Take the script's reply; False: the flush has to be sent again."""
        number, verdict = one.flush.partition, reply[0]
        if verdict in (b"ok", b"already"):
            seconds = time.perf_counter() - one.began
            for (stage, side), offset in zip(self._sides(one), reply[1:3], strict=True):
                batch = side.written(offset.decode())
                await stage.committed(side.part, batch, [b"ok", offset])
                self._on_commit(stage, len(batch.entries), seconds)
            self._rest(one)
            return True
        if verdict == b"unread":
            if self._has_applied(number, partial(one.take_in, reply)):
                return False
        elif verdict in (b"fenced", b"moved"):
            for (stage, side), found in zip(self._sides(one), reply[1:], strict=True):
                if found.decode() != (side.part.token if verdict == b"fenced" else side.begin):
                    await stage.committed(side.part, side.written(side.begin), [verdict, found])
        elif verdict in (b"misfit", b"full"):
            self._pause(number)
        self._give_up(one)
        return True

    def _give_up(self, one: AheadFlush) -> None:
        """Nothing was written, or it is unknown whether it was: start again from the state on the server."""
        self._caught_up.pop(one.flush.partition, None)
        for stage, side in self._sides(one):
            stage.reload(side.part)

    def _sides(self, one: AheadFlush) -> tuple[tuple[Stage, Side], tuple[Stage, Side]]:
        return (self._first, one.first), (self._second, one.second)

    def _pause(self, number: int) -> None:
        now = asyncio.get_running_loop().time()
        until, before = self._pauses.get(number, (0.0, 0.0))
        pause = min(2 * before, LONGEST_PAUSE_S) if before and now < until + before else FIRST_PAUSE_S
        self._pauses[number] = now + pause, pause

    def _rest(self, one: AheadFlush) -> None:
        """While a partition is busy, its own writes wake no reader."""
        number, now = one.flush.partition, asyncio.get_running_loop().time()
        if now - self._flushed_at.get(number, 0.0) < BUSY_S and not any(part.final for part in one.flush.parts):
            self._first.rest(number, REST_S)
            self._second.rest(number, REST_S)
        self._flushed_at[number] = now
