"""The cost of work for each kind of process, in seconds of CPU."""

from __future__ import annotations

import msgspec


class ProcessCost(msgspec.Struct, frozen=True):
    """CPU of one kind of process."""

    turn_us: float
    """A turn of its event loop: the poll, a read of the socket, a command."""
    cold_us: float
    """The additional cost after a long sleep: other processes used the caches, the core slept deeper. After a sleep of
    t its share is 1 - exp(-t / `Costs.cold_s`).
    """
    item_us: float
    """An item: its meaning depends on the process, see `Costs`."""
    chunk_us: float
    run_us: float = 0.0
    """A run's start and end, without the cost of the provider's events for them."""

    def of(self, cold: float, items: int, chunks: int) -> float:
        """Seconds of one turn. ``cold``: from 0 to 1, by the length of the sleep."""
        return (self.turn_us + self.cold_us * cold + self.item_us * items + self.chunk_us * chunks) / 1e6


class Costs(msgspec.Struct, frozen=True):
    """Unit costs by kind of process. Items are:

    - provider: none; it stands for the outside world.
    - fetcher: a read of a socket, and a run's frame in a flush.
    - normalizer, parser: a run in a partition's batch.
    - server: a partition in a script. Its chunks are the written parts: a run's frame, each copy of a public event.
    - subscriber, gateway: a public event.
    """

    processes: dict[str, ProcessCost]
    hop_us: float
    """From the moment at which a turn sends until its receiver is ready to run, on one machine."""
    cold_s: float = 0.002
    """See `ProcessCost.cold_us`."""
    sent_at: float = 0.9
    """When a turn sends, as a share of its time. Traces of the scheduler (`perf sched`) show 0.89 to 0.98 for fetcher,
    normalizer, parser and server.
    """
    jitter: float = 0.35
    """How much the time of a turn varies: the standard deviation of its logarithm. In the same traces provider and
    subscriber, whose turns are all of one kind, have 0.25 to 0.45.
    """
