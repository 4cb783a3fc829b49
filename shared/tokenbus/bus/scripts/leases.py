"""Partition leases and group membership."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.scripts.script import MAX_VALUES, Arg, ScriptCall, script


@script()
def acquire(lease: str, stream: str, *, owner: str, ttl_ms: int, start: str = "0-0", mirror: str = "") -> ScriptCall:
    """Acquire the lease if it is free, expired or already ours. Reply: [token, offset, watermark, the token before]; an
    empty token if it is held by another worker.

    A token is a number and its owner's name. The number follows the server's clock instead of a counter, so a server
    that lost writes in a fail-over or a FLUSHALL does not issue a token twice. If the new server's clock is behind, a
    number may repeat, but only for the same owner. A group's first owner starts at ``start``: an id, or ``$`` for the
    end of the stream. ``mirror`` names the consumer group that shows the offset to standard tools; empty: none.
    """
    ...


@script()
def renew(lease: str, stream: str, *, token: str, ttl_ms: int) -> ScriptCall:
    """Renew the lease. Reply: the committed offset; empty if another token holds it.

    If the offset is before one that was committed, a fail-over lost writes. Also repairs the lag counters if the input
    is fully consumed and they disagree, as they do after such a fail-over.
    """
    ...


@script()
def release(lease: str, *, token: str) -> ScriptCall:
    """Release the lease; 0 if it was no longer ours. Its field ``released`` then has the token: this worker did not
    die with unfinished work.
    """
    ...


@script(MAX_VALUES=MAX_VALUES)
def present(members: str, *, member: str, ttl_ms: int) -> ScriptCall:
    """Heartbeat of one worker. Reply: the names of all workers with one within ``ttl_ms``, unordered."""
    ...


@script()
def note(lease: str, *, field: str, value: Arg) -> ScriptCall:
    """Set a field of the lease hash. The next owner reads it."""
    ...


@script()
def count(lease: str, *, field: str) -> ScriptCall:
    """Increment a field of the lease hash. Reply: the new value."""
    ...


@script()
def withdraw_replay(lease: str, *, token: str, count: str, notes: Sequence[Arg] = ()) -> ScriptCall:
    """Take back the count of a replay that its worker gave up because it stops or hands the partition over. ``notes``:
    their field and what it had before the replay; empty: the replay made none. Reply: 0 if nothing was taken back.
    """
    ...
