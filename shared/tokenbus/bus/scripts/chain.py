"""Chained flush: raw frames of one partition, with the commits of both stages on them, in one atomic step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.scripts.commit import Commit
from tokenbus.bus.scripts.commit_operations import OPERATE
from tokenbus.bus.scripts.runs.attempt_fence import RawPart
from tokenbus.bus.scripts.script import NOW, ROOM, Arg, ScriptCall, script

MOST_UNREAD = 64
"""Maximum entries of other runs to apply together with a chained flush."""
MOST_PARTS = 1000
"""Maximum runs in one chained flush: Lua can unpack a few thousand values."""

_CHAIN = script(
    "chain",
    """
-- Write raw frames as one entry, with what two chained stages commit on it.
-- KEYS: 1 and 3 leases of the stages, 2 and 4 their inputs, 5 and further: the runs' hashes, the policy stage's
-- lease if
-- ARGV[20] is 1, the keys of the first commit, those of the second.
-- ARGV: 1, 2 tokens; 3, 5 offsets; 4, 6 last applied entries; 7 lease time in ms; 8, 9 watermarks; 10, 12 entries;
-- 11, 13 bytes; 14, 21 groups that show the offsets; 15 entries kept in a topic; 16 name of the flush; 17 number of
-- runs;
-- 18, 19 kinds of the commits' keys; 20 whether the policy stage's lag is wanted; 22 and further: six values a run,
-- the number of the first commit's operations, the operations of both.
-- Reply: see `chain`.
-- Atomic: outputs exist only if the frames do, and neither if a lease, an offset or an attempt is another's.
"""
    + NOW
    + OPERATE
    + """
local n = tonumber(ARGV[17])
local one = redis.call('HMGET', KEYS[1], 'token', 'offset', 'flush', 'entries', 'done', 'owed')
local two = redis.call('HMGET', KEYS[3], 'token', 'offset', 'entries', 'done', 'owed')
if one[1] ~= ARGV[1] or two[1] ~= ARGV[2] then return {'fenced', one[1] or '0', two[1] or '0'} end
if one[3] == ARGV[16] then return {'already', one[2], two[2]} end
local owing = (one[6] or '') ~= '' or (two[5] or '') ~= ''
if owing or one[2] ~= ARGV[3] or two[2] ~= ARGV[5] then return {'moved', one[2] or '0-0', two[2] or '0-0'} end
local function unread(stream, begin, seen)
  local found = redis.call('XRANGE', stream, '(' .. seen, '+', 'COUNT', MOST_UNREAD)
  if #found == 0 and seen ~= begin and not redis.call('XRANGE', stream, seen, seen)[1] then return nil end
  return found
end
local of_one, of_two = unread(KEYS[2], ARGV[3], ARGV[4]), unread(KEYS[4], ARGV[5], ARGV[6])
if not of_one or not of_two then return {'gone'} end
if #of_one > 0 or #of_two > 0 then return {'unread', of_one, of_two} end
-- A key of a wrong type that was read is an error already, before any write.
local known = {[KEYS[1]] = true, [KEYS[2]] = true, [KEYS[3]] = true, [KEYS[4]] = true}
local fields, writes, records, size, ends, at = {}, {}, {}, 0, false, 22
for k = 1, n do
  local run, attempt, frame, final, data, writer = unpack(ARGV, at, at + 5)
  at = at + 6
  local key = KEYS[4 + k]
  known[key] = true
  local h = redis.call('HMGET', key, 'status', 'attempt', 'raw', 'closed', 'writer', 'record')
  if h[1] ~= 'open' or h[2] ~= attempt or h[4] == attempt or h[3] ~= frame
    or (tonumber(frame) > 0 and h[5] ~= writer) then return {'refused', run} end
  ends = ends or final == '1'
  fields[#fields + 1] = run
  fields[#fields + 1] = data
  size = size + #data
  writes[k] = {key, h[3] + 1, final, attempt, frame == '0' and writer}
  if h[6] then
    records[#records + 1] = {key, tonumber(h[6]) - #data, 'frame:' .. attempt .. ':' .. frame, data}
  end
end
local base = 4 + n + ARGV[20]
local alien_one, alien_two = misfits(base, ARGV[18], known), misfits(base + #ARGV[18], ARGV[19], known)
if next(alien_one) or next(alien_two) then return {'misfit'} end
-- A full server accepts what ends an attempt. It can refuse the first write only.
if ends then ROOM end
local raw = redis.pcall('XADD', KEYS[2], '*', unpack(fields))
if type(raw) == 'table' and raw.err then
  if string.find(raw.err, 'OOM') then return {'full'} end
  return raw
end
for _, w in ipairs(writes) do
  if w[3] == '1' then redis.call('HSET', w[1], 'raw', w[2], 'closed', w[4])
  else redis.call('HSET', w[1], 'raw', w[2]) end
  if w[5] then redis.call('HSET', w[1], 'writer', w[5]) end
end
for _, r in ipairs(records) do
  redis.call('HSET', r[1], 'record', r[2])
  if r[2] >= 0 then redis.call('HSET', r[1], r[3], r[4]) end
end
redis.call('HINCRBY', KEYS[1], 'arrived', size)
lag = nil -- this script's reply has no lags, so no operation reads them
local middle = at + ARGV[at]
operate(at + 1, middle, base, alien_one, ARGV[15])
operate(middle + 1, #ARGV, base + #ARGV[18], alien_two, ARGV[15])
local events = added[KEYS[4]] or ARGV[6]
local till = now + ARGV[7]
local read, done = (one[4] or 0) + ARGV[10], (one[5] or 0) + ARGV[11]
move(KEYS[1], KEYS[2], raw, ARGV[8] ~= '' and ARGV[8] or raw, till, read, done, ARGV[14], 'flush', ARGV[16])
if events ~= ARGV[5] then
  read, done = (two[3] or 0) + ARGV[12], (two[4] or 0) + ARGV[13]
  move(KEYS[3], KEYS[4], events, ARGV[9] ~= '' and ARGV[9] or events, till, read, done, ARGV[21])
end
local reply = {'ok', raw, events}
if ARGV[20] == '1' then
  local p = redis.call('HMGET', KEYS[5 + n], 'arrived', 'done')
  reply[4] = tonumber(p[1] or '0') - tonumber(p[2] or '0')
end
return reply
""".replace("MOST_UNREAD", str(MOST_UNREAD)).replace("ROOM", ROOM.strip()),
)


class ChainedStage(msgspec.Struct, frozen=True):
    """One stage's side of a chained flush."""

    token: str
    begin: str
    """The committed offset."""
    seen: str
    """The last entry that was applied, besides those of this flush."""
    watermark: str
    """Empty: the entry that this flush writes."""
    entries: int
    size: int
    """Bytes of these entries' frames."""
    commit: Commit
    mirror: str


def chain(
    first: ChainedStage,
    second: ChainedStage,
    parts: Sequence[RawPart],
    *,
    flush: str,
    ttl_ms: int,
    entries_read: bool,
    topic_entries: int,
    policy_lease: str | None = None,
) -> ScriptCall:
    """Write raw frames as one entry, as `append_raw` does, and with it what both stages commit on it.

    ``flush``: unique name, so that a repetition after a lost reply is recognised. ``parts`` hold each run at most once.
    The commit of ``first`` appends to the input of ``second``; each offset moves to the last entry that this call
    appends to its stage's input.

    Reply: ``['ok', offset, offset]``, with the policy stage's lag in bytes if ``policy_lease`` is given; ``['already',
    offset, offset]``. All others write nothing: ``['fenced', token, token]``; ``['moved', offset, offset]`` or
    ``['gone']`` (a fail-over lost writes); ``['unread', entries, entries]``: what neither stage has applied;
    ``['refused', run]``: see `append_raw`; ``['misfit']``: a key has another type; ``['full']``.
    """
    mirrored = "7" if entries_read else "6"
    args: list[Arg] = [first.token, second.token, first.begin, first.seen, second.begin, second.seen, ttl_ms]
    args += [first.watermark, second.watermark, first.entries, first.size, second.entries, second.size]
    args += [mirrored + first.mirror, topic_entries, flush, len(parts), first.commit.kinds, second.commit.kinds]
    args += [1 if policy_lease else 0, mirrored + second.mirror]
    for p in parts:
        args += (p.run, p.attempt, p.n, 1 if p.final else 0, p.data, p.writer)
    args += (len(first.commit.operations), *first.commit.operations, *second.commit.operations)
    keys = [*first.commit.keys[:2], *second.commit.keys[:2], *(p.run_key for p in parts)]
    if policy_lease:
        keys.append(policy_lease)
    return ScriptCall(_CHAIN, [*keys, *first.commit.keys, *second.commit.keys], args)
