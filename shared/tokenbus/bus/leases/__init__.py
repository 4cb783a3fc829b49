"""Ownership of partitions: leases with fencing tokens, shared fairly among the workers of a group. What an owner does
with its partition is not here.
"""
