"""The commit of an ordered stage: outputs, offset and watermark of one batch in one step."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.scripts.call import MAX_VALUES, NOW, Arg, Call, script

_COMMIT = script(
    "commit",
    NOW
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
    -- An id that the log is past already is refused: must not fail midway, and need not be written again.
    redis.pcall('XADD', KEYS[tonumber(ARGV[i + 1])], ARGV[i + 2], '__data__', ARGV[i + 3])
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
    (this very commit is in: a lost reply), ``['fenced', token]`` or ``['moved', offset]``; these three write nothing.
    """

    def __init__(self, lease: str, stream: str) -> None:
        self._keys: list[str] = [lease, stream]
        self._index: dict[str, int] = {lease: 1, stream: 2}
        self._ops: list[Arg] = []

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
        """One internal entry; ``fields`` are names and values in turn, MAX_VALUES at the most."""
        assert len(fields) <= MAX_VALUES
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

    def close_attempt(
        self, run_key: str, attempt: int, raw: str, normalizer_lease: str, *, run: str, lost: bytes
    ) -> None:
        """Unless the attempt is closed: end it in `raw` with the frame ``lost``, and refuse what it still writes."""
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
