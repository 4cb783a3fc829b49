"""What an error reply of the server means: whether the same command may succeed later, and whose fault it is."""

from __future__ import annotations

import re

from redis.exceptions import ClusterError, DataError, NoScriptError, RedisError, ResponseError
from redis.exceptions import ConnectionError as ConnectionLost

from tokenbus.bus.server.durability import NotReplicated

_WRAPPED = re.compile(r"-([A-Z]+) ")
"""Redis 6.2 wraps the error of a command inside a script in its own text: ``… -OOM command not allowed …``."""
_NOT_NOW = frozenset({"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "READONLY", "UNBLOCKED"})
_NOT_YOU = frozenset({"NOAUTH", "NOPERM", "WRONGPASS"})
_YOUR_FAULT = frozenset(
    {"WRONGTYPE", "NOGROUP", "BUSYGROUP", "CROSSSLOT", "EXECABORT", "NOPROTO", "BUSYKEY", "INVALIDOBJ"}
)
_FAULT = re.compile(
    r"unknown (sub)?command|wrong number of arguments|syntax error|not an integer|not a valid float|no such key"
    r"|ID specified in XADD|Invalid stream ID|out of range|script: |user_script|running script|compiling script",
    re.IGNORECASE,
)
"""Final errors among those that begin with ERR, or that a script raised."""


class ValueTooLarge(ConnectionLost):
    """A reply has a larger value than a process reads. The connection was closed instead."""


def may_pass(error: RedisError | OSError) -> bool:
    """Whether the server reports a temporary state, so that the same command may succeed later."""
    if isinstance(error, (ClusterError, NoScriptError, NotReplicated)):
        return True
    return code_of(error) in _NOT_NOW | _NOT_YOU | {"OOM"}


def is_alien(error: object) -> bool:
    """Whether the server reports a key of the wrong type, which means that another program wrote it."""
    return isinstance(error, ResponseError) and code_of(error) == "WRONGTYPE"


def is_final(error: RedisError | OSError) -> bool:
    """Whether the server or redis-py rejected this command itself.

    Any other error may be temporary or not: a broken connection, an unknown reply, a proxy's own error.
    """
    if isinstance(error, (DataError, ValueTooLarge)):
        return True
    if may_pass(error):  # a script may have raised it
        return False
    return code_of(error) in _YOUR_FAULT or (isinstance(error, ResponseError) and bool(_FAULT.search(str(error))))


def code_of(error: Exception) -> str:
    """The error code of the server's reply; redis-py strips the codes that it knows."""
    if not isinstance(error, ResponseError):
        return ""
    if wrapped := _WRAPPED.search(str(error)):
        return wrapped[1]
    return getattr(error, "status_code", None) or str(error).partition(" ")[0]
