"""The gateway's scripts: entries of keys, admission of a request, and the count of what a run used.

All of its keys lie in one slot. A client has three: rates (``use``), open answers (``use:open``) and spend.

``use`` holds two buckets, each a level and the time of that level: ``requests`` and ``tokens``. Both refill steadily to
one minute's worth. A request takes one of ``requests`` on admission. Tokens are taken when a run reports them, so the
level may fall below 0; requests are refused until it is above.

``spend`` holds, for each day since 1970 (UTC) and for ``total``, the fields ``<day>:cost``, ``:input``, ``:output`` and
``:runs``, and the total cost by price (``price:<name>:cost``). Costs are whole billionths of the currency.
"""

from __future__ import annotations

import msgspec

from tokenbus.bus.scripts.script import NOW, ScriptCall, script

DAY_MS = 86_400_000
NANO = 1_000_000_000
"""Units of cost per unit of currency."""

_BUCKETS = """
local function level(hash, name, most)
  local stored = redis.call('HMGET', hash, name, name .. ':at')
  local was, at = tonumber(stored[1]), tonumber(stored[2])
  if not was or not at then return most end
  return math.min(most, was + math.max(0, now - at) * most / 60000)
end
local function keep(hash, name, most, left)
  redis.call('HSET', hash, name, string.format('%.6f', left), name .. ':at', string.format('%.0f', now))
  local full = math.ceil((most - left) * 60000 / most) + 1000
  if redis.call('PTTL', hash) < full then redis.call('PEXPIRE', hash, string.format('%.0f', full)) end
end
"""

_PUT_KEY = script(
    "put_key",
    """
-- Store a key's entry, unless it has changed since it was read.
-- KEYS: 1 keys (hash).
-- ARGV: 1 key id, 2 entry before or '', 3 entry.
-- Reply: 1 if it was stored, else 0.
-- Atomic: of two writers that read the same entry, one stores.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
""",
)


def put_key(keys: str, key_id: str, before: bytes, entry: bytes) -> ScriptCall:
    """Store the entry of a key if it still is ``before`` (empty: there is none). Reply: 1 if it was stored."""
    return ScriptCall(_PUT_KEY, [keys], [key_id, before, entry])


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one client. 0: none of this kind."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0
    budget_nano: int = 0
    period: str = ""
    """``day``, ``week`` or ``month``; empty: the budget is for all time."""


class AdmissionReply(msgspec.Struct, frozen=True, array_like=True):
    """The decision about a request. Levels of -1: not limited."""

    refused: str
    """``""``, ``budget``, ``requests``, ``tokens`` or ``concurrency``."""
    retry_ms: int
    requests_left: int
    requests_full_ms: int
    tokens_left: int
    tokens_full_ms: int
    spent_nano: int
    """In the budget's period."""


_ADMIT = script(
    "admit",
    """
-- Admit a request if no limit of its client is reached.
-- KEYS: 1 rates (hash), 2 open answers (sorted set), 3 spend (hash).
-- ARGV: 1 run, 2 requests a minute, 3 tokens a minute, 4 open answers, 5 budget, 6 its period, 7 lease of an answer
-- in ms.
-- Reply: see `AdmissionReply`.
-- Atomic: requests that come at once, at several gateways, cannot share the last place.
"""
    + NOW
    + _BUCKETS
    + """
local use, open, spend, run = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local rpm, tpm, most, budget = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local period, lease = ARGV[6], tonumber(ARGV[7])
local function spent()
  if period == '' then return tonumber(redis.call('HGET', spend, 'total:cost') or '0') end
  local today = math.floor(now / 86400000)
  local first = today
  if period == 'week' then
    first = today - (today + 3) % 7
  elseif period == 'month' then
    -- The day of the month, from the days since 0000-03-01: https://howardhinnant.github.io/date_algorithms.html
    local z = today + 719468
    local doe = z - math.floor(z / 146097) * 146097
    local leaps = math.floor(doe / 1460) - math.floor(doe / 36524) + math.floor(doe / 146096)
    local yoe = math.floor((doe - leaps) / 365)
    local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
    local mp = math.floor((5 * doy + 2) / 153)
    first = today - (doy - math.floor((153 * mp + 2) / 5))
  end
  local fields, sum = {}, 0
  for day = first, today do fields[#fields + 1] = string.format('%d:cost', day) end
  for _, cost in ipairs(redis.call('HMGET', spend, unpack(fields))) do sum = sum + (tonumber(cost) or 0) end
  return sum
end
local refused, retry, requests, tokens, cost = '', 0, -1, -1, 0
if budget > 0 then
  cost = spent()
  if cost >= budget then refused = 'budget' end
end
if rpm > 0 then
  requests = level(use, 'requests', rpm)
  if refused == '' and requests < 1 then refused, retry = 'requests', math.ceil((1 - requests) * 60000 / rpm) end
end
if tpm > 0 then
  tokens = level(use, 'tokens', tpm)
  if refused == '' and tokens <= 0 then refused, retry = 'tokens', math.ceil((1 - tokens) * 60000 / tpm) end
end
if most > 0 then
  redis.call('ZREMRANGEBYSCORE', open, '-inf', now)
  if refused == '' and not redis.call('ZSCORE', open, run) and redis.call('ZCARD', open) >= most then
    refused, retry = 'concurrency', 1000
  end
end
if refused == '' then
  if rpm > 0 then
    requests = requests - 1
    keep(use, 'requests', rpm, requests)
  end
  if most > 0 then
    redis.call('ZADD', open, string.format('%.0f', now + lease), run)
    redis.call('PEXPIRE', open, 2 * lease)
  end
  redis.call('HSET', spend, 'used', string.format('%.0f', now))
end
local function full(left, limit)
  if limit == 0 then return 0 end
  return math.ceil((limit - left) * 60000 / limit)
end
return {refused, retry, math.floor(requests), full(requests, rpm), math.floor(math.max(tokens, tpm > 0 and 0 or -1)),
  full(tokens, tpm), string.format('%.0f', cost)}
""",
)


def admit(use: str, spend: str, run: str, limits: AdmissionLimits, *, lease_ms: int) -> ScriptCall:
    """Admit a request if no limit of its client is reached, and take its share of them. Reply: see `AdmissionReply`.

    The run counts as an open answer for ``lease_ms``, or until it is renewed or left.
    """
    args = (
        run,
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.concurrency,
        limits.budget_nano,
        limits.period,
        lease_ms,
    )
    return ScriptCall(_ADMIT, [use, f"{use}:open", spend], args)


_RENEW_OPEN = script(
    "renew_open",
    """
-- Keep the places of open answers.
-- KEYS: 1 open answers (sorted set).
-- ARGV: 1 lease in ms, 2 and further: runs.
-- Reply: none.
-- Atomic: places and the key's lifetime are extended together.
"""
    + NOW
    + """
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', string.format('%.0f', now + tonumber(ARGV[1])), ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], 2 * tonumber(ARGV[1]))
""",
)


def renew_open(use: str, runs: list[str], *, lease_ms: int) -> ScriptCall:
    """Keep the places of these open answers for ``lease_ms`` more."""
    return ScriptCall(_RENEW_OPEN, [f"{use}:open"], [lease_ms, *runs])


class RunUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a run used from its beginning to the event ``seq``, and what that costs."""

    seq: int
    fresh: int
    """Input that was neither read from the provider's cache nor written to it."""
    cache_read: int
    cache_write: int
    output: int
    prices: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Billionths of the currency per token, in the order of the counts. They apply to what is new since the last
    count.
    """
    price_name: str = ""
    ended: bool = False


_COUNT_USE = script(
    "count_use",
    """
-- Add what a run used since the last count to its client's spend.
-- KEYS: 1 what was counted of the run, 2 spend, 3 rates (hashes).
-- ARGV: 1 seq of the event, 2 lifetime of the count in ms, 3 tokens a minute, 4 name of the price, 5 whether the
-- run has
-- ended, 6 and further: four counts, then four prices.
-- Reply: 1, or 0 if this event was counted before.
-- Atomic: an event counts once, however many gateways report it.
"""
    + NOW
    + _BUCKETS
    + """
local counted, spend, use = KEYS[1], KEYS[2], KEYS[3]
local seq, keep_ms, tpm = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local name, ended = ARGV[4], ARGV[5] == '1'
local before = redis.call('HMGET', counted, 'seq', 'u1', 'u2', 'u3', 'u4')
if before[1] and tonumber(before[1]) >= seq then return 0 end
local new, cost = {}, 0
for i = 1, 4 do
  local was, is = tonumber(before[i + 1] or '0'), tonumber(ARGV[5 + i])
  new[i] = math.max(0, is - was)
  cost = cost + new[i] * tonumber(ARGV[9 + i])
  redis.call('HSET', counted, 'u' .. i, string.format('%.0f', math.max(was, is)))
end
redis.call('HSET', counted, 'seq', seq)
redis.call('PEXPIRE', counted, keep_ms)
cost = string.format('%.0f', cost)
local input, output = string.format('%.0f', new[1] + new[2] + new[3]), string.format('%.0f', new[4])
local today = math.floor(now / 86400000)
if redis.call('HEXISTS', spend, string.format('%d:cost', today)) == 0 then
  -- A new day: forget what is older than a year.
  for _, field in ipairs(redis.call('HKEYS', spend)) do
    local day = string.match(field, '^(%d+):')
    if day and tonumber(day) < today - 366 then redis.call('HDEL', spend, field) end
  end
end
for _, span in ipairs({string.format('%d', today), 'total'}) do
  redis.call('HINCRBY', spend, span .. ':cost', cost)
  redis.call('HINCRBY', spend, span .. ':input', input)
  redis.call('HINCRBY', spend, span .. ':output', output)
  if ended then redis.call('HINCRBY', spend, span .. ':runs', 1) end
end
if name ~= '' and cost ~= '0' then redis.call('HINCRBY', spend, 'price:' .. name .. ':cost', cost) end
if tpm > 0 then
  keep(use, 'tokens', tpm, level(use, 'tokens', tpm) - new[1] - new[2] - new[3] - new[4])
end
return 1
""",
)


def count_use(counted: str, *, spend: str, use: str, tokens_per_minute: int, used: RunUse, keep_ms: int) -> ScriptCall:
    """Add to a client's spend what its run used since the last count, once for each event however often it is sent.

    Reply: 1 if it was counted, 0 if this event, or a later one of the run, was counted before. ``keep_ms``: how long
    that is known; longer than an event of an open or just ended run may come again.
    """
    counts = (used.fresh, used.cache_read, used.cache_write, used.output)
    prices = [f"{price:.6f}" for price in used.prices]
    args = [used.seq, keep_ms, tokens_per_minute, used.price_name, int(used.ended), *counts, *prices]
    return ScriptCall(_COUNT_USE, [counted, spend, use], args)
