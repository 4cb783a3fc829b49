"""Partition leases and group membership."""

from __future__ import annotations

from tokenbus.bus.scripts.script import NOW, ROOM, Arg, ScriptCall, script

_ACQUIRE = script(
    "acquire",
    """
-- Acquire a partition's lease if it is free, expired or already the worker's.
-- KEYS: 1 lease (hash), 2 the stage's input (stream).
-- ARGV: 1 worker, 2 lease time in ms, 3 where a new group begins (an id or $), 4 group that shows the offset, or ''.
-- Reply: token, offset, watermark; an empty token and the owner if another worker holds it.
-- Atomic: between the check of the owner and the new token, no other worker can acquire it.
"""
    + NOW
    + """
local h = redis.call('HMGET', KEYS[1], 'owner', 'until', 'token', 'offset', 'watermark')
if h[1] and h[1] ~= ARGV[1] and tonumber(h[2] or '0') > now then return {'', h[1], ''} end
local last = tonumber(string.match(h[3] or '0', '^%d+'))
local token = string.format('%.0f:%s', math.max(last + 1, now), ARGV[1])
local offset, watermark = h[4], h[5]
if not offset then
  offset = '0-0'
  if ARGV[3] == '$' then
    local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
    if last[1] then offset = last[1][1] end
  end
  watermark = offset
end
ROOMredis.call('HSET', KEYS[1], 'owner', ARGV[1], 'until', now + ARGV[2], 'token', token,
           'offset', offset, 'watermark', watermark)
if ARGV[4] ~= '' then redis.pcall('XGROUP', 'CREATE', KEYS[2], ARGV[4], offset, 'MKSTREAM') end
return {token, offset, watermark}
""".replace("ROOM", ROOM),
)


def acquire(lease: str, stream: str, *, owner: str, ttl_ms: int, start: str = "0-0", mirror: str = "") -> ScriptCall:
    """Acquire the lease if it is free, expired or already ours. Reply: [token, offset, watermark]; an empty token if it
    is held by another worker.

    A token is a number and its owner's name. The number follows the server's clock instead of a counter, so a server
    that lost writes in a fail-over or a FLUSHALL does not issue a token twice. If the new server's clock is behind, a
    number may repeat, but only for the same owner. A group's first owner starts at ``start``: an id, or ``$`` for the
    end of the stream. ``mirror`` names the consumer group that shows the offset to standard tools; empty: none.
    """
    return ScriptCall(_ACQUIRE, [lease, stream], [owner, ttl_ms, start, mirror])


_RENEW = script(
    "renew",
    """
-- Extend a lease, and repair its lag counters if all input is consumed.
-- KEYS: 1 lease (hash), 2 the stage's input (stream).
-- ARGV: 1 token, 2 lease time in ms.
-- Reply: the committed offset; '' if another token holds the lease.
-- Atomic: a worker that lost the lease cannot extend its successor's.
"""
    + NOW
    + """
local h = redis.call('HMGET', KEYS[1], 'token', 'offset', 'arrived', 'done')
if h[1] ~= ARGV[1] then return '' end
ROOMredis.call('HSET', KEYS[1], 'until', now + ARGV[2])
if h[3] ~= h[4] then
  local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
  if not last[1] or last[1][1] == h[2] then redis.call('HSET', KEYS[1], 'done', h[3] or '0', 'arrived', h[3] or '0') end
end
return h[2]
""".replace("ROOM", ROOM),
)


def renew(lease: str, stream: str, *, token: str, ttl_ms: int) -> ScriptCall:
    """Renew the lease. Reply: the committed offset; empty if another token holds it.

    If the offset is before one that was committed, a fail-over lost writes. Also repairs the lag counters if the input
    is fully consumed and they disagree, as they do after such a fail-over.
    """
    return ScriptCall(_RENEW, [lease, stream], [token, ttl_ms])


_RELEASE = script(
    "release",
    """
-- Release a lease.
-- KEYS: 1 lease (hash).
-- ARGV: 1 token.
-- Reply: 1, or 0 if another token holds it.
-- Atomic: a worker that lost the lease cannot release its successor's.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], 'owner', 'until')
redis.call('HSET', KEYS[1], 'released', ARGV[1])
return 1
""",
)


def release(lease: str, *, token: str) -> ScriptCall:
    """Release the lease; 0 if it was no longer ours. Its field ``released`` then has the token: this worker did not
    die with unfinished work.
    """
    return ScriptCall(_RELEASE, [lease], [token])


_PRESENT = script(
    "present",
    """
-- Write one worker's heartbeat among the members of a group.
-- KEYS: 1 members (sorted set by the server's time).
-- ARGV: 1 worker, 2 how long a heartbeat counts, in ms.
-- Reply: the workers with a heartbeat that counts.
-- Atomic: the reply has this worker and no expired one.
"""
    + NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('PEXPIRE', KEYS[1], 10 * ARGV[2])
return redis.call('ZRANGE', KEYS[1], 0, -1)
""",
)


def present(members: str, *, member: str, ttl_ms: int) -> ScriptCall:
    """Heartbeat of one worker. Reply: the names of all workers with one within ``ttl_ms``, unordered."""
    return ScriptCall(_PRESENT, [members], [member, ttl_ms])


_NOTE = script(
    "note",
    """
-- Set a field of a lease, also on a full server.
-- KEYS: 1 lease (hash).
-- ARGV: 1 field, 2 value.
-- Reply: 1 if the field is new, else 0.
-- Atomic: `ROOM` and the write must be one script to pass a full server's check.
"""
    + ROOM
    + "return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])\n",
)
_COUNT = script(
    "count",
    """
-- Add 1 to a field of a lease, also on a full server.
-- KEYS: 1 lease (hash).
-- ARGV: 1 field.
-- Reply: the new value.
-- Atomic: as for `note`.
"""
    + ROOM
    + "return redis.call('HINCRBY', KEYS[1], ARGV[1], 1)\n",
)


def note(lease: str, field: str, value: Arg) -> ScriptCall:
    """Set a field of the lease hash. The next owner reads it."""
    return ScriptCall(_NOTE, [lease], [field, value])


def count(lease: str, field: str) -> ScriptCall:
    """Increment a field of the lease hash. Reply: the new value."""
    return ScriptCall(_COUNT, [lease], [field])


_WITHDRAW = script(
    "withdraw_replay",
    """
-- Take back what an unfinished replay counted and noted.
-- KEYS: 1 lease (hash).
-- ARGV: 1 token, 2 field of the count, then, if the replay made notes: 3 their field, 4 the notes before it.
-- Reply: 1, or 0 if another token holds the lease, or if nothing is counted.
-- Atomic: a worker that lost the lease cannot change what its successor counts and notes.
local h = redis.call('HMGET', KEYS[1], 'token', ARGV[2])
local count = tonumber(h[2] or '0')
if h[1] ~= ARGV[1] or count == 0 then return 0 end
ROOMredis.call('HSET', KEYS[1], ARGV[2], count - 1)
if ARGV[3] then redis.call('HSET', KEYS[1], ARGV[3], ARGV[4]) end
return 1
""".replace("ROOM", ROOM),
)


def withdraw_replay(lease: str, *, token: str, count: str, notes: tuple[str, bytes] | None) -> ScriptCall:
    """Take back the count of a replay that its worker gave up because it stops or hands the partition over. ``notes``:
    their field and what it had before the replay; None: the replay made none. Reply: 0 if nothing was taken back.
    """
    return ScriptCall(_WITHDRAW, [lease], [token, count, *(notes or ())])
