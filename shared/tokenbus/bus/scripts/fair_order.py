"""Fair order of a work queue: tenants take turns, however many entries one of them has waiting.

The order is start-time fair queueing (Goyal, Vin and Cheng, 1996). An entry's tag is the larger of its tenant's next
tag and the smallest waiting tag. The tenant's next tag is that plus the entry's cost. The smallest tag goes first.

Entries stay in their stream until they are finished. Beside the stream, in the same slot, are a sorted set (entry ids
by tag) and a hash (each tenant's next tag). Both are deleted with the last waiting entry. They are only an index: an
indexed entry is pending with `NOBODY`, like one that was handed back, and `reclaim` adds entries that are missing from
the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenbus.bus.keys import TENANT_FIELD, order_keys
from tokenbus.bus.scripts.script import LuaScript, ScriptCall, script
from tokenbus.bus.scripts.work_queue import HANDED_BACK_MS, NOBODY

Entries = Literal["requests", "turns", "tools"]
"""What the stream's entries are, which determines how their tenant is found."""

SORTED_ENTRIES = 500
"""Maximum entries that one call sorts: about 7 ms of the server's time."""
SORTED_BYTES = 4 * 2**20
"""A call stops sorting after this many bytes and leaves the rest to the next call."""
NEWEST_ENTRIES = 64
"""If more are unread than one call sorts, it looks for urgent entries among this many of the newest."""
COST_BYTES = 64 * 1024
"""This many bytes cost as much as one entry."""
URGENT_BYTES = 16 * 1024
"""Maximum size of an urgent request. A cancel has only an id and a reason, so a larger request is not a cancel."""
URGENT = r'"type\\?"%s*:%s*\\?"cancel\\?"'
"""Lua pattern of a cancel, at the top level or nested. Decoding the request decides."""

_TENANT_CHARS = 256
SPARE_TENANTS = 1_000
"""Margin: with more tenants than twice the waiting entries plus this, tenants without waiting entries are removed."""

_LOOK = {
    "requests": f"""
local function quoted(text, from, name, rest)
  -- The place behind a key: `"name` with or without the backslashes of an envelope, and what must follow.
  local at = string.find(text, '"' .. name, from, true)
  for _ = 1, 16 do
    if not at then return end
    local s, e, found = string.find(text, '^"' .. name .. '\\\\?"%s*:%s*' .. rest, at)
    if s then return e + 1, found end
    at = string.find(text, '"' .. name, at + 1, true)
  end
end
local function look(fields)
  local data, tenant = '', nil
  for i = 1, #fields, 2 do
    if fields[i] == '__data__' then data = fields[i + 1]
    elseif fields[i] == '{TENANT_FIELD}' then tenant = fields[i + 1] end
  end
  local urgent = #data <= {URGENT_BYTES}
    and string.find(data, 'cancel', 1, true)
    and (string.find(data, '{URGENT}') or string.find(data, '\\164type\\166cancel', 1, true))
  if not tenant then
    local inside = quoted(data, 1, 'metadata', '{{')
    if inside then
      local _, found = quoted(data, inside, 'tenant', '\\\\?"([^"]*)')
      tenant = found
    else  -- a msgpack map, whose short texts have their length in one byte
      local _, e = string.find(data, '\\168metadata', 1, true)
      if e then _, e = string.find(data, '\\166tenant', e, true) end
      local size = e and string.byte(data, e + 1)
      if size and size >= 160 and size <= 191 then tenant = string.sub(data, e + 2, e + 1 + size - 160) end
    end
  end
  return string.sub(tenant or '', 1, {_TENANT_CHARS}), #data, urgent
end
""",
    "turns": f"""
local function look(fields)
  local ok, work = pcall(cmsgpack.unpack, fields[2] or '')
  if not ok or type(work) ~= 'table' or type(work[5]) ~= 'string' then return '', 0, false end
  -- Runs under policies count apart, as they do where they wait in a fetcher.
  return string.sub(work[5], 1, {_TENANT_CHARS}) .. (work[6] == true and ' held' or ''), 0, false
end
""",
    "tools": f"""
local function look(fields)
  local frame = fields[2] or ''
  local ok, work = pcall(cmsgpack.unpack, frame)
  if not ok or type(work) ~= 'table' or type(work[9]) ~= 'string' then return '', #frame, false end
  return string.sub(work[9], 1, {_TENANT_CHARS}), #frame, false
end
""",
}

_ORDER = f"""
local stream, order, tenants, group, consumer = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2]
redis.call('ZREM', order, '')  -- as `ROOM` does: a full server must still hand out work that frees memory
local first, next_tags = tonumber(redis.call('ZRANGE', order, 0, 0, 'WITHSCORES')[2] or '0'), {{}}
local function whole(x) return string.format('%.0f', x) end
local function queue_up(id, tenant, size)
  -- False if the server has no room for it.
  local tag = next_tags[tenant] or tonumber(redis.call('HGET', tenants, tenant) or '0')
  tag = math.max(first, tag)
  local added = redis.pcall('ZADD', order, 'NX', whole(tag), id)
  if type(added) == 'table' then return false end
  if added == 1 then next_tags[tenant] = tag + 1 + math.floor(size / {COST_BYTES}) end
  return true
end
local function keep_tags()
  local waiting = redis.call('ZCARD', order)
  if waiting == 0 then
    redis.call('DEL', tenants)
    return 0
  end
  for tenant, tag in pairs(next_tags) do redis.call('HSET', tenants, tenant, whole(tag)) end
  if redis.call('HLEN', tenants) > 2 * waiting + {SPARE_TENANTS} then  -- a tag behind the smallest one has no effect
    local flat, gone = redis.call('HGETALL', tenants), {{}}
    for i = 1, #flat, 2 do if tonumber(flat[i + 1]) <= first then gone[#gone + 1] = flat[i] end end
    for i = 1, #gone, 1000 do redis.call('HDEL', tenants, unpack(gone, i, math.min(i + 999, #gone))) end
  end
  return waiting
end
local function put_aside(ids, ...)
  if #ids == 0 then return end
  local args = {{'XCLAIM', stream, group, '{NOBODY}', 0}}
  for _, id in ipairs(ids) do args[#args + 1] = id end
  for _, word in ipairs({{'IDLE', {HANDED_BACK_MS}, 'RETRYCOUNT', 0, 'JUSTID', ...}}) do args[#args + 1] = word end
  redis.call(unpack(args))
end
"""

_TAKE_CONTRACT = """
-- Put unread entries in order, then take those whose turn it is.
-- KEYS: 1 queue (stream), 2 waiting entries by tag (sorted set), 3 next tag of each tenant (hash).
-- ARGV: 1 group, 2 consumer, 3 most entries to take.
-- Reply: see `take`.
-- Atomic: two workers never sort or take the same entry, and stream, order and tags agree.
"""
_TAKE = """
local count, last = tonumber(ARGV[3]), nil
for _, flat in ipairs(redis.pcall('XINFO', 'GROUPS', stream)) do
  local of = {}
  for i = 1, #flat, 2 do of[flat[i]] = flat[i + 1] end
  if of.name == group then last = of['last-delivered-id'] end
end
if not last then return redis.error_reply('NOGROUP no consumer group ' .. group) end

local behind, urgent, entries, bytes, room, more = {}, {}, 0, 0, true, true
while room and more and entries < SORTED_ENTRIES and bytes < SORTED_BYTES do
  local page = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 16)
  for _, entry in ipairs(page) do
    local tenant, size, now = look(entry[2])
    if now then urgent[#urgent + 1] = {entry[1], 1, entry[2]}
    else
      room = queue_up(entry[1], tenant, size)
      if not room then break end
      behind[#behind + 1] = entry[1]
    end
    last, entries, bytes = entry[1], entries + 1, bytes + size
  end
  more = #page == 16
end
put_aside(behind, 'FORCE', 'LASTID', last)
local function overtake(entry, ...)
  redis.call('XCLAIM', stream, group, consumer, 0, entry[1], 'RETRYCOUNT', 1, 'FORCE', 'JUSTID', ...)
end
for _, entry in ipairs(urgent) do overtake(entry, 'LASTID', last) end
if room and more then
  -- A later call finds these again and hands out those that are not done by then. A second cancel does no harm.
  for _, entry in ipairs(redis.call('XREVRANGE', stream, '+', '(' .. last, 'COUNT', NEWEST_ENTRIES)) do
    local _, _, now = look(entry[2])
    if now then
      overtake(entry)
      urgent[#urgent + 1] = {entry[1], 1, entry[2]}
    end
  end
end

local taken = {}
while #taken < count do
  local ids = redis.call('ZRANGE', order, 0, count - #taken - 1)
  if #ids == 0 then break end
  redis.call('ZREM', order, unpack(ids))
  -- An entry that is not idle was taken by a worker without fair order.
  local found = redis.call('XCLAIM', stream, group, consumer, HANDED_BACK_MS / 2, unpack(ids))
  for _, entry in ipairs(found) do
    if entry and entry[2] then taken[#taken + 1] = {entry[1], 1, entry[2]} end
  end
end
return {keep_tags(), room and more and 1 or 0, urgent, taken}
"""

_RECLAIM_CONTRACT = """
-- Claim entries whose worker does not keep them alive, and add entries that the order lacks.
-- KEYS: 1 queue (stream), 2 waiting entries by tag (sorted set), 3 next tag of each tenant (hash).
-- ARGV: 1 group, 2 consumer, 3 idle time in ms, 4 most entries to claim, 5 cursor of the repair.
-- Reply: see `reclaim`.
-- Atomic: as for `take`.
"""
_RECLAIM = """
local idle, most, cursor, out, aside = ARGV[3], tonumber(ARGV[4]), ARGV[5], {}, 0
local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
if consumers.err then return redis.error_reply('NOGROUP ' .. consumers.err) end
for _, flat in ipairs(consumers) do
  local of = {}
  for i = 1, #flat, 2 do of[flat[i]] = flat[i + 1] end
  if of.name == 'NOBODY' then aside = of.pending
  elseif of.pending > 0 and #out < most then
    local late = redis.call('XPENDING', stream, group, 'IDLE', idle, '-', '+', most - #out, of.name)
    for _, p in ipairs(late) do
      local entry = redis.call('XCLAIM', stream, group, consumer, idle, p[1])[1]
      if entry and entry[2] then out[#out + 1] = {p[1], p[4] + 1, entry[2]} end
    end
  end
end
if aside > redis.call('ZCARD', order) then
  local pending = redis.call('XPENDING', stream, group, cursor, '+', SORTED_ENTRIES, 'NOBODY')
  cursor = pending[SORTED_ENTRIES] and '(' .. pending[SORTED_ENTRIES][1] or '-'
  for _, p in ipairs(pending) do
    local entry = redis.call('XRANGE', stream, p[1], p[1])[1]
    if entry then
      local tenant, size = look(entry[2])
      if not queue_up(p[1], tenant, size) then break end
    else redis.call('XACK', stream, group, p[1]) end
  end
end
return {cursor, keep_tags(), out}
"""

_PUT_BACK_CONTRACT = """
-- Return the consumer's own entries to the order, as if never delivered.
-- KEYS: 1 queue (stream), 2 waiting entries by tag (sorted set), 3 next tag of each tenant (hash).
-- ARGV: 1 group, 2 consumer, 3 whether they go first (1 or 0), 4 and further: entry ids.
-- Reply: how many were the consumer's.
-- Atomic: as for `take`; an entry that another worker owns stays with it.
"""
_PUT_BACK = """
local ids, in_front = {}, ARGV[3] == '1'
for i = 4, #ARGV do
  local id = ARGV[i]
  local ours = redis.pcall('XPENDING', stream, group, id, id, 1, consumer)[1]
  local entry = ours and redis.call('XRANGE', stream, id, id)[1]
  if entry then
    local tenant, size = look(entry[2])
    -- If there is no room now, `reclaim` adds it later.
    if in_front then redis.pcall('ZADD', order, whole(first), id) else queue_up(id, tenant, size) end
    ids[#ids + 1] = id
  end
end
put_aside(ids)
keep_tags()
return #ids
"""


def _of_each(name: str, contract: str, text: str) -> dict[str, LuaScript]:
    for word, value in (
        ("SORTED_ENTRIES", SORTED_ENTRIES),
        ("SORTED_BYTES", SORTED_BYTES),
        ("NEWEST_ENTRIES", NEWEST_ENTRIES),
        ("HANDED_BACK_MS", HANDED_BACK_MS),
        ("NOBODY", NOBODY),
    ):
        text = text.replace(word, str(value))
    return {kind: script(f"{name} {kind}", contract + look + _ORDER + text) for kind, look in _LOOK.items()}


_TAKE_OF = _of_each("take", _TAKE_CONTRACT, _TAKE)
_RECLAIM_OF = _of_each("reclaim", _RECLAIM_CONTRACT, _RECLAIM)
_PUT_BACK_OF = _of_each("put_back", _PUT_BACK_CONTRACT, _PUT_BACK)


def take(stream: str, entries: Entries, *, group: str, consumer: str, count: int) -> ScriptCall:
    """Put unread entries in order, then take the next ``count``.

    Reply: the number of waiting entries; 1 if more are unread, else 0; the urgent ones among the unread, which the
    consumer now holds too; the entries taken. Each entry is [id, 1, fields]. Entries stay unread if the server has no
    memory for a larger index.
    """
    return ScriptCall(_TAKE_OF[entries], [stream, *order_keys(stream)], [group, consumer, count])


def reclaim(
    stream: str, entries: Entries, *, group: str, consumer: str, idle_ms: int, start: str, count: int
) -> ScriptCall:
    """Claim up to ``count`` entries that their worker has not kept alive for ``idle_ms``, and repair the index.

    ``start``: cursor of the repair. Reply: its next cursor, the number of waiting entries, and [id, deliveries, fields]
    of each claimed entry.
    """
    args = [group, consumer, idle_ms, count, start]
    return ScriptCall(_RECLAIM_OF[entries], [stream, *order_keys(stream)], args)


def put_back(
    stream: str, entries: Entries, *, group: str, consumer: str, ids: Sequence[str], in_front: bool = True
) -> ScriptCall:
    """Return the consumer's own entries to the queue, as if never delivered.

    ``in_front``: they have had their turn and go first; False: they go behind their tenants' other entries. They keep
    their ids, because the id names a request without a name of its own. Reply: how many were ours.
    """
    args = [group, consumer, 1 if in_front else 0, *ids]
    return ScriptCall(_PUT_BACK_OF[entries], [stream, *order_keys(stream)], args)
