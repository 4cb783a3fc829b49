"""What work costs each kind of process, in seconds of CPU."""

from __future__ import annotations

import msgspec


class ProcessCost(msgspec.Struct, frozen=True):
    """CPU of one kind of process."""

    wake_us: float
    """A loop turn after sleep: the system's wake-up, the poll, and the fixed cost of a turn."""
    cold_us: float
    """What comes to that after a sleep of `Costs.cold_s` or more: caches that others used, a core that slept deeper. In
    proportion after a shorter one.
    """
    item_us: float
    """An item: what it is depends on the process, see `Costs`."""
    chunk_us: float
    run_us: float = 0.0
    """A run's start and its end."""

    def of(self, slept: bool, cold: float, items: int, chunks: int) -> float:
        """Seconds of one turn. ``cold``: from 0 to 1, by how long it slept."""
        return (self.wake_us * slept + self.cold_us * cold + self.item_us * items + self.chunk_us * chunks) / 1e6


class Costs(msgspec.Struct, frozen=True):
    """Unit costs by kind of process. Items are:

    - provider: nothing; it stands for the world outside.
    - fetcher: a read of a socket, and a partition in a flush.
    - normalizer, parser: a run in a partition's batch.
    - server: a script, a read, and a run's frame or public event that is written.
    - subscriber, gateway: a public event.
    """

    processes: dict[str, ProcessCost]
    hop_us: float
    """From the end of a turn that sends until its receiver is ready to run, on one machine."""
    cold_s: float = 0.005
    """A sleep after which a process is as cold as it gets."""
    sent_at: float = 0.7
    """When a turn sends, as a share of its time. What follows nobody waits for: bookkeeping of what was sent, the
    poll.
    """
    jitter: float = 0.0
    """How much the time of a turn varies: the standard deviation of its logarithm."""
