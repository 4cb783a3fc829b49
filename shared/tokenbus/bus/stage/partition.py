"""One partition in a worker's hands: its logic, and from where on each open run would have to be replayed. No IO.

What the logic holds in memory is a function of the entries after the low watermark, together with the checkpoints of
runs that began before it. `work` takes new entries in, with their outputs; `restore` and `replay` rebuild what a
predecessor had, without.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.stream_reader import Entry, Unreadable, id_key
from tokenbus.events.error_info import ErrorInfo

log = logging.getLogger(__name__)

CHECKPOINT_SPAN = 2 * 2**20
"""Bytes of input after which an open run is checkpointed."""
MAX_CHECKPOINT_SPAN = 8 * 2**20
"""The same where there is more than that to checkpoint; keeps a replay under a second."""
CHECKPOINT_BYTES = 2**20
"""Of checkpoints in one commit, about: further runs wait for the next one."""
PIECES_TTL_MS = 7 * 86_400_000
"""Life of a checkpoint's pieces from the last on. They go with their run; this is for what nobody ends."""


class StageLogic(Protocol):
    """What a stage does with one partition's entries: pure, deterministic, no clock.

    A replay may begin in the middle of a run that ended before the committed offset: what the rest of such a run
    opens, its last frame must close.
    """

    def apply(self, run: str, frame: bytes) -> None:
        """Work one frame of a run into the state and the outputs. May raise: then `fail` follows."""
        ...

    def fail(self, run: str, error: ErrorInfo) -> None:
        """The run's frame was poison: end it, within the state. Must not raise."""
        ...

    def abandon(self, run: str, error: ErrorInfo) -> None:
        """The server lost outputs of this open run that others may have seen: end it. Must not raise."""
        ...

    def is_open(self, run: str) -> bool:
        """Whether anything is remembered of the run, so that a replay must begin before it."""
        ...

    def flush(self, commit: Commit) -> None:
        """Put the outputs gathered since the last flush or `mute` into the commit."""
        ...

    def discard_outputs(self) -> None:
        """Forget the outputs gathered: they were committed by an earlier owner."""
        ...

    def snapshot(self, run: str) -> bytes:
        """The state of an open run."""
        ...

    def restore(self, run: str, state: bytes) -> None:
        """The opposite of `snapshot`."""
        ...

    def recall(self, run: str, seq: int) -> None:
        """What the run's hash says was the next ``seq`` at the committed offset: a replay cannot know it."""
        ...


@runtime_checkable
class FinishesReplay(Protocol):
    """A logic whose outputs may wait for work outside of the bus (images to be stored, say)."""

    @property
    def replay_unfinished(self) -> bool:
        """Whether frames taken since the last `flush` or `mute` ask for such work."""
        ...

    async def finish_replay(self) -> None:
        """Do what they ask for; the stage calls it between `take` and `flush`, and never in a replay.

        A crash may do it again, so doing it twice must be the same as once; and the whole partition waits for it, so it
        takes bounded time, and what fails is part of the outputs. Must not raise.
        """
        ...


class Snapshot(Protocol):
    """A checkpoint in pieces."""

    @property
    def head(self) -> bytes:
        """What is written anew each time."""
        ...

    @property
    def needs(self) -> list[int]:
        """The pieces that belong to it."""
        ...

    @property
    def new(self) -> Mapping[int, bytes]:
        """Those of them that no checkpoint before had."""
        ...


@runtime_checkable
class InPieces(Protocol):
    """A logic whose runs may grow large: a checkpoint adds what is new, in numbered pieces."""

    def snapshot_in_pieces(self, run: str) -> Snapshot | None:
        """The state of an open run, with what the last call did not have; None: it is small, and `snapshot` has it."""
        ...

    def restore_from_pieces(self, run: str, head: bytes, pieces: Mapping[int, bytes]) -> None:
        """The opposite."""
        ...


class RunPosition(msgspec.Struct, frozen=True):
    """Where an open run stands, as its hash says."""

    turn: int
    attempt: int
    seq: int
    over: bool = False


@runtime_checkable
class LearnsFromLog(Protocol):
    """A logic that ends an unread run better if it knows what the run's log has."""

    def learn(self, run: str, event: bytes) -> None:
        """Take one event of the log of a run that `fail_unreadable` will end, in log order. Must not raise."""
        ...


@runtime_checkable
class FailsUnreadable(Protocol):
    """A logic that can end a run of which it knows nothing else."""

    def fail_unreadable(self, run: str, error: ErrorInfo, standing: RunPosition) -> None:
        """The state of this open run is lost, and what is here of it counts no more: say so in its name. Must not
        raise."""
        ...


class _Saved(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint as it lies in the state hash."""

    at: str
    """The entry up to which it holds."""
    state: bytes | None
    """None: nothing of the run up to there counts any more."""
    pieces: list[int] | None = None
    """The numbers of its pieces. Where it has some, a version that knows none cannot read it, and shall not."""

    def encoded(self) -> bytes:
        fields = (self.at, self.state) if self.pieces is None else (self.at, self.state, self.pieces)
        return msgspec.msgpack.encode(fields)


class Poison(msgspec.Struct, frozen=True):
    """A frame that could not be taken."""

    run: str
    entry_id: str
    frame: bytes
    reason: str
    size: int | None = None
    """How many bytes the frame has, if it could not be read."""


class AppliedEntries(msgspec.Struct, frozen=True):
    """A batch that the logic took in, whose outputs are still with it."""

    entries: Sequence[Entry]
    size: int
    """Bytes of frames."""
    poison: list[Poison]
    ended: set[str]
    """Runs whose checkpoint must go."""
    void: set[str]
    """Runs that were ended for what could not be read."""


class PreparedCommit(msgspec.Struct, frozen=True):
    """What a batch came to: the commit's writes, and what of it was poison."""

    commit: Commit
    entries: Sequence[Entry]
    size: int
    """Bytes of frames."""
    poison: list[Poison]

    @property
    def memory_bytes(self) -> int:
        """About how many bytes it takes in memory."""
        return self.size + self.commit.held


class Partition:
    """The partition of a lease. First `restore`, `replay` from the watermark on, and `settle`; then `work`."""

    def __init__(self, lease: Lease, logic: StageLogic, *, keys: Keys, topic: InternalTopic, group: str) -> None:
        self.number = lease.partition
        self.token = lease.token
        self.stream = keys.topic(self.number, topic)
        self.lease_key = keys.lease(self.number, group)
        self.state_key = keys.state(self.number, group)
        self.group = group
        self.logic = logic
        self.offset = lease.watermark
        """The last entry that was taken in."""
        self.paused = False
        """The next stage is too far behind."""
        self.loads = 0
        """How often the partition was loaded, this time included, since its last commit."""
        self.unreadable: Unreadable | None = None
        """The entry that follows on those in hand, and cannot be read."""
        self.quarantined: tuple[str, int] = ("", 0)
        """The entry that earlier owners had in hand by itself and came to no commit, and how many."""
        self._keys = keys
        self._topic: InternalTopic = topic
        self._consumed = 0
        self._since: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Open run -> (offset after which its entries must be replayed, bytes consumed by then), oldest first."""
        self._saved: dict[str, int] = {}
        """Run -> size of its checkpoint, without pieces."""
        self._unread: dict[str, str] = {}
        """Open runs whose checkpoint could not be read, and why."""
        self._lost: dict[str, str] = {}
        """Runs of which an entry could not be read in the replay, and why."""
        self._pieces: dict[str, set[int]] = {}
        """Run -> the pieces of its checkpoint."""
        self._changed: set[str] = set()
        """Open runs that their checkpoint, if any, does not hold whole."""
        self._published_open = -1
        """How many runs are open as the lease hash has it, for those who watch."""
        self._void: dict[str, str] = {}
        """Run -> entry up to which nothing of it counts any more, for it was ended over the head of its input."""

    @property
    def watermark(self) -> str:
        """No entry up to here is needed for a replay."""
        return next(iter(self._since.values()))[0] if self._since else self.offset

    def apply_and_build(self, entries: Sequence[Entry]) -> PreparedCommit:
        """`take` and `build_commit` in one."""
        return self.build_commit(self.apply(entries))

    def apply(self, entries: Sequence[Entry]) -> AppliedEntries:
        """Take the entries in; `build_commit` must follow before the next."""
        poison, ended, void, size = list[Poison](), set[str](), set[str](), 0
        for entry in entries:
            size += self._apply(entry, poison, ended)
            if self.unreadable and self.unreadable.entry[0] == entry[0]:
                size += self._apply_unreadable(self.unreadable, poison, void)
                self.unreadable = None
        return AppliedEntries(entries, size, poison, ended, void)

    def _apply_unreadable(self, found: Unreadable, poison: list[Poison], void: set[str]) -> int:
        """End the runs of those fields of an entry that cannot be read; their bytes."""
        entry_id = found.entry[0].decode()
        for name, size in found.sizes.items():
            run = name.decode(errors="replace")
            poison.append(Poison(run, entry_id, b"", found.reason, size))
            if self._keys.partition_of(run) == self.number:
                self._void_run(run, entry_id, found.reason)
                void.add(run)
        size = sum(found.sizes.values())
        self._consumed += size
        return size

    def build_commit(self, taken: AppliedEntries) -> PreparedCommit:
        """The outputs. Should the logic's `flush` or `snapshot` raise, the partition must be loaded anew."""
        commit = Commit(self.lease_key, self.stream)
        self.logic.flush(commit)
        for run in taken.ended:
            commit.drop(self.state_key, run)
            self._drop_pieces(run, commit)
        for run in taken.void:
            self._write_void(run, commit)
        self._checkpoint(commit)
        return self._finished(commit, taken.entries, taken.size, taken.poison)

    def quarantine(self, entry: Entry, reason: str) -> PreparedCommit:
        """End the runs of an entry without a look into it: looking is what its workers died of.

        In a replay it is passed over too, so those runs are void up to it.
        """
        entry_id, size, poison = entry[0].decode(), 0, list[Poison]()
        commit = Commit(self.lease_key, self.stream)
        for name, frame in entry[1].items():
            run = name.decode(errors="replace")
            size += len(frame)
            poison.append(Poison(run, entry_id, frame, reason))
            if self._keys.partition_of(run) == self.number:
                self._void_run(run, entry_id, reason)
                self._write_void(run, commit)
        self.offset = entry_id
        self._consumed += size
        self.logic.flush(commit)
        return self._finished(commit, [entry], size, poison)

    def _void_run(self, run: str, entry_id: str, reason: str) -> None:
        """The run ends here, and nothing of it up to this entry counts in a replay."""
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

    def recover_rollback(self, lost: Sequence[PreparedCommit], last: str, error: ErrorInfo) -> Commit | None:
        """What a fail-over to this offset took back, made good; None where none of it was public.

        The commit moves no offset. Of each run of which something was lost it publishes that once more, so that the
        log has no gap, and then the run's end in ``error``, if its end was not among it. What the input up to its
        ``last`` entry still holds of the run counts no more. The partition must be loaded anew after that.
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
        for run, seq in sorted(numbers.items()):
            if self.logic.is_open(run):
                self.logic.recall(run, seq)
                self.logic.abandon(run, error)
            self._drop_pieces(run, commit)
            commit.put(self.state_key, run, _Saved(last, None).encoded())
        self.logic.flush(commit)
        return commit if numbers else None

    # --- what a predecessor had ----------------------------------------------------------------------------------

    def pieces_of(self, checkpoints: Mapping[bytes, bytes]) -> Iterator[tuple[str, list[int]]]:
        """The pieces that `restore` needs beside the state hash, by run."""
        for name, data in checkpoints.items():
            try:
                pieces = _saved_decoder.decode(data).pieces
            except msgspec.DecodeError:
                continue  # `restore` tells
            if pieces:
                yield name.decode(), pieces

    def restore(
        self, checkpoints: Mapping[bytes, bytes], pieces: Mapping[str, Mapping[int, bytes]] | None = None
    ) -> None:
        """The state hash as it lies on the server, with the pieces of runs that have some."""
        for name, data in checkpoints.items():
            run = name.decode(errors="replace")
            try:
                self._restore(run, data, (pieces or {}).get(run, {}))
            except Exception as e:  # another version wrote it, say: of this run alone
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
        # A run that did not change since its checkpoint may have let the watermark pass it.
        self._since[run] = at, 0
        self._saved[run] = len(data)

    @property
    def unread(self) -> list[str]:
        """Runs of which a checkpoint or an entry could not be read."""
        return [*self._unread, *self._lost]

    def fail_unreadable(self, standing: Mapping[str, RunPosition]) -> Commit | None:
        """After `settle`: the end of runs whose checkpoint nobody can read, by where their hashes say that they stand;
        None where there is none. The commit moves no offset.

        What a replay from the watermark brought back whole goes on.
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
        """Take entries in that were committed by an earlier owner; their outputs are dropped."""
        for entry in entries:
            self._apply(entry, None, set())
        self.logic.discard_outputs()

    def skip_unreadable(self, found: Unreadable) -> None:
        """In a replay: an entry that an earlier owner committed, and that cannot be read whole now. The state of the
        runs concerned is lost, but of those whose checkpoint holds it and those that were ended because of it."""
        self.replay([found.entry])
        entry_id = found.entry[0].decode()
        for name in found.sizes:
            run = name.decode(errors="replace")
            kept, until = self._since.get(run), self._void.get(run)
            if not any(at and id_key(entry_id) <= id_key(at) for at in (kept and kept[0], until)):
                self._lost[run] = found.reason
        self._consumed += sum(found.sizes.values())

    def finish_replay(self, offset: str) -> list[str]:
        """All up to the committed offset is replayed. Returns the runs that are open."""
        self.offset = offset
        self._since = OrderedDict(sorted(self._since.items(), key=lambda item: id_key(item[1][0])))
        return list(self._since)

    # --- one entry -------------------------------------------------------------------------------------------------

    def _apply(self, entry: Entry, poison: list[Poison] | None, ended: set[str]) -> int:
        """Feed the logic; the bytes of the entry's frames. ``poison``: None in a replay, which knows it already.

        ``ended`` gets the runs whose checkpoint must go, even if they begin again in this batch.
        """
        entry_id, size = entry[0].decode(), 0
        for name, frame in entry[1].items():
            run = name.decode(errors="replace")
            size += len(frame)
            if self._keys.partition_of(run) != self.number:  # its keys would be of another slot
                if poison is not None:
                    poison.append(Poison(run, entry_id, frame, "the run is not of this partition"))
                continue
            if poison is None and (kept := self._since.get(run)) and id_key(entry_id) <= id_key(kept[0]):
                continue  # in a replay: the run's checkpoint holds this entry
            if (until := self._void.get(run)) and id_key(entry_id) <= id_key(until):
                continue
            try:
                self.logic.apply(run, frame)
            except Exception as e:  # whatever a poison frame raises must not stop the partition
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
        """Move the watermark on where a replay would grow long, oldest runs first.

        The span between checkpoints grows with the state there is to write, so that the writing stays linear in the
        input: up to a cap for all runs together, and without one for what a single run's checkpoint writes anew.
        """
        written = 0
        while self._since and written < CHECKPOINT_BYTES:
            run, (_, consumed) = next(iter(self._since.items()))
            span = self._consumed - consumed
            together = min(sum(self._saved.values()), MAX_CHECKPOINT_SPAN)
            if span <= max(CHECKPOINT_SPAN, together, self._saved.get(run, 0)):
                return
            if run in self._changed:
                written += self._save(run, commit)
                self._changed.discard(run)
            self._since[run] = (self.offset, self._consumed)
            self._since.move_to_end(run)

    def _save(self, run: str, commit: Commit) -> int:
        """Checkpoint a run; the bytes that are written."""
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
            commit.expire(self._pieces_key(run), 0)  # which deletes it

    def _pieces_key(self, run: str) -> str:
        return self._keys.pieces(self.number, self.group, run)


_saved_decoder = msgspec.msgpack.Decoder(_Saved)
