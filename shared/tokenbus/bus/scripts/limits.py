"""Rate limits that all fetchers share: one atomic step reserves a call's capacity in all of its scopes.

A scope (a provider, a model, a tenant) has two keys. The first is a hash with the fields

- ``requests`` and ``tokens``: times in µs up to which reserved capacity is paid for. This is GCRA, the generic cell
  rate algorithm (ITU-T I.371): a token bucket that refills steadily, stored as one number;
- ``paused``: the time before which no call may start, because the provider said so;
- ``wait:<worker>``: since when a worker waits here, when its place expires, and for how many tokens. A refused worker
  goes before later ones, so that small requests do not starve a large one, nor one fetcher another.

The second, ``…:held``, is a sorted set of the running calls, scored by the time at which each counts as dead.

All keys of a deployment lie in one slot and expire once they hold no information.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tokenbus.bus.scripts.script import ROOM, Arg, ScriptCall, script

_NOW_US = "local t = redis.call('TIME') local now = t[1] * 1000000 + t[2]\n"
_WHOLE = "local function whole(x) return string.format('%.0f', x) end\n"
"""Format a number as text without the exponent that Lua would use."""

Kind = Literal["model", "provider", "tenant"]

MINUTE_US = 60_000_000
POLL_MS = 50
"""When to ask again if the time cannot be known, because a running call may end at any time."""
TICKET_MS = 1_000
"""How long the queue keeps the place of a worker that does not ask again."""


class Scope(msgspec.Struct, frozen=True):
    """A limited resource: its keys and its limits. 0: no limit of this kind."""

    kind: Kind
    key: str
    requests_per_second: float = 0.0
    """The burst is one second's worth, and at least one request."""
    tokens_per_minute: int = 0
    """The burst is one minute's worth."""
    concurrency: int = 0

    @property
    def held(self) -> str:
        """Key of the sorted set of its running calls."""
        return f"{self.key}:held"


_RESERVE = script(
    "reserve",
    """
-- Reserve a call's capacity in all of its scopes, or in none.
-- KEYS: 1 and further: hash and running calls (sorted set) of each scope.
-- ARGV: 1 call, 2 worker, 3 tokens, 4 lease in ms, 5 and further: requests a second, tokens a minute and calls at
-- once of
-- each scope.
-- Reply: see `reserve`.
-- Atomic: several fetchers cannot share the last of a limit, and nothing is reserved in one scope alone.
"""
    + _NOW_US
    + _WHOLE
    + """
local member, worker, tokens, lease = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local refused, longest, scopes = {}, 0, {}
for s = 1, #KEYS / 2 do
  local hash, held = KEYS[2 * s - 1], KEYS[2 * s]
  local rate, per_minute, most = tonumber(ARGV[2 + 3 * s]), tonumber(ARGV[3 + 3 * s]), tonumber(ARGV[4 + 3 * s])
  local h, places, gone = {}, {}, {}
  local flat = redis.call('HGETALL', hash)
  for i = 1, #flat, 2 do
    local name = string.match(flat[i], '^wait:(.*)$')
    if name then
      local since, till, need = string.match(flat[i + 1], '^(%d+) (%d+) (%d+)$')
      if tonumber(till) > now then places[name] = {tonumber(since), tonumber(need)} else gone[#gone + 1] = flat[i] end
    else h[flat[i]] = tonumber(flat[i + 1]) end
  end
  local since = places[worker] and places[worker][1] or now
  local before, before_tokens = 0, 0
  for name, place in pairs(places) do
    if name ~= worker and place[1] < since then
      before, before_tokens = before + 1, before_tokens + place[2]
    end
  end
  local wait = math.max(0, (h.paused or 0) - now)
  local r, k = math.max(now, h.requests or 0), math.max(now, h.tokens or 0)
  if rate > 0 then
    wait = math.max(wait, r + (1 + before) / rate * 1000000 - now - math.max(1, rate) / rate * 1000000)
    r = r + 1000000 / rate
  end
  if per_minute > 0 then
    local over = k + (tokens + before_tokens) / per_minute * MINUTE - now - MINUTE
    -- A request larger than the bucket starts when the bucket is full, and leaves it in debt.
    if before == 0 then over = math.min(over, k - now) end
    wait = math.max(wait, over)
    k = k + tokens / per_minute * MINUTE
  end
  if most > 0 then
    local score = redis.call('ZSCORE', held, member)
    if score and tonumber(score) > now then return {'already'} end
    if redis.call('ZCOUNT', held, '(' .. whole(now), '+inf') + before >= most then wait = math.max(wait, POLL) end
  end
  if wait > 0 then
    refused[#refused + 1] = s
    if wait > longest then longest = wait end
  end
  scopes[s] = {hash, held, r, k, h.paused or 0, gone, since}
end
ROOM
for s, scope in ipairs(scopes) do
  if #scope[6] > 0 then redis.call('HDEL', scope[1], unpack(scope[6], 1, math.min(#scope[6], 1000))) end
end
if #refused > 0 then
  for _, s in ipairs(refused) do
    local hash = scopes[s][1]
    redis.call('HSET', hash, 'wait:' .. worker, whole(scopes[s][7]) .. ' ' .. whole(now + TICKET) .. ' ' .. tokens)
    redis.call('PEXPIRE', hash, math.max(redis.call('PTTL', hash), TICKET / 1000))
  end
  return {'wait', refused[1], math.ceil(longest / 1000)}
end
local reply = {'ok'}
for s, scope in ipairs(scopes) do
  local hash, held, r, k, paused = unpack(scope, 1, 5)
  redis.call('HDEL', hash, 'wait:' .. worker)
  if tonumber(ARGV[2 + 3 * s]) > 0 then redis.call('HSET', hash, 'requests', whole(r)) end
  if tonumber(ARGV[3 + 3 * s]) > 0 then redis.call('HSET', hash, 'tokens', whole(k)) end
  redis.call('PEXPIRE', hash, whole((math.max(r, k, paused) - now) / 1000 + TICKET / 1000))
  if tonumber(ARGV[4 + 3 * s]) > 0 then
    redis.call('ZREMRANGEBYSCORE', held, '-inf', whole(now))
    redis.call('ZADD', held, whole(now + lease * 1000), member)
    redis.call('PEXPIRE', held, lease)
  end
  reply[s + 1] = whole(k)
end
return reply
""".replace("ROOM", ROOM)
    .replace("MINUTE", str(MINUTE_US))
    .replace("POLL", str(POLL_MS * 1000))
    .replace("TICKET", str(TICKET_MS * 1000)),
)


def reserve(scopes: Sequence[Scope], *, member: str, worker: str, tokens: int, lease_ms: int) -> ScriptCall:
    """Reserve one request, ``tokens`` and a slot among the running calls in every scope, or nothing at all.

    ``member`` names the call. It holds its slot for ``lease_ms`` unless `renew` extends it.

    Reply: ``['ok', time up to which the tokens of each scope are taken…]`` (for `refund`); ``['wait', n, ms]``: the
    ``n``-th scope refused, retry after ``ms``; ``['already']``: this call has its slot (its reply was lost). If no
    scope limits concurrency, sending it again after a lost reply reserves a second time.
    """
    args: list[Arg] = [member, worker, tokens, lease_ms]
    for scope in scopes:
        args += [repr(float(scope.requests_per_second)), scope.tokens_per_minute, scope.concurrency]
    return ScriptCall(_RESERVE, [key for scope in scopes for key in (scope.key, scope.held)], args)


_KEEP = script(
    "keep",
    """
-- Extend the slots of running calls.
-- KEYS: 1 running calls of a scope (sorted set).
-- ARGV: 1 lease in ms, 2 and further: calls.
-- Reply: how many calls.
-- Atomic: the key cannot expire between the two, and all slots count from one moment.
"""
    + _NOW_US
    + _WHOLE
    + """
redis.call('PEXPIRE', KEYS[1], ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], whole(now + ARGV[1] * 1000), ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return #ARGV - 1
""",
)


def renew(scope: Scope, members: Sequence[str], *, lease_ms: int) -> ScriptCall:
    """Extend the slots of these running calls to ``lease_ms`` from now."""
    return ScriptCall(_KEEP, [scope.held], [lease_ms, *members])


_REFUND = script(
    "refund",
    """
-- End a call: free its slots, and return what it did not use.
-- KEYS: 1 and further: hash and running calls (sorted set) of each scope.
-- ARGV: 1 call, 2 unused tokens, 3 and further: tokens a minute, and time up to which its tokens were taken, of
-- each scope.
-- Reply: 1.
-- Atomic: a reservation that comes meanwhile does not lose the refund.
"""
    + _NOW_US
    + _WHOLE
    + """
local left = tonumber(ARGV[2])
for s = 1, #KEYS / 2 do
  local hash, held = KEYS[2 * s - 1], KEYS[2 * s]
  redis.call('ZREM', held, ARGV[1])
  local per_minute, taken = tonumber(ARGV[1 + 2 * s]), tonumber(ARGV[2 + 2 * s])
  local k = tonumber(redis.call('HGET', hash, 'tokens') or '0')
  if per_minute > 0 and left ~= 0 then
    local part = left / per_minute * MINUTE
    -- Capacity that has refilled since is not returned a second time.
    if part > 0 then k = k - math.min(part, math.max(0, taken - now)) else k = math.max(now, k) - part end
    redis.call('HSET', hash, 'tokens', whole(k))
    redis.call('PEXPIRE', hash, math.max(redis.call('PTTL', hash), TICKET / 1000, math.ceil((k - now) / 1000)))
  end
end
return 1
""".replace("MINUTE", str(MINUTE_US)).replace("TICKET", str(TICKET_MS * 1000)),
)


def refund(scopes: Sequence[Scope], *, member: str, left: int, taken: Sequence[int]) -> ScriptCall:
    """End the call: free its slots and return ``left`` unused tokens of its reservation (negative: it used more).
    ``taken`` is the reply of `reserve`. Not idempotent: send it once only.
    """
    args: list[Arg] = [member, left]
    for scope, until in zip(scopes, taken, strict=True):
        args += [scope.tokens_per_minute, until]
    return ScriptCall(_REFUND, [key for scope in scopes for key in (scope.key, scope.held)], args)


_PAUSE = script(
    "pause",
    """
-- Block new calls of a scope for a time.
-- KEYS: 1 scope (hash).
-- ARGV: 1 time in ms.
-- Reply: 1.
-- Atomic: a shorter pause cannot replace a longer one.
"""
    + _NOW_US
    + _WHOLE
    + """
local till = now + ARGV[1] * 1000
if tonumber(redis.call('HGET', KEYS[1], 'paused') or '0') < till then
  redis.call('HSET', KEYS[1], 'paused', whole(till))
  redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), tonumber(ARGV[1])))
end
return 1
""",
)


def pause(scope: Scope, *, ms: int) -> ScriptCall:
    """Block calls in this scope for ``ms``. A longer pause that is already set stays."""
    return ScriptCall(_PAUSE, [scope.key], [ms])
