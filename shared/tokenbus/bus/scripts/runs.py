"""Guarded writes to `turns`, `raw` and `events` from outside an ordered stage."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.run_record import call_field
from tokenbus.bus.scripts.run_index import LIST_OF_TENANT
from tokenbus.bus.scripts.script import MAX_VALUES, ROOM, Arg, ScriptCall, script

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


_APPEND = script(
    "append",
    """
-- Append raw frames of several runs as one entry; each frame is checked.
-- KEYS: 1 raw (stream), 2 lease of the normalizer (hash), 3 and further: the runs' hashes, then the policy stage's
-- lease
-- if its lag is wanted.
-- ARGV: 1 and further: run, attempt, frame number, whether it is the last, frame and writer of each.
-- Reply: a verdict for each frame, the normalizer's lag, and the policy stage's.
-- Atomic: an attempt that was closed, or that another worker makes, writes nothing, and no frame is written twice.
local out, fields, writes, records, size, ends = {}, {}, {}, {}, 0, false
local n = (#ARGV) / 6
local policy = KEYS[n + 3]
for k = 0, n - 1 do
  local run, attempt, frame, final, data, writer = unpack(ARGV, k * 6 + 1, k * 6 + 6)
  local key = KEYS[3 + k]
  local h = redis.call('HMGET', key, 'status', 'attempt', 'raw', 'closed', 'writer', 'record')
  if not h[1] then out[k + 1] = 'gone'
  elseif h[1] ~= 'open' then out[k + 1] = h[1]
  elseif h[2] ~= attempt then out[k + 1] = 'attempt ' .. h[2]
  elseif frame ~= '-1' and tonumber(h[3]) == tonumber(frame) + 1 and h[5] == writer then out[k + 1] = 'already'
  elseif h[4] == attempt then out[k + 1] = 'closed'
  elseif frame ~= '-1' and h[3] ~= frame then out[k + 1] = 'frame ' .. h[3]
  elseif tonumber(frame) > 0 and h[5] ~= writer then out[k + 1] = 'writer ' .. (h[5] or '')
  else
    out[k + 1] = 'ok'
    ends = ends or final == '1'
    fields[#fields + 1] = run
    fields[#fields + 1] = data
    size = size + #data
    writes[#writes + 1] = {key, frame == '-1' and h[3] or h[3] + 1, final, attempt, frame == '0' and writer}
    if h[6] then
      local field = 'frame:' .. attempt .. ':' .. frame
      records[#records + 1] = {key, tonumber(h[6]) - #data, field, data}
    end
  end
end
-- A full server accepts what ends an attempt; all else is answered `full`. It can refuse the first write only.
if ends then redis.call('HDEL', KEYS[2], '') end
if size > 0 then
  for i = 1, #fields, MAX_VALUES do
    local added = redis.pcall('XADD', KEYS[1], '*', unpack(fields, i, math.min(i + MAX_VALUES - 1, #fields)))
    if type(added) == 'table' and added.err then
      if not string.find(added.err, 'OOM') then return added end
      for k = 1, n do if out[k] == 'ok' then out[k] = 'full' end end
      size = 0
      break
    end
  end
end
if size > 0 then
  for _, w in ipairs(writes) do
    if w[3] == '1' then redis.call('HSET', w[1], 'raw', w[2], 'closed', w[4])
    else redis.call('HSET', w[1], 'raw', w[2]) end
    if w[5] then redis.call('HSET', w[1], 'writer', w[5]) end
  end
  for _, r in ipairs(records) do
    redis.call('HSET', r[1], 'record', r[2])
    if r[2] >= 0 then redis.call('HSET', r[1], r[3], r[4]) end
  end
  redis.call('HINCRBY', KEYS[2], 'arrived', size)
end
local c = redis.call('HMGET', KEYS[2], 'arrived', 'done')
out[n + 1] = tonumber(c[1] or '0') - tonumber(c[2] or '0')
if policy then
  local p = redis.call('HMGET', policy, 'arrived', 'done')
  out[n + 2] = tonumber(p[1] or '0') - tonumber(p[2] or '0')
end
return out
""".replace("MAX_VALUES", str(MAX_VALUES)),
)


class RawPart(msgspec.Struct, frozen=True):
    """One run's part of a raw append: frame ``n`` (or ANY_FRAME), and whether it is the attempt's last."""

    run: str
    run_key: str
    attempt: int
    n: int
    final: bool
    data: bytes
    writer: str = ""
    """Unique name of the writer of the attempt's frames. Ignored for ANY_FRAME."""


def append_raw(
    raw: str, normalizer_lease: str, parts: Sequence[RawPart], *, policy_lease: str | None = None
) -> ScriptCall:
    """Write frames of several runs of one partition as one entry; each run is checked on its own.

    ``parts`` holds each run at most once. Reply, for each part: ``ok``, ``already`` (this frame is in; its reply was
    lost), ``full`` (the server has memory only for frames that end attempts: retry), or why it is refused (``gone``, a
    status, ``attempt N``, ``closed``, ``frame N``, ``writer W``). Then the normalizer's lag in bytes and, with
    ``policy_lease``, the policy stage's. The writer of frame 0 must write all frames of the attempt. If a server loses
    the fact that it handed out the attempt and gives it to a second worker, the frames of the two therefore never mix.

    A run whose hash has the field ``record`` is recorded: its frames are also kept in the hash as
    ``frame:<attempt>:<n>`` until the byte budget in that field is used up.
    """
    args: list[Arg] = []
    for p in parts:
        args += (p.run, p.attempt, p.n, 1 if p.final else 0, p.data, p.writer)
    keys = [raw, normalizer_lease, *(p.run_key for p in parts)]
    return ScriptCall(_APPEND, keys + ([policy_lease] if policy_lease else []), args)


_OF_OPEN_CALL = """
local h = redis.call('HMGET', KEYS[1], 'status', ARGV[2])
if h[1] ~= 'open' or h[2] ~= ARGV[3] then return 0 end
ROOM
redis.call('XADD', KEYS[2], '*', ARGV[1], ARGV[4])
redis.call('HINCRBY', KEYS[3], 'arrived', #ARGV[4])
""".replace("ROOM", ROOM)
_TOOL_RESULT = script(
    "tool_result",
    """
-- Append a tool's result, and close its call.
-- KEYS: 1 run (hash), 2 events (stream), 3 lease of the parser (hash).
-- ARGV: 1 run, 2 field of the call, 3 attempt, 4 event.
-- Reply: 1, or 0 if the call is not open.
-- Atomic: of two results, one is appended.
"""
    + _OF_OPEN_CALL
    + "redis.call('HDEL', KEYS[1], ARGV[2])\nreturn 1\n",
)
_TOOL_PROGRESS = script(
    "tool_progress",
    """
-- Append a tool's progress. The call stays open.
-- KEYS: 1 run (hash), 2 events (stream), 3 lease of the parser (hash).
-- ARGV: 1 run, 2 field of the call, 3 attempt, 4 event.
-- Reply: 1, or 0 if the call is not open.
-- Atomic: no progress follows the call's result.
"""
    + _OF_OPEN_CALL
    + "return 1\n",
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


def tool_result(
    run_key: str, events: str, parser_lease: str, *, run: str, block: int, attempt: int, frame: bytes
) -> ScriptCall:
    """Submit a tool's result: 1, or 0 if the call is not open (a second result, a cancel, a newer attempt)."""
    return ScriptCall(_TOOL_RESULT, [run_key, events, parser_lease], [run, call_field(block), attempt, frame])


def tool_progress(
    run_key: str, events: str, parser_lease: str, *, run: str, block: int, attempt: int, frame: bytes
) -> ScriptCall:
    """Submit progress of a call, which stays open: 1, or 0 if it is not open. Sent again, it is published again."""
    return ScriptCall(_TOOL_PROGRESS, [run_key, events, parser_lease], [run, call_field(block), attempt, frame])


_APPEND_VERDICTS = script(
    "rule",
    """
-- Append policy verdicts of a run.
-- KEYS: 1 run (hash), 2 events (stream), 3 lease of the parser, 4 lease of the policy stage (hashes).
-- ARGV: 1 run, 2 token, 3 event.
-- Reply: 'ok', 'fenced', 'gone', or the status of a run that is not open.
-- Atomic: a worker that lost the partition appends nothing.
if redis.call('HGET', KEYS[4], 'token') ~= ARGV[2] then return 'fenced' end
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= 'open' then return status or 'gone' end
ROOM
redis.call('XADD', KEYS[2], '*', ARGV[1], ARGV[3])
redis.call('HINCRBY', KEYS[3], 'arrived', #ARGV[3])
return 'ok'
""".replace("ROOM", ROOM),
)


def append_verdicts(
    run_key: str, events: str, parser_lease: str, policy_lease: str, *, run: str, token: str, frame: bytes
) -> ScriptCall:
    """Submit policy verdicts of a run, as the owner of the policy lease with ``token``.

    Reply: ``ok``; or ``fenced``, ``gone``, or the run's status if it is no longer open: these write nothing. A retry
    after a lost reply may append it twice; the parser applies each part once.
    """
    return ScriptCall(_APPEND_VERDICTS, [run_key, events, parser_lease, policy_lease], [run, token, frame])
