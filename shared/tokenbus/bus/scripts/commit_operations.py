"""The writes that a commit may contain, and the Lua that does them.

A write is an operation: its letter, the number of the key it writes to, and its arguments, all in one flat list.
`Commit` builds that list; the scripts that commit (commit.py, chain.py) run it with `operate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenbus.bus.scripts.runs.index import INDEX_ENDED


class Operation(NamedTuple):
    """One write of a commit, encoded as its letter, the key it writes to, and its arguments."""

    letter: str
    arguments: int = 1
    """Number of arguments after the key."""
    counts_more: bool = False
    """The last argument is the number of further arguments."""
    keys: slice = slice(0, 0)
    """Which of the arguments after the key are keys too."""


PUBLISH = Operation("d", 3, counts_more=True, keys=slice(3, None))  # entry id, data; the topics
APPEND = Operation("x", counts_more=True)  # fields
PUBLISH_TO_TOPIC = Operation("t")  # data
COUNT = Operation("n")  # bytes
SET = Operation("h", counts_more=True)  # fields
DELETE = Operation("u")  # field
EXPIRE = Operation("e")  # milliseconds
CLOSE_ATTEMPT = Operation("c", 7, keys=slice(1, 4))  # attempt; raw, lease, control; run, lost, control frame
END_RUN = Operation("z", 6, keys=slice(0, 4))
# open runs, ended runs, those of the run's tenant (or the same again); run, milliseconds
ARRIVED = Operation("l")  # bytes
VOID = Operation("v", 2, keys=slice(0, 1))  # input; run
_NAMED = {
    "PUBLISH": PUBLISH,
    "APPEND": APPEND,
    "PUBLISH_TO_TOPIC": PUBLISH_TO_TOPIC,
    "COUNT": COUNT,
    "SET": SET,
    "DELETE": DELETE,
    "EXPIRE": EXPIRE,
    "CLOSE_ATTEMPT": CLOSE_ATTEMPT,
    "END_RUN": END_RUN,
    "ARRIVED": ARRIVED,
    "VOID": VOID,
}
OPERATIONS = {operation.letter: operation for operation in _NAMED.values()}
"""By letter."""

OPERATE = (
    INDEX_ENDED
    + f"local {', '.join(_NAMED)} = {', '.join(repr(operation.letter) for operation in _NAMED.values())}\n"
    + """
local lag, added = {}, {}
-- Find the keys base + 1 to base + #kinds that have a wrong type, besides those in `known`, which the script has read
-- already. The second result is the error of the first of them that several runs share.
local function misfits(base, kinds, known)
  local types, alien, first = {h = 'hash', H = 'hash', s = 'stream', S = 'stream'}, {}, nil
  for k = 1, #kinds do
    local kind = string.sub(kinds, k, k)
    local found = types[kind] and not known[KEYS[base + k]] and redis.pcall('TYPE', KEYS[base + k]).ok
    if found and found ~= 'none' and found ~= types[kind] then
      alien[k] = true
      if kind == 'h' or kind == 's' then
        first = first or 'WRONGTYPE ' .. KEYS[base + k] .. ' is a ' .. found .. ', no ' .. types[kind]
      end
    end
  end
  return alien, first
end
-- Do the operations ARGV[i] to ARGV[final], whose keys are numbered from base + 1.
local function operate(i, final, base, alien, most)
  while i <= final do
    local op = ARGV[i]
    local ours = not alien[tonumber(ARGV[i + 1])]
    local key = KEYS[base + ARGV[i + 1]]
    if op == PUBLISH then
      -- The log refuses an id that it has passed. Then the topics have the event too: both were written together.
      local done = ours and redis.pcall('XADD', key, ARGV[i + 2], '__data__', ARGV[i + 3])
      local last = i + 4 + ARGV[i + 4]
      if type(done) ~= 'table' then
        for j = i + 5, last do
          redis.call('XADD', KEYS[base + ARGV[j]], 'MAXLEN', '~', most, '*', '__data__', ARGV[i + 3])
        end
      end
      i = last + 1
    elseif op == APPEND then
      local last = i + 2 + ARGV[i + 2]
      if ours then added[key] = redis.call('XADD', key, '*', unpack(ARGV, i + 3, last)) end
      i = last + 1
    elseif op == PUBLISH_TO_TOPIC then
      redis.call('XADD', key, 'MAXLEN', '~', most, '*', '__data__', ARGV[i + 2])
      i = i + 3
    elseif op == COUNT then
      redis.call('HINCRBY', key, 'arrived', ARGV[i + 2])
      i = i + 3
    elseif op == SET then
      local last = i + 2 + ARGV[i + 2]
      if ours then redis.call('HSET', key, unpack(ARGV, i + 3, last)) end
      i = last + 1
    elseif op == DELETE then
      if ours then redis.call('HDEL', key, ARGV[i + 2]) end
      i = i + 3
    elseif op == EXPIRE then
      if ours then redis.call('PEXPIRE', key, ARGV[i + 2]) end
      i = i + 3
    elseif op == CLOSE_ATTEMPT then
      if ours and redis.call('HGET', key, 'closed') ~= ARGV[i + 2] then
        redis.call('XADD', KEYS[base + ARGV[i + 3]], '*', ARGV[i + 6], ARGV[i + 7])
        redis.call('HINCRBY', KEYS[base + ARGV[i + 4]], 'arrived', #ARGV[i + 7])
        redis.call('XADD', KEYS[base + ARGV[i + 5]], 'MAXLEN', '~', 1000, '*', ARGV[i + 6], ARGV[i + 8])
        redis.call('HSET', key, 'closed', ARGV[i + 2])
      end
      i = i + 9
    elseif op == END_RUN then
      if ours then redis.call('HSET', key, 'ended', now) end
      local run, keep = ARGV[i + 6], tonumber(ARGV[i + 7])
      index_ended(KEYS[base + ARGV[i + 2]], KEYS[base + ARGV[i + 3]], run, keep)
      if ARGV[i + 4] ~= ARGV[i + 2] then
        index_ended(KEYS[base + ARGV[i + 4]], KEYS[base + ARGV[i + 5]], run, keep)
      end
      i = i + 8
    elseif op == VOID then
      local till = redis.call('XREVRANGE', KEYS[base + ARGV[i + 2]], '+', '-', 'COUNT', 1)[1]
      till = till and till[1] or '0-0'
      -- What `Partition` saves of a run whose entries are ignored up to there: msgpack of [till, nil].
      local head = #till < 32 and string.char(160 + #till) or string.char(217, #till)
      if ours then redis.call('HSET', key, ARGV[i + 3], string.char(146) .. head .. till .. string.char(192)) end
      i = i + 4
    else -- ARRIVED
      local arrived = redis.call('HINCRBY', key, 'arrived', ARGV[i + 2])
      if lag then lag[#lag + 1] = arrived - tonumber(redis.call('HGET', key, 'done') or '0') end
      i = i + 3
    end
  end
end
-- Move a stage's offset. ``read``, ``done``: entries and bytes, all that the stage has processed now. ``mirror``: the
-- server's generation ('7' or '6') and the group that shows the offset. Further arguments: more fields of the lease.
local function move(lease, stream, offset, watermark, till, read, done, mirror, ...)
  redis.call('HSET', lease, 'offset', offset, 'watermark', watermark, 'until', till, 'entries', read, 'done', done, ...)
  local group = string.sub(mirror, 2)
  if group == '' then return end
  if string.sub(mirror, 1, 1) == '7' then
    redis.pcall('XGROUP', 'SETID', stream, group, offset, 'ENTRIESREAD', read)
  else
    redis.pcall('XGROUP', 'SETID', stream, group, offset)
  end
  -- An input that other readers share has no watermark; its reader needs no permission to trim.
  if watermark ~= '0-0' then redis.call('XTRIM', stream, 'MINID', '~', watermark) end
end
"""
)
"""Lua: what the scripts that commit have in common."""


def length_of(operation: Operation, ops: Sequence[Any], at: int) -> int:
    """Number of values of the operation at ``at``, including its letter and key."""
    length = 2 + operation.arguments
    return length + ops[at + length - 1] if operation.counts_more else length
