"""How many partitions a worker is due; the lag of a stage from the counters of its lease."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.bus.leases import lag_of, partition_share


@given(st.sets(st.text(), min_size=1, max_size=40), st.integers(1, 4096))
def test_all_partitions_are_shared_out_and_shares_differ_by_at_most_one(workers: set[str], partitions: int):
    shares = [partition_share(worker, list(workers), partitions) for worker in workers]
    assert sum(shares) == partitions
    assert max(shares) - min(shares) <= 1


@given(st.sets(st.text(), max_size=5), st.integers(1, 64))
def test_an_unlisted_worker_has_no_share(workers: set[str], partitions: int):
    assert partition_share("somebody", list(workers - {"somebody"}), partitions) == 0


@given(st.permutations(["a", "b", "c", "d", "e"]), st.integers(1, 64))
def test_the_order_of_the_list_does_not_matter(workers: list[str], partitions: int):
    for worker in workers:
        assert partition_share(worker, workers, partitions) == partition_share(worker, sorted(workers), partitions)


def test_the_lag_is_what_arrived_and_is_not_done() -> None:
    assert lag_of(b"12", b"5") == 7


def test_a_group_that_never_counted_has_no_lag() -> None:
    assert lag_of(None, None) == 0


def test_arrivals_lost_in_a_fail_over_do_not_make_the_lag_negative() -> None:
    assert lag_of(b"5", b"12") == 0
