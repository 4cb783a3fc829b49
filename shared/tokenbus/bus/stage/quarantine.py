"""A poison entry is quarantined: its runs fail, so that the other runs of the partition continue. No IO.

An entry whose processing crashes its workers leaves no error behind. So a partition that did not commit in
`CAREFUL_LOADS` loads is processed one entry at a time. Each try is recorded in the lease hash before it begins
(`IsolatedTries`). An entry with too many tries is skipped without decoding it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Self

import msgspec

from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.stream_reader import Entry, Unreadable
from tokenbus.bus.stage.checkpoints import OpenRuns, VoidInput
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.bus.stage.prepared_commit import Poison
from tokenbus.events.error_info import ErrorInfo

log = logging.getLogger(__name__)

UNREADABLE = "the entry cannot be read"
CAREFUL_LOADS = 3
"""After more loads than this without a commit, process one entry at a time and record it before trying."""
MOST_ALONE = 2
"""Quarantine an entry after more isolated tries than this without a commit: processing it crashes its workers."""
TRIES_FIELD = "suspect"
"""The lease hash's field of `IsolatedTries`."""


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


class Quarantine:
    """Fails the runs of one partition's poison. A replay ignores the input of such a run up to the poison entry."""

    def __init__(
        self,
        logic: StageLogic,
        runs: OpenRuns,
        void: VoidInput,
        *,
        keys: Keys,
        partition: int,
        topic: InternalTopic,
    ) -> None:
        self._logic = logic
        self._runs = runs
        self._void = void
        self._keys = keys
        self._partition = partition
        self._topic: InternalTopic = topic

    def fail_frame(self, run: str, entry_id: str, reason: str) -> None:
        """Fail the run of a frame that raised. A replay applies the frame again, with the same outcome.

        ``reason``, here and in `fail_entry`: clients read it.
        """
        self._logic.fail(run, self._error(entry_id, reason))

    def fail_entry(self, entry: Entry, reason: str, commit: Commit) -> list[Poison]:
        """Fail every run in this entry without decoding it; decoding it crashed earlier workers."""
        entry_id, poison = entry[0].decode(), list[Poison]()
        for name, frame in entry[1].items():
            run = name.decode(errors="replace")
            poison.append(Poison(run, entry_id, frame, reason))
            if self._fail_and_void(run, entry_id, reason):
                self.write_void(run, commit)
        return poison

    def fail_unreadable(self, found: Unreadable, void: set[str]) -> list[Poison]:
        """Fail the runs of the entry's unreadable fields, and add them to ``void``, to be written with the commit."""
        entry_id, poison = found.entry[0].decode(), list[Poison]()
        for name, size in found.sizes.items():
            run = name.decode(errors="replace")
            poison.append(Poison(run, entry_id, b"", found.reason, size))
            if self._fail_and_void(run, entry_id, UNREADABLE):
                void.add(run)
        return poison

    def fail_states(self, failed: Mapping[str, str], offset: str, commit: Commit) -> list[Poison]:
        """Fail the runs whose state cannot be checkpointed, by run and reason."""
        for run, reason in failed.items():
            log.error("%s: the state of run %s cannot be stored: %s", self._topic, run, reason)
            self._fail_and_void(run, offset, "its state cannot be stored")
            self.write_void(run, commit)
        return [Poison(run, offset, b"", f"its state cannot be stored: {why}") for run, why in failed.items()]

    def _fail_and_void(self, run: str, entry_id: str, reason: str) -> bool:
        """False: the run is not of this partition."""
        if not self._keys.may_hold(self._partition, run):
            return False
        self._logic.fail(run, self._error(entry_id, reason))
        self.void(run, entry_id)
        return True

    def void(self, run: str, until: str) -> None:
        """Forget the run, and ignore its input up to this entry."""
        self._runs.ended(run)
        self._void.add(run, until)

    def write_void(self, run: str, commit: Commit) -> None:
        """Store what `void` set."""
        self._runs.drop_pieces(run, commit)
        self._void.write(run, commit)

    def _error(self, entry_id: str, reason: str) -> ErrorInfo:
        return ErrorInfo(code="poison", kind="internal", message=reason, where=f"{self._topic} {entry_id}")
