"""An owned partition: its logic, the entries it has applied, and the quarantine of entries it cannot apply. No IO.

The logic's state in memory is a function of the entries after the low watermark and the checkpoints of runs that began
before it. `apply` processes new entries and keeps their outputs. `restore` and `replay` rebuild the previous owner's
state without outputs.

The runs of a poison entry fail, so that the other runs of the partition continue. An entry whose processing crashes its
workers leaves no error behind. So a partition that did not commit in `CAREFUL_LOADS` loads is processed one entry at a
time. Each try is recorded in the lease hash before it begins (`IsolatedTries`). An entry with too many tries is skipped
without decoding it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import msgspec

from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.stream_reader import Entry, Unreadable, id_key
from tokenbus.bus.stage.checkpoints import OpenRuns, decode_saved
from tokenbus.bus.stage.logic import RunPosition, StageLogic
from tokenbus.errors import TokenbusError, public_reason
from tokenbus.events.error_info import ErrorInfo

log = logging.getLogger(__name__)

ROUND_OUTPUTS = 400
"""A batch ends early once its entries have this many outputs, so that mostly one script can commit them."""
CAREFUL_LOADS = 3
"""After more loads than this without a commit, process one entry at a time and record it before trying."""
MOST_ALONE = 2
"""Quarantine an entry after more isolated tries than this without a commit: processing it crashes its workers."""
TRIES_FIELD = "suspect"
"""The lease hash's field of `IsolatedTries`."""


class Poison(msgspec.Struct, frozen=True):
    """A frame that could not be applied."""

    run: str
    entry_id: str
    frame: bytes
    reason: str
    size: int | None = None
    """Size of the frame in bytes, if it could not be read."""
    cause: Exception | None = None
    """What was raised, if that is a defect."""


class AppliedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that the logic has applied. Its outputs are pending in the logic until they are in its commit."""

    begin: str
    """The offset before it."""
    entries: Sequence[Entry]
    commit: Commit
    size: int = 0
    """Total bytes of frames."""
    poison: list[Poison] = []
    ended: set[str] = set()
    """Runs whose checkpoint must be deleted."""
    void: set[str] = set()
    """Runs that ended because an entry could not be read."""


class IsolatedTries(msgspec.Struct, frozen=True):
    """The entry that was processed alone without reaching a commit, and how many tries it had."""

    entry_id: str = ""
    tries: int = 0

    @classmethod
    def parse(cls, stored: bytes | None) -> Self:
        """From the lease hash."""
        entry_id, _, tries = (stored or b"").decode(errors="replace").partition(" ")
        return cls(entry_id, int(tries) if tries.isdecimal() else 0)

    def stored(self) -> str:
        """For the lease hash."""
        return f"{self.entry_id} {self.tries}"

    def after(self, entry_id: str) -> IsolatedTries:
        """One more try, of this entry."""
        return IsolatedTries(entry_id, self.tries + 1 if entry_id == self.entry_id else 1)

    def refused(self) -> IsolatedTries:
        """The server refuses the entry's commit: it has no tries left."""
        return IsolatedTries(self.entry_id, MOST_ALONE + 1)

    @property
    def exhausted(self) -> bool:
        """Whether the entry must be quarantined."""
        return self.tries > MOST_ALONE


class Partition:
    """The partition of a lease. Call `restore`, `replay` from the watermark, `finish_replay`, then
    `apply_and_build`.
    """

    def __init__(self, lease: Lease, logic: StageLogic, *, keys: Keys, topic: InternalTopic, group: str) -> None:
        self.number = number = lease.partition
        self.token = lease.token
        self.stream = keys.topic(number, topic)
        self.lease_key = keys.lease(number, group)
        self.state_key = keys.state(number, group)
        self.group = group
        self.keys = keys = keys.within(number)
        self.logic = logic
        self.offset = lease.watermark
        """The last entry that was applied."""
        self.paused = False
        """Whether reading is paused because the next stage lags too far behind."""
        self.loads = 0
        """How often the partition was loaded since its last commit, including this time."""
        self.unreadable: Unreadable | None = None
        """The entry after the buffered ones, if it cannot be read."""
        self.isolated = IsolatedTries()
        """What earlier owners, or this one, tried alone."""
        self.runs = OpenRuns(logic, keys=keys, partition=number, group=group)
        self._topic: InternalTopic = topic
        self._unread: dict[str, str] = {}
        """Open run whose checkpoint could not be read -> reason. A replay from the watermark may restore it."""
        self._lost: dict[str, str] = {}
        """Run whose state a replay cannot rebuild -> reason."""
        self._published_open = -1
        """Number of open runs last written to the lease hash, for monitoring."""

    @property
    def watermark(self) -> str:
        """No entry up to this id is needed for a replay."""
        return self.runs.replay_from or self.offset

    # --- new entries ------------------------------------------------------------------------------------------------

    def apply_and_build(self, entries: Sequence[Entry]) -> AppliedBatch:
        """`apply`, then `build_commit`."""
        return self.build_commit(self.apply(entries))

    def apply(self, entries: Sequence[Entry]) -> AppliedBatch:
        """Apply the entries, or the first of them that have many outputs; call `build_commit` before the next
        `apply`. Raises ValueError if the first is not after the offset: it was applied before.
        """
        if entries and id_key(entries[0][0].decode()) <= id_key(self.offset):
            raise ValueError(f"{self.stream}: entry {entries[0][0].decode()} is not after {self.offset}")
        return self._apply_all(entries)

    def _apply_all(self, entries: Sequence[Entry]) -> AppliedBatch:
        begin, poison, ended, void, size = self.offset, list[Poison](), set[str](), set[str](), 0
        for n, entry in enumerate(entries):
            if self.logic.outputs >= ROUND_OUTPUTS and n:
                entries = entries[:n]
                break
            size += self._apply(entry, poison, ended)
            if (found := self.unreadable) and found.entry[0] == entry[0]:
                for name, unread in found.sizes.items():
                    run = name.decode(errors="replace")
                    poison.append(Poison(run, self.offset, b"", found.reason, unread))
                    if self._fail_and_void(run, "the entry cannot be read"):
                        void.add(run)
                size += self._consume(sum(found.sizes.values()))
                self.unreadable = None
        return AppliedBatch(
            begin=begin, entries=entries, commit=self._commit(), size=size, poison=poison, ended=ended, void=void
        )

    def build_commit(self, batch: AppliedBatch) -> AppliedBatch:
        """Build the commit of an applied batch. If the logic's `flush` raises, reload the partition."""
        commit = batch.commit
        self.add_outputs(batch, commit)
        for run in batch.void:
            self.runs.write_void(run, commit)
        if failed := self.runs.write_due(commit, self.offset):  # runs whose state cannot be checkpointed
            for run, reason in failed.items():
                log.error("%s: the state of run %s cannot be stored: %s", self._topic, run, reason)
                self._fail_and_void(run, "its state cannot be stored")
                self.runs.write_void(run, commit)
                batch.poison.append(Poison(run, self.offset, b"", f"its state cannot be stored: {reason}"))
            self.logic.flush(commit)
        self.finish_commit(commit)
        return batch

    def quarantine(self, entry: Entry, reason: str) -> AppliedBatch:
        """Fail every run in this entry without decoding it; decoding it crashed earlier workers. A replay skips the
        entry too.
        """
        begin, commit, poison = self.offset, self._commit(), list[Poison]()
        self.offset = entry[0].decode()
        for name, frame in entry[1].items():
            run = name.decode(errors="replace")
            poison.append(Poison(run, self.offset, frame, reason))
            if self._fail_and_void(run, reason):
                self.runs.write_void(run, commit)
        size = self._consume(sum(map(len, entry[1].values())))
        self.logic.flush(commit)
        self.finish_commit(commit)
        return AppliedBatch(begin=begin, entries=[entry], commit=commit, size=size, poison=poison)

    def add_outputs(self, batch: AppliedBatch, commit: Commit) -> None:
        """Add the outputs of an applied batch to a commit that is not finished."""
        self.logic.flush(commit)
        for run in batch.ended:
            self.runs.drop(run, commit)

    def finish_commit(self, commit: Commit) -> None:
        """Finish a commit, unless more is added to it."""
        if self.loads:
            commit.put(self.lease_key, "loads", 0)
        if len(self.runs) != self._published_open:
            self._published_open = len(self.runs)
            commit.put(self.lease_key, "open", self._published_open)
        self.runs.drop_ignored(self.watermark, commit)

    # --- entries that are written together with their outputs (see chain.py) ----------------------------------------

    @property
    def can_run_ahead(self) -> bool:
        """Whether frames may be applied before they have an entry: nothing depends on its id or waits for a commit."""
        return not (self.runs.any_ignored or self.unreadable or self.paused or self.runs.is_due)

    def apply_ahead(self, fields: dict[bytes, bytes]) -> AppliedBatch:
        """Apply the frames of an entry that will be written after all entries so far; the offset stays."""
        offset = self.offset
        ms, seq = id_key(offset)
        batch = self._apply_all([(f"{ms}-{seq + 1}".encode(), fields)])
        self.offset = offset
        return batch

    # --- state of the previous owner -----------------------------------------------------------------------------

    @staticmethod
    def pieces_of(checkpoints: Mapping[bytes, bytes]) -> Iterator[tuple[str, list[int]]]:
        """The pieces that `restore` needs in addition to the state hash, by run."""
        for name, data in checkpoints.items():
            try:
                pieces = decode_saved(data).pieces
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue  # `restore` reports it
            if pieces:
                yield name.decode(errors="replace"), pieces

    def restore(
        self, checkpoints: Mapping[bytes, bytes], pieces: Mapping[str, Mapping[int, bytes]] | None = None
    ) -> None:
        """Restore from the state hash on the server and the pieces of runs that have some."""
        for name, data in checkpoints.items():
            run = name.decode(errors="replace")
            try:
                saved = decode_saved(data)
                id_key(saved.at)  # every comparison with it would raise, for the whole partition
                if saved.state is None:
                    self.runs.ignore(run, saved.at)
                else:
                    of_run = (pieces or {}).get(run, {})
                    self.runs.restore(run, saved, of_run, size=len(data), offset=self.offset)
            except Exception as e:  # written by another version, for example: affects this run only
                self._unread[run] = f"{type(e).__name__}: {e}"
                self.runs.not_restored(run, size=len(data))

    def replay(self, entries: Sequence[Entry]) -> None:
        """Apply entries that an earlier owner committed; drop their outputs."""
        for entry in entries:
            self._apply(entry, None, set())
        self.logic.discard_outputs()

    def skip_unreadable(self, found: Unreadable) -> None:
        """In a replay: skip an entry that an earlier owner committed and that is not fully readable now.

        The runs concerned lose their state, unless their checkpoint covers the entry or the entry had already ended
        them.
        """
        self.replay([found.entry])
        for name in found.sizes:
            run = name.decode(errors="replace")
            if not self.runs.covers(run, self.offset) and not self.runs.ignores(run, self.offset):
                self._lost[run] = found.reason
        self._consume(sum(found.sizes.values()))

    def lose(self, runs: Iterable[str], reason: str) -> None:
        """Instead of a replay: the state of these runs is given up."""
        self._lost |= {run: reason for run in runs if self.keys.may_hold(self.number, run)}

    def give_up_input(self, run: str, until: str, reason: str) -> None:
        """Instead of a replay: the run's state is given up, and its input up to this entry is ignored."""
        log.error("%s: the state of run %s is given up: %s", self.lease_key, run, reason)
        self.lose([run], reason)
        self.runs.ignore(run, until)

    def skip(self, entry_id: str, fields: Mapping[bytes, object], reason: str) -> None:
        """Instead of a replay: give up the state of all runs of an entry that an earlier owner committed."""
        self.lose((name.decode(errors="replace") for name in fields), reason)
        self.offset = entry_id

    def finish_replay(self, offset: str) -> list[str]:
        """End the replay at the committed offset. Returns the open runs."""
        self.offset = offset
        return self.runs.finish_replay()

    @property
    def unread(self) -> list[str]:
        """Runs with an unreadable checkpoint or entry."""
        return [*self._unread, *self._lost]

    def fail_unreadable(self, positions: Mapping[str, RunPosition]) -> Commit | None:
        """Call after `finish_replay`: end the runs whose state is unreadable, using the positions from their hashes.

        None if there is no such run. The commit moves no offset. A run that the replay from the watermark restored
        completely continues.
        """
        failing = {run: why for run, why in self._unread.items() if not self.logic.is_open(run)} | self._lost
        if not failing:
            return None
        commit = self._commit()
        for run, reason in failing.items():
            log.error("%s partition %d: the state of run %s cannot be read: %s", self.group, self.number, run, reason)
            # The reason may be the text of any exception, and clients read the error.
            error = ErrorInfo(code="state_unreadable", kind="internal", message="the state of the run cannot be read")
            known = positions.get(run)
            if known and not known.over:
                self.logic.fail_unreadable(run, error, known)
            elif self.logic.is_open(run):
                self.logic.fail(run, error)
            self.runs.drop_unread(run, commit)
            if run in self._lost:
                self.runs.void(run, self.offset)
                self.runs.write_void(run, commit)
        self._unread, self._lost = {}, {}
        self.logic.flush(commit)
        return commit

    # --- one entry -------------------------------------------------------------------------------------------------

    def _apply(self, entry: Entry, poison: list[Poison] | None, ended: set[str]) -> int:
        """Apply one entry; return the size of its frames in bytes. ``poison``: None in a replay, where it is known
        already.

        ``ended`` collects the runs whose checkpoint must be deleted, even if they begin again in this batch.
        """
        entry_id, size = entry[0].decode(), 0
        for name, frame in entry[1].items():
            run = name.decode(errors="replace")
            size += len(frame)
            # That of a run which is open here was looked at before.
            if not self.logic.is_open(run) and not self.keys.may_hold(self.number, run):  # its keys are in another slot
                if poison is not None:
                    poison.append(Poison(run, entry_id, frame, "the run is not of this partition"))
                continue
            if poison is None and self.runs.covers(run, entry_id):
                continue  # in a replay: the run's checkpoint covers this entry
            if self.runs.ignores(run, entry_id):
                continue
            try:
                self.logic.apply(run, frame)
            except Exception as e:  # no exception from a poison frame may stop the partition
                reason = f"{type(e).__name__}: {e}"
                public = public_reason(e, "the entry cannot be processed")
                self.logic.fail(run, self._poison_error(entry_id, public))  # so does a replay, in the same way
                if poison is not None:
                    cause = None if isinstance(e, TokenbusError) else e
                    poison.append(Poison(run, entry_id, frame, reason, cause=cause))
            if self.logic.is_open(run):
                self.runs.changed(run, self.offset)
            elif self.runs.ended(run):
                ended.add(run)
        self.offset = entry_id
        return self._consume(size)

    def _fail_and_void(self, run: str, reason: str) -> bool:
        """Fail a run of the last entry, and ignore its input up to there. False: the run is not of this partition.

        ``reason``: clients read it.
        """
        if not self.keys.may_hold(self.number, run):
            return False
        self.logic.fail(run, self._poison_error(self.offset, reason))
        self.runs.void(run, self.offset)
        return True

    def _poison_error(self, entry_id: str, reason: str) -> ErrorInfo:
        return ErrorInfo(code="poison", kind="internal", message=reason, where=f"{self._topic} {entry_id}")

    def _commit(self) -> Commit:
        return Commit(self.lease_key, self.stream)

    def _consume(self, size: int) -> int:
        self.runs.consumed += size
        return size
