"""What a stage asks of the logic that it applies: `StageLogic`, and what a logic may offer beyond that. No IO."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import msgspec

from tokenbus.bus.scripts import Commit
from tokenbus.events.error_info import ErrorInfo


class StageLogic(Protocol):
    """Processes the entries of one partition: pure, deterministic, no clock.

    A replay may start in the middle of a run that ended before the committed offset. If the remaining frames of such a
    run open it again, its last frame must close it.
    """

    @property
    def outputs(self) -> int:
        """Approximate number of writes since the last `flush` or `discard_outputs`."""
        ...

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

    def fail_unreadable(self, run: str, error: ErrorInfo, position: RunPosition) -> None:
        """End this open run, whose state is lost, in ``error``. Any state still held for it is invalid. Must not
        raise.
        """
        ...
