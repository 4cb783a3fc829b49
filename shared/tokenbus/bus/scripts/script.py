"""A Lua script, and a call of it that can be sent alone or with others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from typing import TypeAlias

import msgspec

Arg: TypeAlias = str | bytes | int

NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"
"""The server's Unix time in ms, as ``now``."""

ROOM = "redis.call('HDEL', KEYS[1], '')\n"
"""Precedes the first write of scripts that end runs, free memory or keep a worker's claim: lets them run on a full
server.

A server above its ``maxmemory`` refuses commands that may take memory, unless the script has written already (every
version does: https://github.com/redis/redis/issues/8478). Redis 7 has a flag for this, 6.2 has not; a HDEL that deletes
nothing works in both. ``KEYS[1]`` must be a hash or missing.
"""

_MANY = " of many"
MAX_VALUES = 4000
"""Maximum values per call of Lua's ``unpack``; Lua's stack ends at about 8000."""


class LuaScript(msgspec.Struct, frozen=True):
    """One Lua script: its text and the SHA-1 under which the server caches it."""

    name: str
    text: str
    sha: str


def script(name: str, text: str) -> LuaScript:
    """Create and register the script with this text."""
    made = LuaScript(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())
    _made[made.sha] = made
    return made


_made: dict[str, LuaScript] = {}
"""All scripts of the imported modules by SHA-1."""


def known_scripts() -> list[LuaScript]:
    """The scripts of all imported modules, and the `joined` version of each."""
    for one in [one for one in _made.values() if not one.name.endswith(_MANY)]:
        _of_many(one)
    return list(_made.values())


class ScriptCall(msgspec.Struct, frozen=True):
    """One script with its keys and arguments."""

    script: LuaScript
    keys: Sequence[str]
    args: Sequence[Arg]


def joined(calls: Sequence[ScriptCall]) -> ScriptCall:
    """Join several calls of one script into one call that runs them in order. Not for a Cluster: their slots may
    differ.

    Reply: the reply of each call, in order. If a call fails, its error is its reply, and the others still run.
    """
    keys: list[str] = []
    args: list[Arg] = []
    for call in calls:
        keys += call.keys
        args += (len(call.keys), len(call.args), *call.args)
    return ScriptCall(_of_many(calls[0].script), keys, args)


@cache
def _of_many(one: LuaScript) -> LuaScript:
    return script(f"{one.name}{_MANY}", _OF_MANY % one.text)


_OF_MANY = """
local function one(KEYS, ARGV)
%s
end
local replies, n, k, a = {}, 0, 0, 1
while ARGV[a] do
  local keys, args, ks, as = {}, {}, tonumber(ARGV[a]), tonumber(ARGV[a + 1])
  for i = 1, ks do keys[i] = KEYS[k + i] end
  for i = 1, as do args[i] = ARGV[a + 1 + i] end
  local ok, reply = pcall(one, keys, args)
  -- An error is a table from Redis 7 on, and before that a text.
  if not ok and type(reply) ~= 'table' then reply = {err = tostring(reply)} end
  n, k, a = n + 1, k + ks, a + 2 + as
  replies[n] = reply or false
end
return replies
"""
