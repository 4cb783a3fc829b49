"""Errors by which a client learns that it has lost its connection to the server."""

from __future__ import annotations

from redis.exceptions import RedisClusterException, RedisError


def is_lost(error: Exception) -> bool:
    """Whether a command may be sent again.

    Besides its own errors, redis-py lets out two: uvloop's RuntimeError for a write to a socket that was reset, and its
    own AttributeError for a write to a connection that another task has closed.
    """
    if isinstance(error, AttributeError):
        return "writelines" in str(error)
    return isinstance(error, RedisError | RedisClusterException | OSError | RuntimeError)
