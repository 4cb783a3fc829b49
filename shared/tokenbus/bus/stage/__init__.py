"""Ordered stage: a worker owns partitions by lease, reads each in order and commits exactly once.

The logic that a stage applies belongs to the service that runs it.
"""
