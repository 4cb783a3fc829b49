"""One stage over its partitions: owned by a lease, read in order, committed exactly once.

The logic that a stage applies is the service's own.
"""
