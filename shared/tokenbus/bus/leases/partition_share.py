"""How many partitions each worker of a group is due. Pure."""

from __future__ import annotations


def partition_share(worker: str, workers: list[str], partitions: int) -> int:
    """Number of partitions that this worker is due; 0 if the worker is not in the list."""
    ranked = sorted(workers)
    if worker not in ranked:
        return 0
    each, rest = divmod(partitions, len(ranked))
    return each + (ranked.index(worker) < rest)
