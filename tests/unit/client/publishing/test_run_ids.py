"""Run ids: RFC 9562 version 7, ascending within a process, and the same again for the same entry."""

from __future__ import annotations

import time
from uuid import RFC_4122, UUID

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.client.publishing import RunIds, new_run_id
from tokenbus.core.request.bounds import id_of_entry, uuid7


def test_the_example_of_rfc_9562_comes_out():
    # Appendix A.6: 2022-02-22 14:22:22.00 GMT-05:00, rand_a 0xCC3, rand_b 0b01 and 0x8C4DC0C0C07398F.
    rest = 0xCC3 << 62 | 0b01 << 60 | 0x8C4DC0C0C07398F
    assert uuid7(0x017F22E279B0, rest) == "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"


def test_a_new_id_is_a_uuid7_of_now():
    made = UUID(new_run_id())
    assert (made.version, made.variant) == (7, RFC_4122)
    assert abs((made.int >> 80) - time.time() * 1000) < 60_000


@given(st.lists(st.integers(min_value=0, max_value=2**48 - 1), min_size=2, max_size=50))
def test_ids_ascend_even_if_the_clock_jumps(clock: list[int]):
    ticks = iter(clock)
    ids = RunIds(lambda: next(ticks))
    made = [ids() for _ in clock]
    assert made == sorted(set(made))


def test_an_entry_delivered_twice_is_the_same_run_and_another_entry_is_another():
    first = id_of_entry("tokenbus:requests", "1700000000000-3")
    assert first == id_of_entry("tokenbus:requests", "1700000000000-3")
    assert first != id_of_entry("tokenbus:requests", "1700000000000-4")
    assert UUID(first).version == 7
    assert UUID(first).int >> 80 == 1700000000000
