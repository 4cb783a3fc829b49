"""What a stage has read and not yet worked in: bounded rounds, shared by the partitions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.contract.bus.toys import ToyLogic
from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.bus.stage.input import READ_BYTES, ROUND_BYTES, ReadBuffer, size_of
from tokenbus.bus.stage.partition import Partition

KEYS = Keys(prefix="t", partitions=4)


def partition(number: int) -> Partition:
    lease = Lease(number, "1", "0-0", "0-0")
    return Partition(lease, ToyLogic(number, KEYS), keys=KEYS, topic="raw", group="toy")


def entries(count: int, size: int) -> list[Entry]:
    return [(f"{n}-0".encode(), {b"run": b"x" * size}) for n in range(1, count + 1)]


def work(buffer: ReadBuffer, parts: Sequence[Partition]) -> list[tuple[int, list[bytes]]]:
    """One round, committed."""
    by_stream = {part.stream: part for part in parts}
    round_ = buffer.next_round(by_stream, lambda part: not part.paused)
    for batch in round_:
        part = parts[batch.partition]
        assert part.offset == batch.begin
        part.offset = batch.entries[-1][0].decode()
    return [(batch.partition, [entry[0] for entry in batch.entries]) for batch in round_]


def test_a_partition_with_much_to_do_delays_another_by_one_round() -> None:
    busy, calm = parts = [partition(0), partition(1)]
    buffer = ReadBuffer(max_entries=256)
    buffer.add(busy, "0-0", entries(100, ROUND_BYTES // 4))
    assert work(buffer, parts) == [(0, [b"1-0", b"2-0", b"3-0", b"4-0"])]
    buffer.add(calm, "0-0", entries(3, 10))
    assert work(buffer, parts) == [(0, [b"5-0", b"6-0"]), (1, [b"1-0", b"2-0", b"3-0"])]
    assert calm.stream not in buffer
    assert busy.stream in buffer


def test_each_entry_comes_once_and_in_order_even_if_one_is_larger_than_a_round() -> None:
    parts = [partition(0)]
    buffer = ReadBuffer(max_entries=256)
    buffer.add(parts[0], "0-0", entries(5, 2 * ROUND_BYTES))
    seen = [ids for _ in range(5) for _, ids in work(buffer, parts)]
    assert seen == [[f"{n}-0".encode()] for n in range(1, 6)]
    assert work(buffer, parts) == []


def test_a_partition_that_waits_for_the_next_stage_keeps_its_place() -> None:
    parts = [partition(0)]
    buffer = ReadBuffer(max_entries=256)
    buffer.add(parts[0], "0-0", entries(2, 10))
    parts[0].paused = True
    assert work(buffer, parts) == []
    assert parts[0].stream in buffer
    parts[0].paused = False
    assert work(buffer, parts) == [(0, [b"1-0", b"2-0"])]


def test_entries_of_a_partition_that_moved_on_or_was_reloaded_are_dropped() -> None:
    parts = [partition(0), partition(1)]
    buffer = ReadBuffer(max_entries=256)
    buffer.add(parts[0], "0-0", entries(20, ROUND_BYTES // 4))
    buffer.add(parts[1], "0-0", entries(20, ROUND_BYTES // 4))
    work(buffer, parts)
    parts[0].offset = "1-0"  # one entry of the batch was worked by itself
    parts[1] = partition(1)  # dropped and loaded again
    assert work(buffer, parts) == []
    assert not buffer.has_any(lambda part: True)


@pytest.mark.parametrize(("size", "most"), [(10, 256), (READ_BYTES // 8, 8), (2 * READ_BYTES, 1)])
def test_large_entries_are_read_a_few_at_a_time(size: int, most: int) -> None:
    buffer = ReadBuffer(max_entries=256)
    assert buffer.count == 256
    buffer.add(partition(0), "0-0", entries(4, size))
    assert buffer.count == most


def test_the_size_of_an_entry_is_that_of_its_frames() -> None:
    assert size_of((b"1-0", {b"a": b"123", b"b": b"45"})) == 5


def test_entries_that_are_put_back_come_next_and_the_others_after_them() -> None:
    part, buffer, read = partition(0), ReadBuffer(max_entries=256), entries(6, 100_000)
    buffer.add(part, "0-0", read)
    [batch] = buffer.next_round({part.stream: part}, lambda part: True)
    assert batch.entries == read[:1]
    buffer.put_back(part, batch.entries)  # none of them was applied
    assert [name for _ in read for _, names in work(buffer, [part]) for name in names] == [name for name, _ in read]
    assert part.stream not in buffer


def test_what_was_read_before_another_reader_went_on_is_not_handed_out_after_what_that_puts_back() -> None:
    part, buffer, read = partition(0), ReadBuffer(max_entries=256), entries(6, 10)
    buffer.add(part, "0-0", read)
    part.offset = "2-0"  # a chained flush read the same entries, and applied two of the first four
    buffer.put_back(part, read[2:4])
    assert work(buffer, [part]) == [(0, [b"3-0", b"4-0"])]
    assert part.stream not in buffer, "the rest is read again"
