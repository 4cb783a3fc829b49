"""The bench: what a chunk costs through the running services, beside a bare chain of the same server.

`make bench`, or `python -m tests.bench --only NAME --json`. Linux only: CPU comes from /proc.
"""
