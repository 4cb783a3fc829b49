"""What a policy worker does with one partition's drafts: it hands them to the runs' policies, and keeps them.

To the stage's runtime this is a `Logic` without outputs: a run's state is what was drafted of it, so a new owner hands
all of it to new policies, and what those say again changes nothing (`tokenbus.core.run.gated`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tokenbus.bus.scripts import Commit
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import drafts_decoder
from tokenbus_services.policy_stage.run_task import Judging

MakeJudging = Callable[[str, tuple[str, ...]], Judging]
"""For a run and the names of its policies."""


class PolicyLogic:
    """`Logic` of the policy stage (see tokenbus.bus.stage.stage)."""

    def __init__(self, judging: MakeJudging) -> None:
        self._make = judging
        self._frames: dict[str, list[bytes]] = {}
        """All that was drafted of the open runs."""
        self._judging: dict[str, Judging] = {}
        self._closed = False

    def apply(self, run: str, frame: bytes) -> None:
        drafts = drafts_decoder.decode(frame)
        if drafts.over:
            self._end(run)
            return
        if run not in self._judging:
            if not drafts.events or drafts.events[0].seq != 0:
                return  # the rest of a run that ended: its beginning was trimmed
            self._judging[run] = self._make(run, drafts.policies)
        self._frames.setdefault(run, []).append(frame)
        self._judging[run].add(drafts.events)

    def fail(self, run: str, error: ErrorInfo) -> None:
        self._end(run)  # the parser's patience says what becomes of the run

    def abandon(self, run: str, error: ErrorInfo) -> None:
        self._end(run)

    def is_open(self, run: str) -> bool:
        return run in self._judging

    def flush(self, commit: Commit) -> None:
        self._start()

    def discard_outputs(self) -> None:
        self._start()

    def snapshot(self, run: str) -> bytes:
        return msgspec.msgpack.encode(self._frames[run])

    def restore(self, run: str, state: bytes) -> None:
        for frame in msgspec.msgpack.decode(state, type=list[bytes]):
            self.apply(run, frame)

    def recall(self, run: str, seq: int) -> None:
        """Nothing here depends on numbers."""

    def close(self) -> list[Judging]:
        """The partition is another's: nothing more is called. What is still under way."""
        self._closed = True
        for judging in self._judging.values():
            judging.close()
        return list(self._judging.values())

    def _start(self) -> None:
        if not self._closed:
            for judging in self._judging.values():
                judging.start()

    def _end(self, run: str) -> None:
        self._frames.pop(run, None)
        if judging := self._judging.pop(run, None):
            judging.close()
