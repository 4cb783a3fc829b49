"""The journal of a partition: what it keeps of the last commits, and what it says of those that a fail-over lost."""

from __future__ import annotations

from tokenbus.bus.scripts import Commit
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


def said(batches: list[AppliedBatch]) -> list[tuple[str, bytes]]:
    return [(each.begin, each.commit.encoded()) for each in batches]


def test_entries_after_an_offset_are_returned_in_order():
    kept, works = filled(1.0, 2.0, 3.0)
    assert said(kept.after("0-0")) == said(works)
    assert said(kept.after("1-0")) == said(works[1:])
    assert kept.after("3-0") == []
    assert kept.is_ahead_of("2-0")
    assert not kept.is_ahead_of("3-0")


def test_commits_that_every_replica_has_by_now_are_forgotten():
    kept, works = filled(0.0, 1.0, KEPT_S + 0.5)
    assert said(kept.after("1-0")) == said(works[1:])
    assert kept.after("0-0") == [], "a part of what was lost would leave a gap in the logs"


def test_the_journal_drops_nothing_during_an_outage():
    kept, works = filled(0.0, 0.1, 0.2)
    assert said(kept.after("0-0")) == said(works)  # nothing but a commit lets time pass


def test_it_buffers_no_more_bytes_than_its_bound_for_outputs_of_any_size():
    data = bytes(MAX_BYTES // 4)
    kept, works = filled(*[0.0] * 20, data=data)
    assert said(kept.after("17-0")) == said(works[17:])
    assert kept.after("16-0") == []


def test_a_batch_comes_back_as_it_was_committed():
    kept, commit = CommitJournal("0-0"), Commit("lease", "stream")
    commit.publish("log", "1-7", b"data", ["topic"])
    commit.append("events", ["r", b"\xff"], of_run=True)
    commit.put("run", "seq", 8)
    kept.keep("2-0", AppliedBatch(begin="0-0", entries=[(b"2-0", {b"r": b"\xff"})], commit=commit), 0.0)
    [back] = kept.after("0-0")
    assert (back.begin, back.entries) == ("0-0", [(b"2-0", {b"r": b"\xff"})])
    assert (back.commit.keys, back.commit.kinds) == (commit.keys, commit.kinds)
    assert back.commit.operations == commit.operations
    assert back.commit.last_of("log") == "1-7"
    assert back.commit.appended("events") == [{b"r": b"\xff"}]


def test_many_small_commits_are_bounded_too():
    number = MAX_BYTES // 32
    kept, _ = filled(*[0.0] * number)
    assert len(kept.after(f"{number - 10}-0")) == 10
    assert kept.after("0-0") == []
