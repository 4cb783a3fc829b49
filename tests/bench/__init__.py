"""The bench: the cost of a chunk through the running services, beside a bare chain on the same server.

`make bench`, or `python -m tests.bench --only NAME --json`. Linux only: CPU figures come from /proc.
"""
