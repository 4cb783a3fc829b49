"""Places for concurrent look-ups of runs: each brings a request into memory, which may be large."""

from __future__ import annotations

from asyncio import Semaphore

from tokenbus.bus.keys import Keys


class LookUps:
    """In a Cluster each partition has places of its own, because its node may be away. Their number follows the
    partitions: what still looks up when it changes keeps its old place.
    """

    def __init__(self, keys: Keys, *, most: int, apart: bool) -> None:
        """``most``: maximum look-ups over all partitions, but at least one in each. ``apart``: the server is a
        Cluster.
        """
        self._keys = keys
        self._most = most
        self._apart = apart
        self._places: list[Semaphore] = []

    def of(self, run: str) -> Semaphore:
        """The places of this run's partition."""
        number = self._keys.partitions if self._apart else 1
        if len(self._places) != number:
            self._places = [Semaphore(max(1, self._most // number)) for _ in range(number)]
        return self._places[self._keys.partition_of(run) % number]
