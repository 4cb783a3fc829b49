"""The gates of a run: what may enter `turns`, `raw` and `events` from outside an ordered stage."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.scripts.call import MAX_VALUES, Arg, Call, script

_ACCEPT = script(
    "accept",
    """
local h = redis.call('HMGET', KEYS[1], 'status', 'cancel')
if h[1] and h[1] ~= 'awaited' then return h[1] end
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
redis.call('HSET', KEYS[1], 'status', status, 'attempt', 1, 'raw', 0, 'seq', 0, unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 'new'
""",
)


def accept(
    run_key: str,
    events: str,
    turns: str,
    parser_lease: str,
    log: str,
    *,
    run: str,
    ttl_ms: int,
    frame: bytes,
    work: bytes,
    fields: Sequence[Arg],
) -> Call:
    """Make the run, with its first event and, unless ``work`` is empty, its first turn: all or nothing.

    Reply: ``new``, or the status of the run that has this id already (nothing is written then). A cancel that
    came before its run (status ``awaited``) takes effect at once: no turn is handed out. A log left from an
    expired run of the same id is deleted, for its entry ids would stand in the way.
    """
    return Call(_ACCEPT, [run_key, events, turns, parser_lease, log], [run, ttl_ms, frame, work, *fields])


_CANCEL = script(
    "cancel",
    """
local h = redis.call('HMGET', KEYS[1], 'status', 'attempt', 'closed', 'turn')
local status = h[1]
if not status then
  redis.call('HSET', KEYS[1], 'status', 'awaited', 'cancel', ARGV[3])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 'awaited'
end
if status ~= 'open' then return status end
redis.call('XADD', KEYS[2], '*', ARGV[1], ARGV[3])
redis.call('HINCRBY', KEYS[5], 'arrived', #ARGV[3])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', ARGV[1], ARGV[4])
if h[3] ~= h[2] then
  -- A RawFrame that ends the present attempt (see frames.py): turn, attempt, any frame, no time, its one item.
  local turn, attempt = tonumber(h[4] or '0'), tonumber(h[2])
  local lost = cmsgpack.pack({turn, attempt, -1, 0, {{'lost', 'the run was cancelled'}}})
  redis.call('XADD', KEYS[3], '*', ARGV[1], lost)
  redis.call('HINCRBY', KEYS[6], 'arrived', #lost)
end
redis.call('HSET', KEYS[1], 'status', 'cancelling', 'closed', h[2])
return 'cancelling'
""",
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
) -> Call:
    """Cancel an open run: from now on its attempt may write nothing, its workers are told, the parser ends it.

    Reply: ``cancelling``; the run's status where it is not open any more; ``awaited`` where the run is not
    known yet: then the cancel waits ``awaited_ms`` for it.
    """
    return Call(
        _CANCEL,
        [run_key, events, raw, control, parser_lease, normalizer_lease],
        [run, awaited_ms, frame, control_frame],
    )


_APPEND = script(
    "append",
    """
local out, fields, writes, size = {}, {}, {}, 0
local n = (#ARGV) / 5
for k = 0, n - 1 do
  local run, attempt, frame, final, data = unpack(ARGV, k * 5 + 1, k * 5 + 5)
  local key = KEYS[3 + k]
  local h = redis.call('HMGET', key, 'status', 'attempt', 'raw', 'closed')
  if not h[1] then out[k + 1] = 'gone'
  elseif h[1] ~= 'open' then out[k + 1] = h[1]
  elseif h[2] ~= attempt then out[k + 1] = 'attempt ' .. h[2]
  elseif frame ~= '-1' and tonumber(h[3]) == tonumber(frame) + 1 then out[k + 1] = 'already'
  elseif h[4] == attempt then out[k + 1] = 'closed'
  elseif frame ~= '-1' and h[3] ~= frame then out[k + 1] = 'frame ' .. h[3]
  else
    out[k + 1] = 'ok'
    fields[#fields + 1] = run
    fields[#fields + 1] = data
    size = size + #data
    writes[#writes + 1] = {key, frame == '-1' and h[3] or h[3] + 1, final, attempt}
  end
end
if size > 0 then
  for i = 1, #fields, MAX_VALUES do
    redis.call('XADD', KEYS[1], '*', unpack(fields, i, math.min(i + MAX_VALUES - 1, #fields)))
  end
  for _, w in ipairs(writes) do
    if w[3] == '1' then redis.call('HSET', w[1], 'raw', w[2], 'closed', w[4])
    else redis.call('HSET', w[1], 'raw', w[2]) end
  end
  redis.call('HINCRBY', KEYS[2], 'arrived', size)
end
local c = redis.call('HMGET', KEYS[2], 'arrived', 'done')
out[n + 1] = tonumber(c[1] or '0') - tonumber(c[2] or '0')
return out
""".replace("MAX_VALUES", str(MAX_VALUES)),
)


class RawPart(msgspec.Struct, frozen=True):
    """One run's part of a raw append: its frame ``n`` (or ANY_FRAME), and whether it is the attempt's last."""

    run: str
    run_key: str
    attempt: int
    n: int
    final: bool
    data: bytes


def append_raw(raw: str, normalizer_lease: str, parts: Sequence[RawPart]) -> Call:
    """Write frames of several runs of one partition as one entry; each run is judged for itself.

    Each run may stand in ``parts`` once. Reply: for each part ``ok``, ``already`` (this frame is in: a lost
    reply), or why it is refused (``gone``, a status, ``attempt N``, ``closed``, ``frame N``); last, the lag in bytes.
    """
    args: list[Arg] = []
    for p in parts:
        args += (p.run, p.attempt, p.n, 1 if p.final else 0, p.data)
    return Call(_APPEND, [raw, normalizer_lease, *(p.run_key for p in parts)], args)


_TOOL_RESULT = script(
    "tool_result",
    """
local h = redis.call('HMGET', KEYS[1], 'status', ARGV[2])
if h[1] ~= 'open' or h[2] ~= ARGV[3] then return 0 end
redis.call('XADD', KEYS[2], '*', ARGV[1], ARGV[4])
redis.call('HINCRBY', KEYS[3], 'arrived', #ARGV[4])
redis.call('HDEL', KEYS[1], ARGV[2])
return 1
""",
)


def call_field(block: int) -> str:
    """The field of a run's hash that stands while the call of this block is open; its value is the attempt."""
    return f"call:{block}"


def so_far_field(attempt: int) -> str:
    """The field of a run's hash that holds the text from which this attempt goes on (prefill mode)."""
    return f"so_far:{attempt}"


def tool_result(
    run_key: str, events: str, parser_lease: str, *, run: str, block: int, attempt: int, frame: bytes
) -> Call:
    """Hand in a tool's result: 1, or 0 where the call is not open: a second result, a cancel, a newer attempt."""
    return Call(_TOOL_RESULT, [run_key, events, parser_lease], [run, call_field(block), attempt, frame])
