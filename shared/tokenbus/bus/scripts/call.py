"""A script, and a call of it that is ready to be sent."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from typing import TypeAlias

import msgspec

Arg: TypeAlias = str | bytes | int

NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"
"""The server's Unix time in ms, as ``now``."""

MAX_VALUES = 4000
"""Most values that Lua's ``unpack`` may push at once; its stack ends at some 8000."""


class Script(msgspec.Struct, frozen=True):
    """One Lua script: its text and the SHA-1 under which the server caches it."""

    name: str
    text: str
    sha: str


def script(name: str, text: str) -> Script:
    """The script of this text."""
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class Call(msgspec.Struct, frozen=True):
    """One script with its keys and arguments, to be sent alone or in a pipeline."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Arg]
