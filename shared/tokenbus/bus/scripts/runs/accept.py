"""Creates and cancels runs: guarded writes to a run's hash and the streams that it begins in."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.scripts.runs.index import LIST_OF_TENANT
from tokenbus.bus.scripts.script import ROOM, Arg, ScriptCall, script

RUNS_SHARE = 0.9
"""Accept a new run only while less than this share of the server's ``maxmemory`` is in use; the rest is for open
runs.
"""

STALE = b"stale"
"""Reply: runs are placed by a later epoch than the caller's."""

_ACCEPT = script(
    "accept",
    """
-- Create a run: its hash, its first event, its first turn.
-- KEYS: 1 run (hash), 2 events, 3 turns (streams), 4 lease of the parser (hash), 5 log (stream), 6 open runs, 7
-- ended runs, and of a run with a tenant 8 the tenant's open runs, 9 its ended runs (sorted sets).
-- ARGV: 1 run, 2 lifetime in ms, 3 first event, 4 first turn or '', 5 time of acceptance in ms, 6 epoch, 7 and
-- further:
-- fields of the hash.
-- Reply: 'new', the status of the run that is there, or 'stale'.
-- Atomic: a request that is delivered twice creates one run, and a cancel that came first takes effect.
"""
    + LIST_OF_TENANT
    + """
local h = redis.call('HMGET', KEYS[1], 'status', 'cancel')
if h[1] and h[1] ~= 'awaited' then return h[1] end
local epoch = redis.call('HGET', KEYS[4], 'epoch')
if epoch and tonumber(epoch) > tonumber(ARGV[6]) then return 'stale' end
if ARGV[4] ~= '' then
  local memory = redis.call('INFO', 'memory')
  local used, most = string.match(memory, 'used_memory:(%d+)'), string.match(memory, 'maxmemory:(%d+)')
  if tonumber(most or '0') > 0 and tonumber(used) > tonumber(most) * SHARE then
    return redis.error_reply('OOM no room for further runs: what is left is for those that are open')
  end
end
redis.call('DEL', KEYS[5])
redis.call('XADD', KEYS[2], '*', ARGV[1], ARGV[3])
local size = #ARGV[3]
local status = 'open'
if h[1] then
  redis.call('XADD', KEYS[2], '*', ARGV[1], h[2])
  size = size + #h[2]
  redis.call('HDEL', KEYS[1], 'cancel')
  status = 'cancelling'
elseif ARGV[4] ~= '' then
  redis.call('XADD', KEYS[3], '*', ARGV[1], ARGV[4])
end
redis.call('HINCRBY', KEYS[4], 'arrived', size)
redis.call('HSET', KEYS[1], 'status', status, 'attempt', 1, 'raw', 0, 'seq', 0, 'accepted', ARGV[5], unpack(ARGV, 7))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
-- The index only serves to find runs. If it cannot be written (wrong type, no permission), the run is accepted
-- anyway.
redis.pcall('ZADD', KEYS[6], ARGV[5], ARGV[1])
redis.pcall('ZREM', KEYS[7], ARGV[1])
if KEYS[8] then
  list_of_tenant(KEYS[8], ARGV[1], ARGV[5], ARGV[2])
  redis.pcall('ZREM', KEYS[9], ARGV[1])
end
return 'new'
""".replace("SHARE", str(RUNS_SHARE)),
)


def accept(
    run_key: str,
    events: str,
    turns: str,
    parser_lease: str,
    log: str,
    *,
    open_runs: str,
    ended_runs: str,
    of_tenant: tuple[str, str] | None = None,
    run: str,
    accepted_ms: int,
    ttl_ms: int,
    frame: bytes,
    work: bytes,
    fields: Sequence[Arg],
    epoch: int = 0,
) -> ScriptCall:
    """Create the run with its first event and, unless ``work`` is empty, its first turn, and list it among the open
    runs: all or nothing. ``of_tenant``: the open and the ended runs of its tenant. ``accepted_ms``: time of acceptance
    in ms.

    Reply: ``new``, or the status of the existing run with this id (nothing is written then). If a cancel came before
    its run (status ``awaited``), it takes effect at once and no turn is handed out. Deletes the log of an expired run
    with the same id, because its entry ids would conflict. Error beginning with ``OOM`` if more than `RUNS_SHARE` of
    the server's memory is in use. `STALE` if runs are placed by a later ``epoch`` (bus/layout.py): nothing is written.
    """
    keys = [run_key, events, turns, parser_lease, log, open_runs, ended_runs, *(of_tenant or ())]
    return ScriptCall(_ACCEPT, keys, [run, ttl_ms, frame, work, accepted_ms, epoch, *fields])


STOP = """
local function stop(h, control_frame, why, status)
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', ARGV[1], control_frame)
  if h[3] ~= h[2] then
    -- A RawFrame that ends the present attempt (see frames/raw.py): turn, attempt, any frame, no time, its one item.
    local turn, attempt = tonumber(h[4] or '0'), tonumber(h[2])
    local lost = cmsgpack.pack({turn, attempt, -1, 0, {{'lost', why}}})
    redis.call('XADD', KEYS[3], '*', ARGV[1], lost)
    redis.call('HINCRBY', KEYS[6], 'arrived', #lost)
  end
  redis.call('HSET', KEYS[1], 'status', status, 'closed', h[2])
  return status
end
"""
"""Lua: stop the writes of an open run and notify its workers. ``h``: its status, attempt, closed and turn.

KEYS: run, events, raw, control, lease of the parser, lease of the normalizer; ARGV begins with the run.
"""

_CANCEL = script(
    "cancel",
    """
-- Cancel a run.
-- KEYS: 1 run (hash), 2 events, 3 raw, 4 control (streams), 5 lease of the parser, 6 lease of the normalizer
-- (hashes).
-- ARGV: 1 run, 2 how long a cancel waits for its run, in ms, 3 event, 4 control message, 5 epoch.
-- Reply: 'cancelling', 'awaited', 'stale', or the status of a run that is not open.
-- Atomic: from the same moment the attempt can write no more, and each worker is told.
"""
    + STOP
    + """
local h = redis.call('HMGET', KEYS[1], 'status', 'attempt', 'closed', 'turn')
local status = h[1]
ROOM
if not status then
  local epoch = redis.call('HGET', KEYS[5], 'epoch')
  if epoch and tonumber(epoch) > tonumber(ARGV[5]) then return 'stale' end
end
if not status or status == 'awaited' then
  redis.call('HSET', KEYS[1], 'status', 'awaited', 'cancel', ARGV[3])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 'awaited'
end
if status ~= 'open' then return status end
redis.call('XADD', KEYS[2], '*', ARGV[1], ARGV[3])
redis.call('HINCRBY', KEYS[5], 'arrived', #ARGV[3])
return stop(h, ARGV[4], 'the run was cancelled', 'cancelling')
""".replace("ROOM", ROOM),
)


def cancel(
    run_key: str,
    events: str,
    raw: str,
    control: str,
    *,
    parser_lease: str,
    normalizer_lease: str,
    run: str,
    awaited_ms: int,
    frame: bytes,
    control_frame: bytes,
    epoch: int = 0,
) -> ScriptCall:
    """Cancel an open run: refuse further writes of its attempt, notify its workers, and let the parser end it.

    Reply: ``cancelling``; the run's status if it is no longer open; ``awaited`` if the run is not known yet: the cancel
    then waits ``awaited_ms`` for it, counted from the last time it was sent. `STALE` as for `accept`.
    """
    return ScriptCall(
        _CANCEL,
        [run_key, events, raw, control, parser_lease, normalizer_lease],
        [run, awaited_ms, frame, control_frame, epoch],
    )


_ASK = script(
    "ask",
    """
-- Record that a policy asks for a run that is about to be published.
-- KEYS: 1 run (hash).
-- ARGV: 1 lifetime in ms.
-- Reply: 1, or 0 if the run is known already.
-- Atomic: a run that another client published is never marked.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'asked', 1)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
""",
)


def ask(run_key: str, *, ttl_ms: int) -> ScriptCall:
    """Record that a policy asks for this run, which is about to be published: 1, or 0 if the run is known already."""
    return ScriptCall(_ASK, [run_key], [ttl_ms])
