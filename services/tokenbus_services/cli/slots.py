"""`tokenbus slots`: how evenly the partitions of a deployment lie on the nodes of a Cluster. Asks no server."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from tokenbus.bus.keys import MAX_PARTITIONS, Keys
from tokenbus_services.cli.render import output

EVEN = 1.15
"""Load of the busiest node, as a multiple of the mean, up to which a number of partitions counts as even."""
SUGGESTED = 5


class Spread(msgspec.Struct, frozen=True):
    """How the partitions lie on the nodes, if each node has an equal range of slots."""

    partitions: int
    nodes: tuple[int, ...]
    """Number of partitions by node."""
    busiest: float
    """Partitions of the node that has most, as a multiple of the mean."""

    @property
    def even(self) -> bool:
        """Whether no node has much more than its share."""
        return self.busiest <= EVEN


def spread(partitions: int, nodes: int) -> Spread:
    keys, counts = Keys(), [0] * nodes
    for partition in range(partitions):
        slot = key_slot(keys.topic(partition, "raw").encode())
        counts[slot * nodes // REDIS_CLUSTER_HASH_SLOTS] += 1
    return Spread(partitions, tuple(counts), max(counts) * nodes / partitions)


def even_numbers(least: int, nodes: int) -> Iterator[Spread]:
    """Yield numbers of partitions from ``least`` on that lie evenly on the nodes."""
    for partitions in range(max(least, nodes), MAX_PARTITIONS + 1):
        found = spread(partitions, nodes)
        if found.even:
            yield found


def show(partitions: int, nodes: int, *, as_json: bool) -> None:
    """Print how these partitions lie, and the next numbers that lie evenly."""
    now = spread(partitions, nodes)
    better = [found for found, _ in zip(even_numbers(partitions, nodes), range(SUGGESTED), strict=False)]
    if as_json:
        facts = {"now": now, "even": [found.partitions for found in better]}
        output.print_json(facts)
        return
    counts = ", ".join(map(str, now.nodes))
    print(f"{partitions} partitions on {nodes} nodes: {counts}")
    print(f"the busiest has {now.busiest:.2f} times the mean: {'even' if now.even else 'uneven'}")
    if not now.even:
        numbers = ", ".join(f"{found.partitions} ({found.busiest:.2f})" for found in better)
        print(f"take {numbers}" if better else f"no number up to {MAX_PARTITIONS} is spread evenly")
