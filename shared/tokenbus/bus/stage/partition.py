"""An owned partition: its logic, and the offset from which each open run must be replayed. No IO.

The logic's state in memory is a function of the entries after the low watermark and the checkpoints of runs that began
before it. `apply` processes new entries and keeps their outputs. `restore` and `replay` rebuild the previous owner's
state without outputs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.stream_reader import Entry, Unreadable, id_key
from tokenbus.events.error_info import ErrorInfo

log = logging.getLogger(__name__)

CHECKPOINT_SPAN = 2 * 2**20
"""Checkpoint an open run after this many bytes of input."""
MAX_CHECKPOINT_SPAN = 8 * 2**20
"""Upper limit of that span if there is more state to checkpoint; keeps a replay under a second."""
CHECKPOINT_BYTES = 2**20
"""Approximate limit of checkpoint bytes in one commit; further runs wait for the next commit."""
PIECES_TTL_MS = 7 * 86_400_000
"""TTL of a checkpoint's pieces, renewed by each checkpoint. The end of the run deletes them; the TTL covers runs that
never end.
"""


class StageLogic(Protocol):
    """Processes the entries of one partition: pure, deterministic, no clock.

    A replay may start in the middle of a run that ended before the committed offset. If the remaining frames of such a
    run open it again, its last frame must close it.
    """

    def apply(self, run: str, frame: bytes) -> None:
        """Apply one frame of a run to the state and the outputs. If it raises, `fail` follows."""
        ...

    def fail(self, run: str, error: ErrorInfo) -> None:
        """End the run because its frame was poison. Must not raise."""
        ...

    def abandon(self, run: str, error: ErrorInfo) -> None:
        """End this open run: the server lost outputs of it that others may have seen. Must not raise."""
        ...

    def is_open(self, run: str) -> bool:
        """Whether the logic holds state of the run, so that a replay must start before it."""
        ...

    def flush(self, commit: Commit) -> None:
        """Add the outputs since the last `flush` or `discard_outputs` to the commit."""
        ...

    def discard_outputs(self) -> None:
        """Drop the pending outputs: an earlier owner committed them."""
        ...

    def snapshot(self, run: str) -> bytes:
        """Serialize the state of an open run."""
        ...

    def restore(self, run: str, state: bytes) -> None:
        """Restore the state that `snapshot` returned."""
        ...

    def recall(self, run: str, seq: int) -> None:
        """Set the run's next ``seq`` at the committed offset, as read from its hash; a replay cannot derive it."""
        ...


@runtime_checkable
class FinishesReplay(Protocol):
    """Logic whose outputs may depend on work outside the bus, such as storing images."""

    @property
    def replay_unfinished(self) -> bool:
        """Whether frames applied since the last `flush` or `discard_outputs` need such work."""
        ...

    async def finish_replay(self) -> None:
        """Do that work. The stage calls it between `apply` and `flush`, and never in a replay.

        It must be idempotent, because a crash may repeat it, and take bounded time, because the whole partition waits
        for it. A failure becomes part of the outputs. Must not raise.
        """
        ...


class Snapshot(Protocol):
    """Checkpoint that is split into pieces."""

    @property
    def head(self) -> bytes:
        """The part that is rewritten by every checkpoint."""
        ...

    @property
    def needs(self) -> list[int]:
        """Numbers of all pieces of this checkpoint."""
        ...

    @property
    def new(self) -> Mapping[int, bytes]:
        """Pieces that earlier checkpoints did not write, by number."""
        ...


@runtime_checkable
class InPieces(Protocol):
    """Logic whose runs may grow large: each checkpoint writes only the new pieces, by number."""

    def snapshot_in_pieces(self, run: str) -> Snapshot | None:
        """Checkpoint of an open run with the pieces added since the last call; None if it is small: use `snapshot`."""
        ...

    def restore_from_pieces(self, run: str, head: bytes, pieces: Mapping[int, bytes]) -> None:
        """Restore the state from `snapshot_in_pieces`."""
        ...


class RunPosition(msgspec.Struct, frozen=True):
    """Position of an open run, read from its hash."""

    turn: int
    attempt: int
    seq: int
    over: bool = False


@runtime_checkable
class RepeatsOutputs(Protocol):
    """Logic whose outputs in shared streams others wait for: the end of a run, above all."""

    def repeat(self, lost: Commit, runs: Collection[str], commit: Commit) -> None:
        """Add to ``commit`` what the lost one wrote about these runs to such streams. Must not raise."""
        ...


@runtime_checkable
class LearnsFromLog(Protocol):
    """Logic that uses the run's log to end an unreadable run more cleanly."""

    def learn(self, run: str, event: bytes) -> None:
        """Process one event from the log of a run that `fail_unreadable` will end, in log order. Must not raise."""
        ...


@runtime_checkable
class FailsUnreadable(Protocol):
    """Logic that can end a run without having its state."""

    def fail_unreadable(self, run: str, error: ErrorInfo, standing: RunPosition) -> None:
        """End this open run, whose state is lost, in ``error``. Any state still held for it is invalid. Must not
        raise.
        """
        ...


class _Saved(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint as stored in the state hash."""

    at: str
    """The last entry that the checkpoint covers."""
    state: bytes | None
    """None: ignore the run's entries up to ``at``."""
    pieces: list[int] | None = None
    """Numbers of its pieces, if any. A version without support for pieces must fail to decode this field."""

    def encoded(self) -> bytes:
        fields = (self.at, self.state) if self.pieces is None else (self.at, self.state, self.pieces)
        return msgspec.msgpack.encode(fields)


class Poison(msgspec.Struct, frozen=True):
    """A frame that could not be applied."""

    run: str
    entry_id: str
    frame: bytes
    reason: str
    size: int | None = None
    """Size of the frame in bytes, if it could not be read."""


class AppliedEntries(msgspec.Struct, frozen=True):
    """A batch that the logic has applied; its outputs are still pending in the logic."""

    entries: Sequence[Entry]
    size: int
    """Total bytes of frames."""
    poison: list[Poison]
    ended: set[str]
    """Runs whose checkpoint must be deleted."""
    void: set[str]
    """Runs that ended because an entry could not be read."""


class PreparedCommit(msgspec.Struct, frozen=True):
    """The commit of a batch and its poison frames."""

    commit: Commit
    entries: Sequence[Entry]
    size: int
    """Total bytes of frames."""
    poison: list[Poison]

    @property
    def memory_bytes(self) -> int:
        """Approximate memory use in bytes."""
        return self.size + self.commit.held


class Partition:
    """The partition of a lease. Call `restore`, `replay` from the watermark, `finish_replay`, then
    `apply_and_build`.
    """

    def __init__(self, lease: Lease, logic: StageLogic, *, keys: Keys, topic: InternalTopic, group: str) -> None:
        self.number = lease.partition
        self.token = lease.token
        self.stream = keys.topic(self.number, topic)
        self.lease_key = keys.lease(self.number, group)
        self.state_key = keys.state(self.number, group)
        self.group = group
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
        self.quarantined: tuple[str, int] = ("", 0)
        """The entry that earlier owners processed alone without reaching a commit, and how many tries it had."""
        self._keys = keys.within(self.number)
        self._topic: InternalTopic = topic
        self._consumed = 0
        self._since: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Open run -> (offset after which its entries must be replayed, bytes consumed by then), oldest first."""
        self._saved: dict[str, int] = {}
        """Run -> size of its checkpoint in bytes, without pieces."""
        self._unread: dict[str, str] = {}
        """Open run whose checkpoint could not be read -> reason."""
        self._lost: dict[str, str] = {}
        """Run with an entry that the replay could not read -> reason."""
        self._pieces: dict[str, set[int]] = {}
        """Run -> numbers of its checkpoint's pieces."""
        self._changed: set[str] = set()
        """Open runs that changed since their last checkpoint."""
        self._published_open = -1
        """Number of open runs last written to the lease hash, for monitoring."""
        self._void: dict[str, str] = {}
        """Run -> entry up to which its input is ignored, because the run was ended without applying it."""

    @property
    def replay_unfinished(self) -> bool:
        """See `FinishesReplay`."""
        return self.finishes_replay is not None and self.finishes_replay.replay_unfinished

    @property
    def watermark(self) -> str:
        """No entry up to this id is needed for a replay."""
        return next(iter(self._since.values()))[0] if self._since else self.offset

    def apply_and_build(self, entries: Sequence[Entry]) -> PreparedCommit:
        """`apply`, then `build_commit`."""
        return self.build_commit(self.apply(entries))

    def apply(self, entries: Sequence[Entry]) -> AppliedEntries:
        """Apply the entries; call `build_commit` before the next `apply`."""
        poison, ended, void, size = list[Poison](), set[str](), set[str](), 0
        for entry in entries:
            size += self._apply(entry, poison, ended)
            if self.unreadable and self.unreadable.entry[0] == entry[0]:
                size += self._apply_unreadable(self.unreadable, poison, void)
                self.unreadable = None
        return AppliedEntries(entries, size, poison, ended, void)

    def _apply_unreadable(self, found: Unreadable, poison: list[Poison], void: set[str]) -> int:
        """End the runs of the entry's unreadable fields; return the size of those fields in bytes."""
        entry_id = found.entry[0].decode()
        for name, size in found.sizes.items():
            run = name.decode(errors="replace")
            poison.append(Poison(run, entry_id, b"", found.reason, size))
            if self._keys.may_hold(self.number, run):
                self._void_run(run, entry_id, found.reason)
                void.add(run)
        size = sum(found.sizes.values())
        self._consumed += size
        return size

    def build_commit(self, taken: AppliedEntries) -> PreparedCommit:
        """Build the commit of an applied batch. If the logic's `flush` or `snapshot` raises, reload the partition."""
        commit = Commit(self.lease_key, self.stream)
        self.logic.flush(commit)
        for run in taken.ended:
            commit.drop(self.state_key, run)
            self._drop_pieces(run, commit)
        for run in taken.void:
            self._write_void(run, commit)
        self._checkpoint(commit)
        return self._finished(commit, taken.entries, taken.size, taken.poison)

    # --- entries that are written together with their outputs (see chain.py) ----------------------------------------

    @property
    def can_run_ahead(self) -> bool:
        """Whether frames may be applied before they have an entry: nothing depends on its id or waits for a commit."""
        return not (self._void or self.unreadable or self.paused or self._checkpoint_due)

    @property
    def replay_from(self) -> str:
        """The watermark; empty if nothing before the next entry is needed for a replay."""
        return next(iter(self._since.values()))[0] if self._since else ""

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
            commit.drop(self.state_key, run)
            self._drop_pieces(run, commit)

    def finish_ahead(self, commit: Commit, entries: Sequence[Entry], size: int) -> PreparedCommit:
        """Finish such a commit, unless more is added to it."""
        return self._finished(commit, entries, size, [])

    def quarantine(self, entry: Entry, reason: str) -> PreparedCommit:
        """Fail every run in this entry without decoding it; decoding it crashed earlier workers.

        A replay skips the entry too, so these runs are void up to it.
        """
        entry_id, size, poison = entry[0].decode(), 0, list[Poison]()
        commit = Commit(self.lease_key, self.stream)
        for name, frame in entry[1].items():
            run = name.decode(errors="replace")
            size += len(frame)
            poison.append(Poison(run, entry_id, frame, reason))
            if self._keys.may_hold(self.number, run):
                self._void_run(run, entry_id, reason)
                self._write_void(run, commit)
        self.offset = entry_id
        self._consumed += size
        self.logic.flush(commit)
        return self._finished(commit, [entry], size, poison)

    def _void_run(self, run: str, entry_id: str, reason: str) -> None:
        """Fail the run; a replay ignores its input up to this entry."""
        self.logic.fail(run, self._poisoned(entry_id, reason))
        self._forget(run, entry_id)

    def _forget(self, run: str, until: str) -> None:
        self._since.pop(run, None)
        self._changed.discard(run)
        self._saved.pop(run, None)
        self._void[run] = until

    def _write_void(self, run: str, commit: Commit) -> None:
        self._drop_pieces(run, commit)
        commit.put(self.state_key, run, _Saved(self._void[run], None).encoded())

    def _finished(self, commit: Commit, entries: Sequence[Entry], size: int, poison: list[Poison]) -> PreparedCommit:
        if self.loads:
            commit.put(self.lease_key, "loads", 0)
        if len(self._since) != self._published_open:
            self._published_open = len(self._since)
            commit.put(self.lease_key, "open", self._published_open)
        for run in [run for run, until in self._void.items() if id_key(until) <= id_key(self.watermark)]:
            commit.drop(self.state_key, run)
            del self._void[run]
        return PreparedCommit(commit, entries, size, poison)

    def recover_rollback(self, lost: Sequence[PreparedCommit], error: ErrorInfo) -> Commit | None:
        """Repair a fail-over that rolled the server back to this offset; None if no public event was lost.

        The commit moves no offset. For each affected run it publishes the lost events again, so that the log has no
        gap, repeats what others wait for (`RepeatsOutputs`), and then ends the run in ``error`` unless its end was
        among them. Input of the run that is there at the commit is ignored: its request may come again meanwhile.
        Reload the partition afterwards.
        """
        commit = Commit(self.lease_key, self.stream)
        numbers: dict[str, int] = {}
        for work in lost:
            self.replay(work.entries)
            for run in {name.decode(errors="replace") for _, fields in work.entries for name in fields}:
                if published := work.commit.last_of(self._keys.log(run)):
                    numbers[run] = id_key(published)[1] + 1
        ours = {key for run in numbers for key in (self._keys.run(run), self._keys.log(run))}
        for work in lost:
            commit.repeat(work.commit, ours)
            if isinstance(self.logic, RepeatsOutputs):
                self.logic.repeat(work.commit, numbers, commit)
        for run, seq in sorted(numbers.items()):
            if self.logic.is_open(run):
                self.logic.recall(run, seq)
                self.logic.abandon(run, error)
            self._drop_pieces(run, commit)
            commit.void(self.state_key, self.stream, run)
        self.logic.flush(commit)
        return commit if numbers else None

    # --- state of the previous owner -----------------------------------------------------------------------------

    def pieces_of(self, checkpoints: Mapping[bytes, bytes]) -> Iterator[tuple[str, list[int]]]:
        """The pieces that `restore` needs in addition to the state hash, by run."""
        for name, data in checkpoints.items():
            try:
                pieces = _saved_decoder.decode(data).pieces
            except msgspec.DecodeError:
                continue  # `restore` reports it
            if pieces:
                yield name.decode(), pieces

    def restore(
        self, checkpoints: Mapping[bytes, bytes], pieces: Mapping[str, Mapping[int, bytes]] | None = None
    ) -> None:
        """Restore from the state hash on the server and the pieces of runs that have some."""
        for name, data in checkpoints.items():
            run = name.decode(errors="replace")
            try:
                self._restore(run, data, (pieces or {}).get(run, {}))
            except Exception as e:  # written by another version, for example: affects this run only
                self._unread[run] = f"{type(e).__name__}: {e}"

    def _restore(self, run: str, data: bytes, pieces: Mapping[int, bytes]) -> None:
        saved = _saved_decoder.decode(data)
        at = max(saved.at, self.offset, key=id_key)
        if saved.state is None:
            self._void[run] = saved.at
            return
        if saved.pieces is None:
            self.logic.restore(run, saved.state)
        else:
            assert isinstance(self.logic, InPieces)
            self.logic.restore_from_pieces(run, saved.state, pieces)
            self._pieces[run] = set(saved.pieces)
        # The watermark may have passed a run that did not change since its checkpoint.
        self._since[run] = at, 0
        self._saved[run] = len(data)

    @property
    def unread(self) -> list[str]:
        """Runs with an unreadable checkpoint or entry."""
        return [*self._unread, *self._lost]

    def fail_unreadable(self, standing: Mapping[str, RunPosition]) -> Commit | None:
        """Call after `finish_replay`: end the runs whose state is unreadable, using the positions from their hashes.

        None if there is no such run. The commit moves no offset. A run that the replay from the watermark restored
        completely continues.
        """
        unread = {run: reason for run, reason in self._unread.items() if not self.logic.is_open(run)}
        if not unread and not self._lost:
            return None
        commit = Commit(self.lease_key, self.stream)
        for run, reason in (unread | self._lost).items():
            log.error("%s: the state of run %s cannot be read: %s", self.lease_key, run, reason)
            problem = f"the state of the run cannot be read: {reason}"
            error = ErrorInfo(code="state_unreadable", kind="internal", message=problem)
            known = standing.get(run)
            if known and not known.over and isinstance(self.logic, FailsUnreadable):
                self.logic.fail_unreadable(run, error, known)
            elif self.logic.is_open(run):
                self.logic.fail(run, error)
            if run in self._lost:
                self._forget(run, self.offset)
                self._write_void(run, commit)
            else:
                commit.drop(self.state_key, run)
                commit.expire(self._pieces_key(run), 0)
        self._unread, self._lost = {}, {}
        self.logic.flush(commit)
        return commit

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
        entry_id = found.entry[0].decode()
        for name in found.sizes:
            run = name.decode(errors="replace")
            kept, until = self._since.get(run), self._void.get(run)
            if not any(at and id_key(entry_id) <= id_key(at) for at in (kept and kept[0], until)):
                self._lost[run] = found.reason
        self._consumed += sum(found.sizes.values())

    def lose(self, runs: Iterable[str], reason: str) -> None:
        """Instead of a replay: the state of these runs is given up."""
        for run in runs:
            if self._keys.may_hold(self.number, run):
                self._lost[run] = reason

    def skip(self, entry_id: str, fields: Mapping[bytes, object], reason: str) -> None:
        """Instead of a replay: give up the state of all runs of an entry that an earlier owner committed."""
        self.lose((name.decode(errors="replace") for name in fields), reason)
        self.offset = entry_id

    def finish_replay(self, offset: str) -> list[str]:
        """End the replay at the committed offset. Returns the open runs."""
        self.offset = offset
        self._since = OrderedDict(sorted(self._since.items(), key=lambda item: id_key(item[1][0])))
        return list(self._since)

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
            if not self._keys.may_hold(self.number, run):  # its keys are in another slot
                if poison is not None:
                    poison.append(Poison(run, entry_id, frame, "the run is not of this partition"))
                continue
            if poison is None and (kept := self._since.get(run)) and id_key(entry_id) <= id_key(kept[0]):
                continue  # in a replay: the run's checkpoint covers this entry
            if (until := self._void.get(run)) and id_key(entry_id) <= id_key(until):
                continue
            try:
                self.logic.apply(run, frame)
            except Exception as e:  # no exception from a poison frame may stop the partition
                reason = f"{type(e).__name__}: {e}"
                self.logic.fail(run, self._poisoned(entry_id, reason))
                if poison is not None:
                    poison.append(Poison(run, entry_id, frame, reason))
            if self.logic.is_open(run):
                self._since.setdefault(run, (self.offset, self._consumed))
                self._changed.add(run)
            else:
                self._since.pop(run, None)
                self._changed.discard(run)
                if self._saved.pop(run, None):
                    ended.add(run)
        self.offset = entry_id
        self._consumed += size
        return size

    def _poisoned(self, entry_id: str, reason: str) -> ErrorInfo:
        return ErrorInfo(code="poison", kind="internal", message=reason, where=f"{self._topic} {entry_id}")

    def _checkpoint(self, commit: Commit) -> None:
        """Checkpoint the oldest runs, and so advance the watermark, if a replay would grow too long.

        The span between checkpoints grows with the size of the state, so that checkpoint writes stay linear in the
        input. The total over all runs is capped; the part that a single run's checkpoint rewrites is not.
        """
        written = 0
        while self._checkpoint_due and written < CHECKPOINT_BYTES:
            run = next(iter(self._since))
            if run in self._changed:
                written += self._save(run, commit)
                self._changed.discard(run)
            self._since[run] = (self.offset, self._consumed)
            self._since.move_to_end(run)

    @property
    def _checkpoint_due(self) -> bool:
        """Whether the oldest run must be checkpointed, or a replay would grow too long."""
        if not self._since:
            return False
        run, (_, consumed) = next(iter(self._since.items()))
        span = self._consumed - consumed
        if span <= CHECKPOINT_SPAN:
            return False
        together = min(sum(self._saved.values()), MAX_CHECKPOINT_SPAN)
        return span > max(CHECKPOINT_SPAN, together, self._saved.get(run, 0))

    def _save(self, run: str, commit: Commit) -> int:
        """Checkpoint a run; return the bytes written."""
        snapshot = self.logic.snapshot_in_pieces(run) if isinstance(self.logic, InPieces) else None
        if snapshot is None:
            self._drop_pieces(run, commit)
            saved = _Saved(self.offset, self.logic.snapshot(run)).encoded()
        else:
            saved = _Saved(self.offset, snapshot.head, snapshot.needs).encoded()
            key, needs = self._pieces_key(run), set(snapshot.needs)
            for number in sorted(self._pieces.get(run, set()) - needs):
                commit.drop(key, str(number))
            for number, piece in snapshot.new.items():
                commit.put(key, number, piece)
            commit.expire(key, PIECES_TTL_MS)
            self._pieces[run] = needs
        commit.put(self.state_key, run, saved)
        self._saved[run] = len(saved)
        return len(saved) + (sum(map(len, snapshot.new.values())) if snapshot else 0)

    def _drop_pieces(self, run: str, commit: Commit) -> None:
        if self._pieces.pop(run, None):
            commit.expire(self._pieces_key(run), 0)  # deletes the key

    def _pieces_key(self, run: str) -> str:
        return self._keys.pieces(self.number, self.group, run)


_saved_decoder = msgspec.msgpack.Decoder(_Saved)
