"""An owned partition: its logic, and the entries that it applied. No IO.

The logic's state in memory is a function of the entries after the low watermark and the checkpoints of runs that began
before it. `apply` processes new entries and keeps their outputs. `restore` and `replay` rebuild the previous owner's
state without outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.leases.lease import Lease
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.stream_reader import Entry, Unreadable, id_key
from tokenbus.bus.stage.checkpoints import OpenRuns, VoidInput, decode_saved
from tokenbus.bus.stage.logic import FinishesReplay, RunPosition, StageLogic
from tokenbus.bus.stage.lost_state import LostState
from tokenbus.bus.stage.prepared_commit import AppliedEntries, Poison, PreparedCommit
from tokenbus.bus.stage.quarantine import IsolatedTries, Quarantine
from tokenbus.errors.base import TokenbusError, public_reason

log = logging.getLogger(__name__)

ROUND_OUTPUTS = 400
"""A batch ends early once its entries have this many outputs, so that mostly one script can commit them."""


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
        self.finishes_replay = logic if isinstance(logic, FinishesReplay) else None
        """Asked once: the check of a protocol costs more than the work of a small batch."""
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
        self._void = VoidInput(self.state_key)
        self._quarantine = Quarantine(logic, self.runs, self._void, keys=keys, partition=number, topic=topic)
        self._lost_state = LostState(keys, number, group)
        self._published_open = -1
        """Number of open runs last written to the lease hash, for monitoring."""

    @property
    def replay_unfinished(self) -> bool:
        """See `FinishesReplay`."""
        return self.finishes_replay is not None and self.finishes_replay.replay_unfinished

    @property
    def watermark(self) -> str:
        """No entry up to this id is needed for a replay."""
        return self.runs.replay_from or self.offset

    def apply_and_build(self, entries: Sequence[Entry]) -> PreparedCommit:
        """`apply`, then `build_commit`."""
        return self.build_commit(self.apply(entries))

    def apply(self, entries: Sequence[Entry]) -> AppliedEntries:
        """Apply the entries, or the first of them that have many outputs; call `build_commit` before the next
        `apply`.
        """
        poison, ended, void, size = list[Poison](), set[str](), set[str](), 0
        for n, entry in enumerate(entries):
            if self.logic.outputs >= ROUND_OUTPUTS and n:
                entries = entries[:n]
                break
            size += self._apply(entry, poison, ended)
            if (found := self.unreadable) and found.entry[0] == entry[0]:
                poison += self._quarantine.fail_unreadable(found, void)
                size += self._consume(sum(found.sizes.values()))
                self.unreadable = None
        return AppliedEntries(entries, size, poison, ended, void)

    def build_commit(self, taken: AppliedEntries) -> PreparedCommit:
        """Build the commit of an applied batch. If the logic's `flush` raises, reload the partition."""
        commit = Commit(self.lease_key, self.stream)
        self.add_outputs(taken, commit)
        for run in taken.void:
            self._quarantine.write_void(run, commit)
        if failed := self.runs.write_due(commit, self.offset):
            taken.poison.extend(self._quarantine.fail_states(failed, self.offset, commit))
            self.logic.flush(commit)
        return self._finished(commit, taken.entries, taken.size, taken.poison)

    def quarantine(self, entry: Entry, reason: str) -> PreparedCommit:
        """Fail every run in this entry without decoding it. A replay skips the entry too."""
        commit = Commit(self.lease_key, self.stream)
        poison = self._quarantine.fail_entry(entry, reason, commit)
        self.offset = entry[0].decode()
        size = self._consume(sum(map(len, entry[1].values())))
        self.logic.flush(commit)
        return self._finished(commit, [entry], size, poison)

    def _finished(self, commit: Commit, entries: Sequence[Entry], size: int, poison: list[Poison]) -> PreparedCommit:
        if self.loads:
            commit.put(self.lease_key, "loads", 0)
        if len(self.runs) != self._published_open:
            self._published_open = len(self.runs)
            commit.put(self.lease_key, "open", self._published_open)
        self._void.drop_before(self.watermark, commit)
        return PreparedCommit(commit, entries, size, poison)

    # --- entries that are written together with their outputs (see chain.py) ----------------------------------------

    @property
    def can_run_ahead(self) -> bool:
        """Whether frames may be applied before they have an entry: nothing depends on its id or waits for a commit."""
        return not (self._void or self.unreadable or self.paused or self.runs.is_due)

    @property
    def replay_from(self) -> str:
        """The watermark; empty if nothing before the next entry is needed for a replay."""
        return self.runs.replay_from

    def apply_ahead(self, fields: dict[bytes, bytes]) -> AppliedEntries:
        """Apply the frames of an entry that will be written after all entries so far; the offset stays."""
        offset = self.offset
        ms, seq = id_key(offset)
        taken = self.apply([(f"{ms}-{seq + 1}".encode(), fields)])
        self.offset = offset
        return taken

    def add_outputs(self, taken: AppliedEntries, commit: Commit) -> None:
        """Add the outputs of an applied batch to a commit that is not finished."""
        self.logic.flush(commit)
        for run in taken.ended:
            self.runs.drop(run, commit)

    def finish_ahead(self, commit: Commit, entries: Sequence[Entry], size: int) -> PreparedCommit:
        """Finish such a commit, unless more is added to it."""
        return self._finished(commit, entries, size, [])

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
                    self._void.add(run, saved.at)
                else:
                    of_run = (pieces or {}).get(run, {})
                    self.runs.restore(run, saved, of_run, size=len(data), offset=self.offset)
            except Exception as e:  # written by another version, for example: affects this run only
                self._lost_state.unread_checkpoint(run, f"{type(e).__name__}: {e}")
                self.runs.not_restored(run, size=len(data))

    def replay(self, entries: Sequence[Entry]) -> None:
        """Apply entries that an earlier owner committed; drop their outputs."""
        for entry in entries:
            self._apply(entry, None, set())
        self.logic.discard_outputs()

    def skip_unreadable(self, found: Unreadable) -> None:
        """In a replay: skip an entry that an earlier owner committed and that is not fully readable now."""
        self.replay([found.entry])
        self._lost_state.unread_entry(found, self.runs, self._void)
        self._consume(sum(found.sizes.values()))

    def lose(self, runs: Iterable[str], reason: str) -> None:
        """Instead of a replay: the state of these runs is given up."""
        self._lost_state.lose(runs, reason)

    def give_up_input(self, run: str, until: str, reason: str) -> None:
        """Instead of a replay: the run's state is given up, and its input up to this entry is ignored."""
        log.error("%s: the state of run %s is given up: %s", self.lease_key, run, reason)
        self._lost_state.lose([run], reason)
        self._void.add(run, until)

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
        return self._lost_state.runs

    def fail_unreadable(self, positions: Mapping[str, RunPosition]) -> Commit | None:
        """Call after `finish_replay`: end the runs whose state is unreadable, using the positions from their hashes.

        None if there is no such run. The commit moves no offset. A run that the replay from the watermark restored
        completely continues.
        """
        commit = Commit(self.lease_key, self.stream)
        if not self._lost_state.end_runs(
            positions,
            commit,
            logic=self.logic,
            open_runs=self.runs,
            quarantine=self._quarantine,
            offset=self.offset,
        ):
            return None
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
            if not self.keys.may_hold(self.number, run):  # its keys are in another slot
                if poison is not None:
                    poison.append(Poison(run, entry_id, frame, "the run is not of this partition"))
                continue
            if poison is None and self.runs.covers(run, entry_id):
                continue  # in a replay: the run's checkpoint covers this entry
            if self._void.covers(run, entry_id):
                continue
            try:
                self.logic.apply(run, frame)
            except Exception as e:  # no exception from a poison frame may stop the partition
                reason = f"{type(e).__name__}: {e}"
                if not isinstance(e, TokenbusError):
                    log.exception("%s partition %d: entry %s, run %s", self.group, self.number, entry_id, run)
                self._quarantine.fail_frame(run, entry_id, public_reason(e, "the entry cannot be processed"))
                if poison is not None:
                    poison.append(Poison(run, entry_id, frame, reason))
            if self.logic.is_open(run):
                self.runs.changed(run, self.offset)
            elif self.runs.ended(run):
                ended.add(run)
        self.offset = entry_id
        return self._consume(size)

    def _consume(self, size: int) -> int:
        self.runs.consumed += size
        return size
