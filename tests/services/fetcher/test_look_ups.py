"""Places for look-ups: in a Cluster a partition's node that is unavailable delays no other partition."""

from __future__ import annotations

from tokenbus.bus.keys import Keys
from tokenbus_services.fetcher.turn_admission import LookUps


def run_in(keys: Keys, partition: int) -> str:
    return next(run for n in range(1000) if keys.partition_of(run := f"run{n}") == partition)


async def test_partitions_that_are_added_have_places_of_their_own() -> None:
    keys = Keys("p", 2)
    places = LookUps(keys, most=8, apart=True)
    before = places.of(run_in(keys, 0))
    for _ in range(4):
        await before.acquire()
    assert before.locked()
    keys.apply((4, 2), 4, 1, (2, 4))
    each = [places.of(run_in(keys, partition)) for partition in range(4)]
    assert len(set(each)) == 4
    for place in each:
        await place.acquire()
        await place.acquire()
        assert place.locked(), "eight places in all"


async def test_on_one_server_all_share_their_places() -> None:
    keys = Keys("p", 2)
    places = LookUps(keys, most=8, apart=False)
    assert places.of(run_in(keys, 0)) is places.of(run_in(keys, 1))
