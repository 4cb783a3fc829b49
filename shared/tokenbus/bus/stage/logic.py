"""What a stage asks of the logic that it applies. No IO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec

from tokenbus.bus.scripts import Commit
from tokenbus.events.error_info import ErrorInfo


class RunPosition(msgspec.Struct, frozen=True):
    """Position of an open run, read from its hash."""

    turn: int
    attempt: int
    seq: int
    over: bool = False
    tenant: str = ""


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


class StageLogic(ABC):
    """Processes the entries of one partition: pure, deterministic, no clock.

    A replay may start in the middle of a run that ended before the committed offset. If the remaining frames of such a
    run open it again, its last frame must close it.
    """

    outputs: int = 0
    """Approximate number of writes since the last `flush` or `discard_outputs`."""

    @abstractmethod
    def apply(self, run: str, frame: bytes) -> None:
        """Apply one frame of a run to the state and the outputs. If it raises, `fail` follows."""

    @abstractmethod
    def fail(self, run: str, error: ErrorInfo) -> None:
        """End the run because its frame was poison. Must not raise."""

    @abstractmethod
    def abandon(self, run: str, error: ErrorInfo) -> None:
        """End this open run: the server lost outputs of it that others may have seen. It may stay open until others may
        see its end. Must not raise.
        """

    @abstractmethod
    def is_open(self, run: str) -> bool:
        """Whether the logic holds state of the run, so that a replay must start before it."""

    @abstractmethod
    def flush(self, commit: Commit) -> None:
        """Add the outputs since the last `flush` or `discard_outputs` to the commit."""

    @abstractmethod
    def discard_outputs(self) -> None:
        """Drop the pending outputs: an earlier owner committed them."""

    @abstractmethod
    def snapshot(self, run: str) -> bytes:
        """Serialize the state of an open run."""

    @abstractmethod
    def restore(self, run: str, state: bytes) -> None:
        """Restore the state that `snapshot` returned."""

    # --- what a logic may have in addition --------------------------------------------------------------------------

    def recall(self, run: str, seq: int) -> None:  # noqa: B027
        """Set the run's next ``seq`` at the committed offset, as read from its hash; a replay cannot derive it."""

    @property
    def replay_unfinished(self) -> bool:
        """Whether frames applied since the last `flush` or `discard_outputs` need `finish_replay`."""
        return False

    async def finish_replay(self) -> None:  # noqa: B027
        """Do the work outside the bus on which the outputs depend, such as storing images. The stage calls it between
        `apply` and `flush`, and never in a replay.

        It must be idempotent, because a crash may repeat it, and take bounded time, because the whole partition waits
        for it. A failure becomes part of the outputs. Must not raise.
        """

    def snapshot_in_pieces(self, run: str) -> Snapshot | None:
        """Checkpoint of an open run that may grow large, with the pieces added since the last call; None if it is
        small: use `snapshot`.
        """
        return None

    def restore_from_pieces(self, run: str, head: bytes, pieces: Mapping[int, bytes]) -> None:
        """Restore the state from `snapshot_in_pieces`."""
        raise NotImplementedError

    def repeat(self, lost: Commit, runs: Collection[str], commit: Commit) -> None:  # noqa: B027
        """Add to ``commit`` what the lost one wrote about these runs to shared streams that others wait for: the end of
        a run, above all. Must not raise.
        """

    learns_from_log: bool = False
    """Whether `learn` does something."""

    def learn(self, run: str, event: bytes) -> None:  # noqa: B027
        """Process one event from the log of a run that `fail_unreadable` will end, in log order, so that it ends more
        cleanly. Must not raise.
        """

    def fail_unreadable(self, run: str, error: ErrorInfo, position: RunPosition) -> None:
        """End this open run, whose state is lost, in ``error``. Any state still held for it is invalid. Must not
        raise.
        """
        if self.is_open(run):
            self.fail(run, error)
