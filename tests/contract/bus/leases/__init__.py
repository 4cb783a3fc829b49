"""Leases of partitions."""
