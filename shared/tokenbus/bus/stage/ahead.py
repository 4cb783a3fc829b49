"""A flush that two stages apply before it is written. No IO.

The frames are applied to both partitions first; then one script (scripts/chain.py) writes them together with what both
commit on them. If the script refuses, both partitions are ahead of their logs and must be rebuilt.

Runs of a partition are independent. So entries of other runs that came in between may be applied after the frames of
this flush, and are committed with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from tokenbus.bus.scripts import Commit, RawPart, ScriptCall
from tokenbus.bus.scripts.chain import MOST_UNREAD, ChainedStage, chain
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.bus.stage.partition import Partition
from tokenbus.bus.stage.prepared_commit import AppliedEntries, PreparedCommit

_FLUSHES = count(1)


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

    def _take(self, taken: AppliedEntries) -> None:
        if taken.poison or taken.void or self.part.replay_unfinished:
            raise NotAhead
        self.part.add_outputs(taken, self.commit)
        self._size += taken.size

    def for_script(self) -> ChainedStage:
        """This side as the script takes it."""
        self.part.finish_ahead(self.commit, (), 0)
        return ChainedStage(
            token=self.part.token,
            begin=self.begin,
            seen=self._seen,
            watermark=self.part.replay_from,
            entries=len(self._between) + len(self._ours),
            size=self._size,
            commit=self.commit,
            mirror=self.part.group,
        )

    def written(self, offset: str) -> PreparedCommit:
        """The script accepted, and ``offset`` is the last entry of this stage's input: what was committed."""
        self.part.offset = offset
        entries = [*self._between, *((offset.encode(), fields) for fields in self._ours)]
        return PreparedCommit(self.commit, entries, self._size, [])


class AheadFlush:
    """Frames of one partition, applied by both stages and not written yet."""

    def __init__(self, first: Partition, second: Partition, parts: Sequence[RawPart]) -> None:
        """Applies nothing yet. Both partitions must allow it (`can_run_ahead`)."""
        self.first = Side(first)
        self.second = Side(second)
        self.parts = parts
        self._runs = {part.run.encode() for part in parts}
        self._name = f"{first.token}.{next(_FLUSHES)}"
        """No other flush of this partition has it: no other owner has the token."""
        self._handed_on = 0

    def apply(self) -> None:
        """Apply the frames. If it raises (NotAhead), rebuild both partitions."""
        self.first.apply_ours({part.run.encode(): part.data for part in self.parts})
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
        if self.first.commit.is_large or self.second.commit.is_large:
            raise NotAhead  # it has to be written in parts

    def call(self, *, ttl_ms: int, entries_read: bool, topic_entries: int, policy_lease: str | None) -> ScriptCall:
        """The call that writes it. The same until `take_in`."""
        return chain(
            self.first.for_script(),
            self.second.for_script(),
            self.parts,
            flush=self._name,
            ttl_ms=ttl_ms,
            entries_read=entries_read,
            topic_entries=topic_entries,
            policy_lease=policy_lease,
        )


def _fields(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
