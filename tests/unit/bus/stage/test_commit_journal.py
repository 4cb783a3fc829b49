"""The journal of a partition: what it keeps of the last commits, and what it says of those that a fail-over lost."""

from __future__ import annotations

from tokenbus.bus.scripts import Commit
from tokenbus.bus.scripts.commit import HELD_PER_ARG
from tokenbus.bus.stage.commits import KEPT_S, MAX_BYTES, CommitJournal
from tokenbus.bus.stage.partition import AppliedBatch


def work(data: bytes = b"") -> AppliedBatch:
    commit = Commit("lease", "stream")
    commit.publish("log", "1-0", data, ["topic"])
    return AppliedBatch(begin="0-0", entries=[], commit=commit)


def filled(*times: float, data: bytes = b"") -> tuple[CommitJournal, list[AppliedBatch]]:
    """A journal whose commit number n led from offset n to n + 1."""
    kept, works = CommitJournal("0-0"), [work(data) for _ in times]
    for n, (at, each) in enumerate(zip(times, works, strict=True)):
        kept.keep(f"{n + 1}-0", each, at)
    return kept, works


def test_entries_after_an_offset_are_returned_in_order():
    kept, works = filled(1.0, 2.0, 3.0)
    assert kept.after("0-0") == works
    assert kept.after("1-0") == works[1:]
    assert kept.after("3-0") == []
    assert kept.is_ahead_of("2-0")
    assert not kept.is_ahead_of("3-0")


def test_commits_that_every_replica_has_by_now_are_forgotten():
    kept, works = filled(0.0, 1.0, KEPT_S + 0.5)
    assert kept.after("1-0") == works[1:]
    assert kept.after("0-0") == [], "a part of what was lost would leave a gap in the logs"


def test_the_journal_drops_nothing_during_an_outage():
    kept, works = filled(0.0, 0.1, 0.2)
    assert kept.after("0-0") == works  # nothing but a commit lets time pass


def test_it_buffers_no_more_bytes_than_its_bound_for_outputs_of_any_size():
    data = bytes(MAX_BYTES // 4)
    kept, works = filled(*[0.0] * 20, data=data)
    assert kept.after("17-0") == works[17:]
    assert kept.after("16-0") == []


def test_payloads_count_in_every_operation_of_a_commit():
    commit = Commit("lease", "stream")
    before = commit.held
    commit.publish("log", "1-0", bytes(1000), [])
    commit.append("events", ["r", bytes(1000)])
    commit.put("run", "result", bytes(1000))
    assert commit.held - before > 3000
    assert AppliedBatch(begin="0-0", entries=[], commit=commit, size=500).memory_bytes == commit.held + 500


def test_many_small_commits_are_bounded_too():
    number = MAX_BYTES // HELD_PER_ARG
    kept, _ = filled(*[0.0] * number)
    assert len(kept.after(f"{number - 10}-0")) == 10
    assert kept.after("0-0") == []
