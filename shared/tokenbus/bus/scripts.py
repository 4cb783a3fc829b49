"""The Lua scripts that make the bus exact, each with its contract of KEYS and ARGV as a Python signature.

Two rules hold for all of them. Every check comes before the first write, because a script that fails
midway keeps what it wrote (https://redis.io/docs/latest/develop/programmability/eval-intro/). Every key of a
call lies in one slot. Time is the server's (`TIME`), so that no worker's clock decides who owns what.

Counters ``arrived`` and ``done`` in a lease hash are bytes of frames written to and consumed from the
group's input: their difference is the lag that back-pressure goes by.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from typing import TypeAlias

import msgspec

Arg: TypeAlias = str | bytes | int


class Script(msgspec.Struct, frozen=True):
    """One Lua script: its text and the SHA-1 under which the server caches it."""

    name: str
    text: str
    sha: str


def _script(name: str, text: str) -> Script:
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class Call(msgspec.Struct, frozen=True):
    """One script with its keys and arguments, ready to be sent alone or in a pipeline."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Arg]


_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

# --- leases and members -------------------------------------------------------------------------------------

_ACQUIRE = _script(
    "acquire",
    _NOW
    + """
local h = redis.call('HMGET', KEYS[1], 'owner', 'until', 'token', 'offset', 'watermark', 'entries')
if h[1] and h[1] ~= ARGV[1] and tonumber(h[2] or '0') > now then return {0, h[1], '', 0} end
local token = tonumber(h[3] or '0') + 1
local offset, watermark = h[4], h[5]
if not offset then
  offset = '0-0'
  if ARGV[3] == '$' then
    local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
    if last[1] then offset = last[1][1] end
  end
  watermark = offset
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'until', now + ARGV[2], 'token', token,
           'offset', offset, 'watermark', watermark)
if ARGV[4] ~= '' then redis.pcall('XGROUP', 'CREATE', KEYS[2], ARGV[4], offset, 'MKSTREAM') end
return {token, offset, watermark, tonumber(h[6] or '0')}
""",
)


def acquire(lease: str, stream: str, *, owner: str, ttl_ms: int, start: str = "0-0", mirror: str = "") -> Call:
    """Take the lease if it is free, expired or already ours. Reply: [token, offset, watermark, entries]; token 0: held.

    A group's first owner starts at ``start``: an id, or ``$`` for the stream's end. ``mirror`` names the
    consumer group that shows the offset to ordinary tools; empty: none.
    """
    return Call(_ACQUIRE, [lease, stream], [owner, ttl_ms, start, mirror])


_RENEW = _script(
    "renew",
    _NOW
    + """
local h = redis.call('HMGET', KEYS[1], 'token', 'offset', 'arrived', 'done')
if h[1] ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'until', now + ARGV[2])
if h[3] ~= h[4] then
  local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
  if not last[1] or last[1][1] == h[2] then redis.call('HSET', KEYS[1], 'done', h[3] or '0', 'arrived', h[3] or '0') end
end
return 1
""",
)


def renew(lease: str, stream: str, *, token: int, ttl_ms: int) -> Call:
    """Keep the lease: 1, or 0 where a newer token holds it.

    Also mends the lag counters where the input is consumed to its end but they disagree, as after a
    fail-over that lost writes.
    """
    return Call(_RENEW, [lease, stream], [token, ttl_ms])


_RELEASE = _script(
    "release",
    """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], 'owner', 'until')
return 1
""",
)


def release(lease: str, *, token: int) -> Call:
    """Give the lease up at once; 0 where it was no longer ours."""
    return Call(_RELEASE, [lease], [token])


_PRESENT = _script(
    "present",
    _NOW
    + """
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('PEXPIRE', KEYS[1], 10 * ARGV[2])
return redis.call('ZRANGE', KEYS[1], 0, -1)
""",
)


def present(members: str, *, member: str, ttl_ms: int) -> Call:
    """Sign of life of one worker; reply: the names of all that gave one within ``ttl_ms``, in no useful order."""
    return Call(_PRESENT, [members], [member, ttl_ms])


# --- the commit of an ordered stage ---------------------------------------------------------------------------

_COMMIT = _script(
    "commit",
    _NOW
    + """
local h = redis.call('HMGET', KEYS[1], 'token', 'offset')
if h[1] ~= ARGV[1] then return {'fenced', h[1] or '0'} end
if h[2] ~= ARGV[3] then
  if h[2] == ARGV[4] then return {'already', h[2]} end
  return {'moved', h[2]}
end
local lag = {'ok', ARGV[4]}
local i = 10
while ARGV[i] do
  local op = ARGV[i]
  if op == 'd' then
    redis.call('XADD', KEYS[tonumber(ARGV[i + 1])], ARGV[i + 2], '__data__', ARGV[i + 3])
    local last = i + 4 + ARGV[i + 4]
    for j = i + 5, last do
      redis.call('XADD', KEYS[tonumber(ARGV[j])], 'MAXLEN', '~', ARGV[9], '*', '__data__', ARGV[i + 3])
    end
    i = last + 1
  elseif op == 'x' then
    local last = i + 2 + ARGV[i + 2]
    redis.call('XADD', KEYS[tonumber(ARGV[i + 1])], '*', unpack(ARGV, i + 3, last))
    i = last + 1
  elseif op == 'h' then
    local last = i + 2 + ARGV[i + 2]
    redis.call('HSET', KEYS[tonumber(ARGV[i + 1])], unpack(ARGV, i + 3, last))
    i = last + 1
  elseif op == 'u' then
    redis.call('HDEL', KEYS[tonumber(ARGV[i + 1])], ARGV[i + 2])
    i = i + 3
  elseif op == 'e' then
    redis.call('PEXPIRE', KEYS[tonumber(ARGV[i + 1])], ARGV[i + 2])
    i = i + 3
  elseif op == 'c' then
    local run = KEYS[tonumber(ARGV[i + 1])]
    if redis.call('HGET', run, 'closed') ~= ARGV[i + 2] then
      redis.call('XADD', KEYS[tonumber(ARGV[i + 3])], '*', ARGV[i + 5], ARGV[i + 6])
      redis.call('HINCRBY', KEYS[tonumber(ARGV[i + 4])], 'arrived', #ARGV[i + 6])
      redis.call('HSET', run, 'closed', ARGV[i + 2])
    end
    i = i + 7
  else
    local key = KEYS[tonumber(ARGV[i + 1])]
    local arrived = redis.call('HINCRBY', key, 'arrived', ARGV[i + 2])
    lag[#lag + 1] = arrived - tonumber(redis.call('HGET', key, 'done') or '0')
    i = i + 3
  end
end
redis.call('HSET', KEYS[1], 'offset', ARGV[4], 'watermark', ARGV[5], 'until', now + ARGV[2])
local entries = redis.call('HINCRBY', KEYS[1], 'entries', ARGV[6])
redis.call('HINCRBY', KEYS[1], 'done', ARGV[7])
local mirror = string.sub(ARGV[8], 2)
if mirror ~= '' then
  if string.sub(ARGV[8], 1, 1) == '7' then
    redis.pcall('XGROUP', 'SETID', KEYS[2], mirror, ARGV[4], 'ENTRIESREAD', entries)
  else
    redis.pcall('XGROUP', 'SETID', KEYS[2], mirror, ARGV[4])
  end
  redis.call('XTRIM', KEYS[2], 'MINID', '~', ARGV[5])
end
return lag
""",
)


class Commit:
    """One atomic commit of a partition: gathers the writes, then becomes a `Call`.

    The server checks the lease token, then that the offset stands where the batch began, then writes all or
    nothing. Reply: ``['ok', offset, lag bytes of each output counted with `arrived`…]``, ``['already', …]``
    (this very commit is in: a lost reply), ``['fenced', token]`` or ``['moved', offset]``; the last three wrote nothing.
    """

    def __init__(self, lease: str, stream: str) -> None:
        self._keys: list[str] = [lease, stream]
        self._index: dict[str, int] = {lease: 1, stream: 2}
        self._ops: list[Arg] = []

    def __bool__(self) -> bool:
        return bool(self._ops)

    def _key(self, key: str) -> int:
        found = self._index.get(key)
        if found is None:
            self._keys.append(key)
            found = self._index[key] = len(self._keys)
        return found

    def publish(self, log: str, entry_id: str, data: bytes, topics: Sequence[str]) -> None:
        """One public event: to the run's log under ``entry_id``, and to each topic stream."""
        self._ops += ("d", self._key(log), entry_id, data, len(topics), *map(self._key, topics))

    def append(self, stream: str, fields: Sequence[Arg]) -> None:
        """One internal entry; ``fields`` are names and values in turn."""
        self._ops += ("x", self._key(stream), len(fields), *fields)

    def put(self, key: str, *fields: Arg) -> None:
        """Set fields of a hash; ``fields`` are names and values in turn."""
        self._ops += ("h", self._key(key), len(fields), *fields)

    def drop(self, key: str, field: str) -> None:
        """Delete a field of a hash."""
        self._ops += ("u", self._key(key), field)

    def expire(self, key: str, ttl_ms: int) -> None:
        """Set a key's time to live."""
        self._ops += ("e", self._key(key), ttl_ms)

    def close_attempt(self, run_key: str, attempt: int, raw: str, normalizer_lease: str, run: str, lost: bytes) -> None:
        """Unless the attempt is closed already: end it in `raw` with the frame ``lost``, and refuse what it still writes."""
        self._ops += ("c", self._key(run_key), attempt, self._key(raw), self._key(normalizer_lease), run, lost)

    def arrived(self, lease: str, size: int) -> None:
        """Count ``size`` bytes as arrived at the group whose lease hash this is; the reply tells its lag."""
        self._ops += ("l", self._key(lease), size)

    def call(
        self,
        *,
        token: int,
        ttl_ms: int,
        begin: str,
        end: str,
        watermark: str,
        entries: int,
        size: int,
        mirror: str,
        entries_read: bool,
        topic_entries: int,
    ) -> Call:
        """The commit of the batch after offset ``begin`` up to ``end``, of ``entries`` entries and ``size`` bytes.

        ``mirror`` names the consumer group that shows the offset (with ENTRIESREAD from Redis 7 on); with it
        the input is trimmed to the watermark.
        """
        head: list[Arg] = [token, ttl_ms, begin, end, watermark, entries, size]
        head += [("7" if entries_read else "6") + mirror, topic_entries]
        return Call(_COMMIT, self._keys, head + self._ops)


# --- runs -------------------------------------------------------------------------------------------------------

_ACCEPT = _script(
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


_CANCEL = _script(
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
    parser_lease: str,
    normalizer_lease: str,
    *,
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


_APPEND = _script(
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
    writes[#writes + 1] = {key, h[3] + 1, final, attempt}
  end
end
if size > 0 then
  redis.call('XADD', KEYS[1], '*', unpack(fields))
  for _, w in ipairs(writes) do
    if w[3] == '1' then redis.call('HSET', w[1], 'raw', w[2], 'closed', w[4])
    else redis.call('HSET', w[1], 'raw', w[2]) end
  end
  redis.call('HINCRBY', KEYS[2], 'arrived', size)
end
local c = redis.call('HMGET', KEYS[2], 'arrived', 'done')
out[n + 1] = tonumber(c[1] or '0') - tonumber(c[2] or '0')
return out
""",
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


_TOOL_RESULT = _script(
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


def tool_result(
    run_key: str, events: str, parser_lease: str, *, run: str, block: int, attempt: int, frame: bytes
) -> Call:
    """Hand in a tool's result: 1, or 0 where the call is not open any more (a second result, a cancel, a newer attempt)."""
    return Call(_TOOL_RESULT, [run_key, events, parser_lease], [run, call_field(block), attempt, frame])


# --- work queues ------------------------------------------------------------------------------------------------

_HEARTBEAT = _script(
    "heartbeat",
    """
local lost = {}
for i = 3, #ARGV do
  local p = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)
  if p[1] and p[1][2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
""",
)


def heartbeat(stream: str, *, group: str, consumer: str, ids: Sequence[str]) -> Call:
    """Claim one's own entries again, which sets their idle time back. Reply: those that are another's by now.

    Without the check a woken zombie would take its entry back from the worker that has it.
    """
    return Call(_HEARTBEAT, [stream], [group, consumer, *ids])


_FINISH = _script(
    "finish",
    """
redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 2))
return redis.call('XDEL', KEYS[1], unpack(ARGV, 2))
""",
)


def finish(stream: str, *, group: str, ids: Sequence[str]) -> Call:
    """Acknowledge and delete entries: a work queue holds only what is not done."""
    return Call(_FINISH, [stream], [group, *ids])


_HAND_BACK = _script(
    "hand_back",
    """
local p = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)
if not p[1] or p[1][2] ~= ARGV[2] then return 0 end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
redis.call('XADD', KEYS[1], '*', unpack(ARGV, 4))
return 1
""",
)


def hand_back(stream: str, *, group: str, consumer: str, entry_id: str, fields: Sequence[Arg]) -> Call:
    """Put an entry that nobody began back at the end of its queue; 0 where it is another's by now."""
    return Call(_HAND_BACK, [stream], [group, consumer, entry_id, *fields])
