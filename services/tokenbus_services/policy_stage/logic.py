"""The policy worker's logic for one partition: passes drafts to the runs' policies, and keeps them.

To the stage runtime this is a logic without outputs. A run's state is its drafts: a new owner feeds all of them to new
policies, and repeated verdicts change nothing (`tokenbus.core.run.gated_run`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tokenbus.bus.scripts import Commit
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import drafts_decoder
from tokenbus_services.policy_stage.run_task import PolicyRunTask

OnJudged = Callable[[str, str, tuple[str, ...], int], None]
"""Called when a run under policies has ended: its id, the publisher's trace context, its policies, and when its first
draft came.
"""
MakeRunTask = Callable[[str, tuple[str, ...]], PolicyRunTask]
"""Creates the task for a run and the names of its policies."""


class PolicyLogic(StageLogic):
    """The policy stage's logic (see `tokenbus.bus.stage.stage`)."""

    def __init__(
        self, make: MakeRunTask, on_judged: OnJudged = lambda run, traceparent, policies, since_ms: None
    ) -> None:
        self._make = make
        self._on_judged = on_judged
        self._began: dict[str, tuple[str, tuple[str, ...], int]] = {}
        """By open run: the further arguments of `on_judged`."""
        self._judged: list[tuple[str, str, tuple[str, ...], int]] = []
        self._tasks: dict[str, PolicyRunTask] = {}
        """By open run."""
        self._closed = False

    def apply(self, run: str, frame: bytes) -> None:
        drafts = drafts_decoder.decode(frame)
        if drafts.over:
            if began := self._began.get(run):
                self._judged.append((run, *began))
            self._end(run)
            return
        if run not in self._tasks:
            if not drafts.events or drafts.events[0].seq != 0:
                return  # the rest of a run that ended: its beginning was trimmed
            self._tasks[run] = self._make(run, drafts.policies)
            self._began[run] = (drafts.traceparent, drafts.policies, time.time_ns() // 1_000_000)
        self._tasks[run].add(frame, len(drafts.events))

    def fail(self, run: str, error: ErrorInfo) -> None:
        self._end(run)  # the parser's policy timeout decides about the run

    def abandon(self, run: str, error: ErrorInfo) -> None:
        self._end(run)

    def is_open(self, run: str) -> bool:
        return run in self._tasks

    def flush(self, commit: Commit) -> None:
        for judged in self._judged:
            self._on_judged(*judged)
        self._judged.clear()
        self._start()

    def discard_outputs(self) -> None:
        self._judged.clear()
        self._start()

    def snapshot(self, run: str) -> bytes:
        return msgspec.msgpack.encode(self._tasks[run].frames)

    def restore(self, run: str, state: bytes) -> None:
        for frame in msgspec.msgpack.decode(state, type=list[bytes]):
            self.apply(run, frame)

    def close(self) -> list[PolicyRunTask]:
        """Close all tasks, because another worker owns the partition. Returns the tasks still ending."""
        self._closed = True
        for task in self._tasks.values():
            task.close()
        return list(self._tasks.values())

    def _start(self) -> None:
        if not self._closed:
            for task in self._tasks.values():
                task.start()

    def _end(self, run: str) -> None:
        self._began.pop(run, None)
        if task := self._tasks.pop(run, None):
            task.close()
