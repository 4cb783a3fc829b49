"""Runs whose state a replay cannot rebuild: a checkpoint or an entry is unreadable. They end. No IO."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.stream_reader import Unreadable
from tokenbus.bus.stage.checkpoints import OpenRuns, VoidInput
from tokenbus.bus.stage.logic import FailsUnreadable, RunPosition, StageLogic
from tokenbus.bus.stage.quarantine import Quarantine
from tokenbus.events.error_info import ErrorInfo

log = logging.getLogger(__name__)


class LostState:
    """The runs of one partition whose state is lost, collected in a replay and ended after it."""

    def __init__(self, keys: Keys, partition: int, group: str) -> None:
        self._keys = keys
        self._partition = partition
        self._group = group
        self._unread: dict[str, str] = {}
        """Open run whose checkpoint could not be read -> reason."""
        self._lost: dict[str, str] = {}
        """Run with an entry that the replay could not read -> reason."""

    @property
    def runs(self) -> list[str]:
        """Runs with an unreadable checkpoint or entry."""
        return [*self._unread, *self._lost]

    def unread_checkpoint(self, run: str, reason: str) -> None:
        """The run's checkpoint cannot be restored. The replay from the watermark may restore the run all the same."""
        self._unread[run] = reason

    def lose(self, runs: Iterable[str], reason: str) -> None:
        """The state of these runs is given up."""
        for run in runs:
            if self._keys.may_hold(self._partition, run):
                self._lost[run] = reason

    def unread_entry(self, found: Unreadable, open_runs: OpenRuns, void: VoidInput) -> None:
        """An entry that an earlier owner committed is not fully readable now.

        The runs concerned lose their state, unless their checkpoint covers the entry or the entry had already ended
        them.
        """
        entry_id = found.entry[0].decode()
        for name in found.sizes:
            run = name.decode(errors="replace")
            if not open_runs.covers(run, entry_id) and not void.covers(run, entry_id):
                self._lost[run] = found.reason

    def end_runs(
        self,
        positions: Mapping[str, RunPosition],
        commit: Commit,
        *,
        logic: StageLogic,
        open_runs: OpenRuns,
        quarantine: Quarantine,
        offset: str,
    ) -> bool:
        """End the runs, with their positions from their hashes; False if there is none to end."""
        unread = {run: reason for run, reason in self._unread.items() if not logic.is_open(run)}
        if not unread and not self._lost:
            return False
        for run, reason in (unread | self._lost).items():
            log.error(
                "%s partition %d: the state of run %s cannot be read: %s", self._group, self._partition, run, reason
            )
            # The reason may be the text of any exception, and clients read the error.
            error = ErrorInfo(code="state_unreadable", kind="internal", message="the state of the run cannot be read")
            known = positions.get(run)
            if known and not known.over and isinstance(logic, FailsUnreadable):
                logic.fail_unreadable(run, error, known)
            elif logic.is_open(run):
                logic.fail(run, error)
            if run in self._lost:
                open_runs.drop_unread(run, commit)
                quarantine.void(run, offset)
                quarantine.write_void(run, commit)
            else:
                open_runs.drop_unread(run, commit)
        self._unread, self._lost = {}, {}
        return True
