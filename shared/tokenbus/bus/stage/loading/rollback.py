"""The commit that repairs a fail-over which rolled the server back. No IO.

A promoted replica serves a past state of its master. Readers may have seen events that the server has not now.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.stage.logic import RepeatsOutputs
from tokenbus.bus.stage.partition import Partition
from tokenbus.bus.stage.prepared_commit import PreparedCommit
from tokenbus.events.error_info import ErrorInfo


def repair_commit(past: Partition, lost: Sequence[PreparedCommit], error: ErrorInfo) -> Commit | None:
    """The commit that repairs the roll-back; None if no public event was lost.

    ``past`` is the partition in the state of the server's offset, ``lost`` the commits after it. The commit moves no
    offset. For each affected run it publishes the lost events again, so that the log has no gap, repeats what others
    wait for (`RepeatsOutputs`), and then ends the run in ``error`` unless its end was among them. Input of the run
    that is there at the commit is ignored: its request may come again meanwhile. Reload the partition afterwards.
    """
    commit, logic, keys = Commit(past.lease_key, past.stream), past.logic, past.keys
    numbers: dict[str, int] = {}
    for work in lost:
        past.replay(work.entries)
        for run in {name.decode(errors="replace") for _, fields in work.entries for name in fields}:
            if published := work.commit.last_of(keys.log(run)):
                numbers[run] = id_key(published)[1] + 1
    ours = {key for run in numbers for key in (keys.run(run), keys.log(run))}
    for work in lost:
        commit.repeat(work.commit, ours)
        if isinstance(logic, RepeatsOutputs):
            logic.repeat(work.commit, numbers, commit)
    for run, seq in sorted(numbers.items()):
        if logic.is_open(run):
            logic.recall(run, seq)
            logic.abandon(run, error)
        past.runs.drop_pieces(run, commit)
        commit.void(past.state_key, past.stream, run)
    logic.flush(commit)
    return commit if numbers else None
