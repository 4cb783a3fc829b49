"""Repair of a partition's index of runs. `accept` and `Commit.end_run` write it; here is what they cannot know.

An index may have been lost, or could not be written, and it keeps open runs whose hash has expired.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.scripts.script import NOW, Arg, ScriptCall, script

MOST_FORGOTTEN = 8
"""Each run that ends drops at most this many from the index of ended runs, so that a commit's cost is bounded."""
LIFETIMES = 8
"""After this many lifetimes of an open run, a tenant's index drops a run that is still listed as open."""

INDEX_ENDED = """
-- The index only serves to find runs. If it cannot be written (wrong type, no permission), the commit succeeds
-- anyway.
local function index_ended(open_runs, ended_runs, run, keep)
  redis.pcall('ZREM', open_runs, run)
  if type(redis.pcall('ZADD', ended_runs, now, run)) ~= 'number' then return end
  local gone = redis.pcall('ZRANGEBYSCORE', ended_runs, '-inf', now - keep, 'LIMIT', 0, MOST_FORGOTTEN)
  if #gone > 0 then redis.pcall('ZREM', ended_runs, unpack(gone)) end
  local left = redis.pcall('PTTL', ended_runs)
  if type(left) == 'number' and left < keep then redis.pcall('PEXPIRE', ended_runs, keep) end
end
""".replace("MOST_FORGOTTEN", str(MOST_FORGOTTEN))
"""Lua: move a run to the index of ended runs. Needs ``now``."""

LIST_OF_TENANT = """
-- List an open run in its tenant's index, which lives as long as an open run's hash does. What was lost of it before
-- goes after some such lifetimes.
local function list_of_tenant(open_runs, run, accepted, ttl)
  if type(redis.pcall('ZADD', open_runs, 'NX', accepted, run)) ~= 'number' then return end
  local gone = redis.pcall('ZRANGEBYSCORE', open_runs, '-inf', accepted - LIFETIMES * ttl, 'LIMIT', 0, MOST_FORGOTTEN)
  if #gone > 0 then redis.pcall('ZREM', open_runs, unpack(gone)) end
  redis.pcall('PEXPIRE', open_runs, ttl)
end
""".replace("MOST_FORGOTTEN", str(MOST_FORGOTTEN)).replace("LIFETIMES", str(LIFETIMES))
"""Lua: list a run that is accepted."""

_LIST_OPEN = script(
    "list_open",
    """
-- List runs as open.
-- KEYS: 1 open runs (sorted set), 2 and further: of each run its hash and its tenant's open runs (or 1 again).
-- ARGV: 1 lifetime of an open run in ms, 2 and further: run, time of acceptance in ms, provider, model and tenant of
-- each.
-- Reply: the runs that are listed now.
-- Atomic: a run that ends is not listed again afterwards.
"""
    + LIST_OF_TENANT
    + """
local done = {}
for k = 2, #KEYS, 2 do
  local a = (k - 2) / 2 * 5 + 1
  local status = redis.pcall('HGET', KEYS[k], 'status')
  if status == 'open' or status == 'cancelling' or status == 'expiring' then
    if KEYS[k + 1] ~= KEYS[1] then list_of_tenant(KEYS[k + 1], ARGV[a + 1], ARGV[a + 2], ARGV[1]) end
    if type(redis.pcall('ZADD', KEYS[1], 'NX', ARGV[a + 2], ARGV[a + 1])) == 'number' then
      for i, field in ipairs({'accepted', 'provider', 'model', 'tenant'}) do
        if ARGV[a + 1 + i] ~= '' then redis.pcall('HSETNX', KEYS[k], field, ARGV[a + 1 + i]) end
      end
      done[#done + 1] = ARGV[a + 1]
    end
  end
end
return done
""",
)


class OpenRun(msgspec.Struct, frozen=True):
    """What the index and the run's hash should have of an open run."""

    key: str
    """The run's hash."""
    run: str
    accepted_ms: int
    provider: str
    model: str
    tenant: str
    of_tenant: str
    """Open runs of the tenant; all open runs if it has none."""


def list_open(open_runs: str, runs: Sequence[OpenRun], *, ttl_ms: int) -> ScriptCall:
    """List runs as open, unless they are listed or have ended. ``ttl_ms``: the lifetime of an open run. Reply: those
    that are listed now.
    """
    keys: list[str] = [open_runs]
    args: list[Arg] = [ttl_ms]
    for run in runs:
        keys += (run.key, run.of_tenant)
        args += (run.run, run.accepted_ms, run.provider, run.model, run.tenant)
    return ScriptCall(_LIST_OPEN, keys, args)


_UNLIST_ENDED = script(
    "unlist_ended",
    """
-- Remove runs from the index of open runs that are unknown or have ended.
-- KEYS: 1 open runs, 2 ended runs (sorted sets), 3 and further: the runs' hashes.
-- ARGV: 1 how long ended runs are listed, in ms, 2 and further: the runs.
-- Reply: how many were removed.
-- Atomic: a run that is accepted meanwhile stays listed.
"""
    + NOW
    + INDEX_ENDED
    + """
local ended = {completed = true, incomplete = true, failed = true, cancelled = true}
local done = 0
for k = 3, #KEYS do
  local run = ARGV[k - 1]
  local status = redis.pcall('HGET', KEYS[k], 'status')
  if not status or status == 'awaited' or type(status) == 'table' then
    redis.pcall('ZREM', KEYS[1], run)
    done = done + 1
  elseif ended[status] then
    redis.pcall('HSETNX', KEYS[k], 'ended', now)
    index_ended(KEYS[1], KEYS[2], run, tonumber(ARGV[1]))
    done = done + 1
  end
end
return done
""",
)


def unlist_ended(
    open_runs: str, ended_runs: str, run_keys: Sequence[str], runs: Sequence[str], *, keep_ms: int
) -> ScriptCall:
    """Drop runs that are listed as open and are unknown, and list those that have ended as ended. Reply: how many."""
    return ScriptCall(_UNLIST_ENDED, [open_runs, ended_runs, *run_keys], [keep_ms, *runs])
