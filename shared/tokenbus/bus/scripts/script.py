"""A script, and a call of it that is ready to be sent, alone or with others."""

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
"""Before the first write of what ends runs, frees memory or keeps a worker its work: it goes through on a full server.

A server beyond its ``maxmemory`` refuses what may take memory, unless the script wrote already (every version does:
https://github.com/redis/redis/issues/8478). Redis 7 has a flag for this, and 6.2 has not; deleting nothing does it in
both. ``KEYS[1]`` is a hash, or there is none."""

_MANY = " of many"
MAX_VALUES = 4000
"""Most values that Lua's ``unpack`` may push at once; its stack ends at some 8000."""


class Script(msgspec.Struct, frozen=True):
    """One Lua script: its text and the SHA-1 under which the server caches it."""

    name: str
    text: str
    sha: str


def script(name: str, text: str) -> Script:
    """The script of this text."""
    made = Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())
    _made[made.sha] = made
    return made


_made: dict[str, Script] = {}
"""Each script by its SHA-1, as the modules that have been imported made them."""


def known_scripts() -> list[Script]:
    """The scripts of all modules that have been imported, and what `joined` makes of each."""
    for one in [one for one in _made.values() if not one.name.endswith(_MANY)]:
        _of_many(one)
    return list(_made.values())


class ScriptCall(msgspec.Struct, frozen=True):
    """One script with its keys and arguments, to be sent alone or with others."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Arg]


def joined(calls: Sequence[ScriptCall]) -> ScriptCall:
    """Several calls of one script as one, which runs them in this order; not in a Cluster, for their slots may differ.

    Reply: the reply of each, in place. The error of one is its reply, and the others run all the same.
    """
    keys: list[str] = []
    args: list[Arg] = []
    for call in calls:
        keys += call.keys
        args += (len(call.keys), len(call.args), *call.args)
    return ScriptCall(_of_many(calls[0].script), keys, args)


@cache
def _of_many(one: Script) -> Script:
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
