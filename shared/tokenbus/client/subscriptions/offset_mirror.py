"""Mirrors a group's offset into a consumer group, so that XINFO GROUPS, dashboards and autoscalers see its lag.

Nothing reads from that consumer group. Each commit moves it. Its entry count is set here when a worker acquires a
partition, because a group need not start at the beginning of its stream, and entries trimmed unread count as read.
"""

from __future__ import annotations

from tokenbus.bus.scripts.script import ScriptCall, script

_MIRROR_OFFSET = script(
    "show",
    """
-- Show a group's offset to standard tools, with the number of entries read.
-- KEYS: 1 lease (hash), 2 stream.
-- ARGV: 1 group, 2 offset.
-- Reply: 1, or 0 if the stream is missing or the server does not count entries.
-- Atomic: length and number of added entries are of one moment.
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
local added
local info = redis.call('XINFO', 'STREAM', KEYS[2])
for i = 1, #info, 2 do
  if info[i] == 'entries-added' then added = info[i + 1] end
end
if not added then return 0 end
local entries = redis.call('HGET', KEYS[1], 'entries')
if #redis.call('XRANGE', KEYS[2], '-', ARGV[2], 'COUNT', 1) == 0 then
  entries = added - redis.call('XLEN', KEYS[2])
elseif not entries then
  entries = added - #redis.call('XRANGE', KEYS[2], '(' .. ARGV[2], '+')
end
redis.call('HSET', KEYS[1], 'entries', entries)
redis.pcall('XGROUP', 'SETID', KEYS[2], ARGV[1], ARGV[2], 'ENTRIESREAD', entries)
return 1
""",
)


def mirror_offset(lease: str, stream: str, *, group: str, offset: str) -> ScriptCall:
    """Set the group's entry count up to ``offset`` and mirror both. Does nothing if the server does not count entries
    (Redis 6.2).
    """
    return ScriptCall(_MIRROR_OFFSET, [lease, stream], [group, offset])
