"""Work queues: each entry has one owner, and only the owner can keep, finish or return it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.scripts.script import LuaScript, ScriptCall, script

# If the group is missing (NOGROUP), nothing is pending. The checks use pcall, whose error has no first element.

_HEARTBEAT = script(
    "heartbeat",
    """
-- Keep the consumer's own entries alive: claiming them again resets their idle time.
-- KEYS: 1 queue (stream).
-- ARGV: 1 group, 2 consumer, 3 and further: entry ids.
-- Reply: the ids that another consumer owns now.
-- Atomic: between the check of the owner and the claim, no other worker can claim the entry.
local lost = {}
for i = 3, #ARGV do
  local p = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if p[1] then redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
  else lost[#lost + 1] = ARGV[i] end
end
return lost
""",
)


def heartbeat(stream: str, *, group: str, consumer: str, ids: Sequence[str]) -> ScriptCall:
    """Claim the consumer's own entries again, which resets their idle time. Reply: the ids that are no longer ours.

    Without the ownership check, a zombie that wakes up would take its entry back from the new owner.
    """
    return ScriptCall(_HEARTBEAT, [stream], [group, consumer, *ids])


_CLAIM = script(
    "claim",
    """
-- Claim entries that have been idle for a time.
-- KEYS: 1 queue (stream).
-- ARGV: 1 group, 2 consumer, 3 idle time in ms, 4 cursor, 5 maximum entries.
-- Reply: the next cursor, and id, deliveries and fields of each entry.
-- Atomic: the number of deliveries is that of this very claim.
local cursor, out = ARGV[4], {}
for _ = 1, 100 do
  local r = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], cursor, 'COUNT', ARGV[5])
  cursor = r[1]
  for i = 1, #r[2] do
    local e = r[2][i]
    if e and e[2] then
      local p = redis.call('XPENDING', KEYS[1], ARGV[1], e[1], e[1], 1)
      out[#out + 1] = {e[1], p[1][4], e[2]}
    end
  end
  if #out > 0 or cursor == '0-0' then break end
end
return {cursor, out}
""",
)


def claim(stream: str, *, group: str, consumer: str, idle_ms: int, start: str, count: int) -> ScriptCall:
    """Claim up to ``count`` entries that have been idle for ``idle_ms``, scanning from ``start``.

    Reply: the next cursor (``0-0``: start again), and [id, deliveries, fields] of each entry.
    """
    return ScriptCall(_CLAIM, [stream], [group, consumer, idle_ms, start, count])


BEGUN = 1000
"""Added to an entry's number of deliveries while work on it has begun. An entry is given up long before so many."""

_MARK = script(
    "mark",
    """
-- Record in its number of deliveries whether work on one of the consumer's entries has begun.
-- KEYS: 1 queue (stream).
-- ARGV: 1 group, 2 consumer, 3 entry id, 4 deliveries to record.
-- Reply: 1, or 0 if another consumer owns the entry.
-- Atomic: as for `heartbeat`.
if not redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])[1] then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'RETRYCOUNT', ARGV[4], 'JUSTID')
return 1
""",
)


def mark(stream: str, *, group: str, consumer: str, entry: str, begun: bool) -> ScriptCall:
    """Record whether work on one of the consumer's entries has begun: 1, or 0 if it is no longer ours.

    An entry marked as not begun is claimed from a dead worker as if never delivered. An entry marked as begun is
    claimed with more than `BEGUN` deliveries.
    """
    return ScriptCall(_MARK, [stream], [group, consumer, entry, BEGUN + 1 if begun else 0])


def _with_ours(name: str, what: str, deed: str) -> LuaScript:
    """Script that runs ``deed`` for each entry ``id`` that the consumer owns. ``what``: what that does."""
    return script(
        name,
        f"""
-- {what}
-- KEYS: 1 queue (stream).
-- ARGV: 1 group, 2 consumer, 3 and further: entry ids.
-- Reply: how many of the entries were the consumer's.
-- Atomic: between the check of the owner and the write, no other worker can claim the entry.
local done = 0
for i = 3, #ARGV do
  local id = ARGV[i]
  if redis.pcall('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2])[1] then
    {deed}
    done = done + 1
  end
end
return done
""",
    )


_REMOVE = "redis.call('XACK', KEYS[1], ARGV[1], id) redis.call('XDEL', KEYS[1], id)"

_FINISH = _with_ours("finish", "Acknowledge and delete the consumer's own entries.", _REMOVE)


def finish(stream: str, *, group: str, consumer: str, ids: Sequence[str]) -> ScriptCall:
    """Acknowledge and delete the consumer's own entries; a work queue holds only unfinished ones. Reply: how many were
    ours.

    Without the ownership check, a zombie would delete an entry that its new owner has not finished.
    """
    return ScriptCall(_FINISH, [stream], [group, consumer, *ids])


HANDED_BACK_MS = 86_400_000
"""Idle time of an entry that was handed back; no live worker goes this long without a heartbeat."""
NOBODY = "-"
"""Name of the consumer that holds returned entries."""

_HAND_BACK = _with_ours(
    "hand_back",
    "Return the consumer's own entries for the next claim, as if never delivered.",
    f"redis.call('XCLAIM', KEYS[1], ARGV[1], '{NOBODY}', 0, id, 'IDLE', {HANDED_BACK_MS}, 'RETRYCOUNT', 0, 'JUSTID')",
)


def hand_back(stream: str, *, group: str, consumer: str, ids: Sequence[str]) -> ScriptCall:
    """Return the consumer's own entries for the next claim, as if never delivered. Reply: how many were ours.

    They keep their place and their id, because the id names a request without a name of its own.
    """
    return ScriptCall(_HAND_BACK, [stream], [group, consumer, *ids])


_REQUEUE = _with_ours(
    "requeue",
    "Move the consumer's own entries to the end, with new ids, as if never delivered.",
    f"""local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
    {_REMOVE}  -- first, so that a full server has room for the new entry
    if entry then redis.call('XADD', KEYS[1], '*', unpack(entry[2])) end""",
)


def requeue(stream: str, *, group: str, consumer: str, ids: Sequence[str]) -> ScriptCall:
    """Move the consumer's own entries to the end, with new ids, as if never delivered. Reply: how many were ours."""
    return ScriptCall(_REQUEUE, [stream], [group, consumer, *ids])


_RETIRE = script(
    "retire",
    """
-- Remove a consumer that holds nothing.
-- KEYS: 1 queue (stream).
-- ARGV: 1 group, 2 consumer.
-- Reply: 1, or 0 if it holds entries.
-- Atomic: an entry that is delivered between the check and the removal would be lost.
local p = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])
if p.err or p[1] then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
""",
)


def retire(stream: str, *, group: str, consumer: str) -> ScriptCall:
    """Remove a consumer that holds nothing: 1, else 0.

    Without the check, entries would be lost if the server assigned them to the consumer and the reply never arrived.
    """
    return ScriptCall(_RETIRE, [stream], [group, consumer])
