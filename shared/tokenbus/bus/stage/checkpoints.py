"""The open runs of a partition: from which offset each must be replayed, and the checkpoints that advance it. No IO.

A replay begins at the low watermark, which is before the oldest open run's first entry. A checkpoint of that run moves
it on. The state hash holds one field for each checkpoint, and one for each run that was ended without applying its
input (`OpenRuns.ignore`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.stage.logic import StageLogic

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


class SavedState(msgspec.Struct, frozen=True, array_like=True):
    """A run's field of the state hash, as stored."""

    at: str
    """The last entry that the checkpoint covers."""
    state: bytes | None
    """None: the run is over."""
    pieces: list[int] | None = None
    """Numbers of its pieces, if any."""
    void: bool = False
    """The run's entries up to ``at`` must be ignored also after its end, for they do not lead to it."""

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)


decode_saved = msgspec.msgpack.Decoder(SavedState).decode
"""Raises msgspec.DecodeError, UnicodeDecodeError and RecursionError."""


class OpenRuns:
    """The open runs of one partition, oldest first, and their checkpoints; the runs whose input is ignored."""

    def __init__(self, logic: StageLogic, *, keys: Keys, partition: int, group: str) -> None:
        self.consumed = 0
        """Bytes of input that were applied."""
        self._logic = logic
        self._keys = keys
        self._partition = partition
        self._group = group
        self._state_key = keys.state(partition, group)
        self._since: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Open run -> (offset after which its entries must be replayed, bytes consumed by then), oldest first."""
        self._changed: set[str] = set()
        """Open runs that changed since their last checkpoint."""
        self._saved: dict[str, int] = {}
        """Run -> size of its checkpoint in bytes, without pieces."""
        self._pieces: dict[str, set[int]] = {}
        """Run -> numbers of its checkpoint's pieces."""
        self._ignored: dict[str, str] = {}
        """Run that was ended without applying its input -> the entry up to which a replay ignores it."""

    def __len__(self) -> int:
        return len(self._since)

    @property
    def replay_from(self) -> str:
        """No entry up to this id is needed for a replay; empty if no run is open."""
        return next(iter(self._since.values()))[0] if self._since else ""

    def changed(self, run: str, before: str) -> None:
        """A frame of the run was applied, and it is open. ``before``: the offset before the frame's entry."""
        self._since.setdefault(run, (before, self.consumed))
        self._changed.add(run)

    def ended(self, run: str) -> bool:
        """The run is not open now. Returns whether it has a checkpoint, which must be deleted."""
        self._since.pop(run, None)
        self._changed.discard(run)
        return bool(self._saved.pop(run, None))

    def covers(self, run: str, entry_id: str) -> bool:
        """Whether the state of the run includes this entry. Only in a replay."""
        since = self._since.get(run)
        return since is not None and bool(since[0]) and id_key(entry_id) <= id_key(since[0])

    def restore(self, run: str, saved: SavedState, pieces: Mapping[int, bytes], *, size: int, offset: str) -> None:
        """Restore the run's state from its checkpoint. ``offset``: where the replay begins, which may be after the
        checkpoint of a run that did not change since.
        """
        assert saved.state is not None
        if saved.void:
            self.ignore(run, saved.at)
        if saved.pieces is None:
            self._logic.restore(run, saved.state)
        else:
            self._logic.restore_from_pieces(run, saved.state, pieces)
            self._pieces[run] = set(saved.pieces)
        self._since[run] = max(saved.at, offset, key=id_key), 0
        self._saved[run] = size

    def not_restored(self, run: str, *, size: int) -> None:
        """The run's checkpoint cannot be read. If the replay restores the run all the same, its end deletes it."""
        self._saved[run] = size

    def finish_replay(self) -> list[str]:
        """Order the runs by their offsets; return them."""
        self._since = OrderedDict(sorted(self._since.items(), key=lambda item: id_key(item[1][0])))
        return list(self._since)

    def write_due(self, commit: Commit, offset: str) -> dict[str, str]:
        """Checkpoint the oldest runs, and so advance the watermark, if a replay would grow too long. Returns the runs
        whose state cannot be serialized, with the reason: they hold the watermark back until they end.

        The span between checkpoints grows with the size of the state, so that checkpoint writes stay linear in the
        input. The total over all runs is capped; the part that a single run's checkpoint rewrites is not.
        """
        written, failed = 0, dict[str, str]()
        while self.is_due and written < CHECKPOINT_BYTES:
            run = next(iter(self._since))
            if run in self._changed:
                try:
                    written += self._write(run, commit, offset)
                except Exception as e:  # else no commit of the partition would succeed again
                    failed[run] = f"{type(e).__name__}: {e}"
                self._changed.discard(run)
            self._since[run] = (offset, self.consumed)
            self._since.move_to_end(run)
        return failed

    @property
    def is_due(self) -> bool:
        """Whether the oldest run must be checkpointed, or a replay would grow too long."""
        if not self._since:
            return False
        run, (_, consumed) = next(iter(self._since.items()))
        span = self.consumed - consumed
        if span <= CHECKPOINT_SPAN:
            return False
        together = min(sum(self._saved.values()), MAX_CHECKPOINT_SPAN)
        return span > max(CHECKPOINT_SPAN, together, self._saved.get(run, 0))

    def _write(self, run: str, commit: Commit, offset: str) -> int:
        """Checkpoint a run; return the bytes written."""
        if void := run in self._ignored:
            self.ignore(run, offset)
        snapshot = self._logic.snapshot_in_pieces(run)
        if snapshot is None:
            self.drop_pieces(run, commit)
            saved = SavedState(offset, self._logic.snapshot(run), void=void).encoded()
        else:
            saved = SavedState(offset, snapshot.head, snapshot.needs, void).encoded()
            key, needs = self._pieces_key(run), set(snapshot.needs)
            for number in sorted(self._pieces.get(run, set()) - needs):
                commit.drop(key, str(number))
            for number, piece in snapshot.new.items():
                commit.put(key, number, piece)
            commit.expire(key, PIECES_TTL_MS)
            self._pieces[run] = needs
        commit.put(self._state_key, run, saved)
        self._saved[run] = len(saved)
        return len(saved) + (sum(map(len, snapshot.new.values())) if snapshot else 0)

    def drop(self, run: str, commit: Commit) -> None:
        """Delete the checkpoint of a run that ended, except for what must be ignored of it."""
        if run in self._ignored:
            self.write_void(run, commit)
            return
        commit.drop(self._state_key, run)
        self.drop_pieces(run, commit)

    def drop_unread(self, run: str, commit: Commit) -> None:
        """Delete a checkpoint that could not be restored, and its pieces, whose numbers are not known then."""
        self._saved.pop(run, None)
        commit.drop(self._state_key, run)
        commit.expire(self._pieces_key(run), 0)

    def drop_pieces(self, run: str, commit: Commit) -> None:
        """Delete the pieces of the run's checkpoint, if it has some."""
        if self._pieces.pop(run, None):
            commit.expire(self._pieces_key(run), 0)  # deletes the key

    def _pieces_key(self, run: str) -> str:
        return self._keys.pieces(self._partition, self._group, run)

    # --- input that is ignored --------------------------------------------------------------------------------------

    @property
    def any_ignored(self) -> bool:
        """Whether the input of some run is ignored."""
        return bool(self._ignored)

    def ignore(self, run: str, until: str) -> None:
        """Ignore the run's input up to this entry."""
        self._ignored[run] = until

    def void(self, run: str, until: str) -> None:
        """Forget the run, which was ended without applying its input up to this entry, and `ignore` that."""
        self.ended(run)
        self.ignore(run, until)

    def ignores(self, run: str, entry_id: str) -> bool:
        """Whether the run's frame in this entry must be ignored."""
        until = self._ignored.get(run)
        return until is not None and id_key(entry_id) <= id_key(until)

    def write_void(self, run: str, commit: Commit) -> None:
        """Store what `void` set, so that a replay by another owner ignores the same input."""
        self.drop_pieces(run, commit)
        commit.put(self._state_key, run, SavedState(self._ignored[run], None, void=True).encoded())

    def drop_ignored(self, watermark: str, commit: Commit) -> None:
        """Forget the runs whose ignored entries are all at or before the watermark, so that no replay reads them."""
        passed = [run for run, until in self._ignored.items() if id_key(until) <= id_key(watermark)]
        for run in passed:
            if run not in self._since:
                commit.drop(self._state_key, run)
                del self._ignored[run]
