"""The commit of an ordered stage: outputs, offset and watermark of one batch in one step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from tokenbus.bus.scripts.script import MAX_VALUES, NOW, ROOM, Arg, ScriptCall, script


class Operation(NamedTuple):
    """One write of a commit: its letter, the key it writes to, then its arguments."""

    letter: str
    arguments: int = 1
    """How many follow its key."""
    counts_more: bool = False
    """The last of them says how many more follow."""
    keys: slice = slice(0, 0)
    """Which of all that follow its key are keys too."""


PUBLISH = Operation("d", 3, counts_more=True, keys=slice(3, None))  # entry id, data; the topics
APPEND = Operation("x", counts_more=True)  # fields
TELL = Operation("t")  # data
COUNT = Operation("n")  # bytes
SET = Operation("h", counts_more=True)  # fields
DELETE = Operation("u")  # field
EXPIRE = Operation("e")  # milliseconds
CLOSE_ATTEMPT = Operation("c", 7, keys=slice(1, 4))  # attempt; raw, lease, control; run, lost, control frame
ARRIVED = Operation("l")  # bytes
_NAMED = {
    "PUBLISH": PUBLISH,
    "APPEND": APPEND,
    "TELL": TELL,
    "COUNT": COUNT,
    "SET": SET,
    "DELETE": DELETE,
    "EXPIRE": EXPIRE,
    "CLOSE_ATTEMPT": CLOSE_ATTEMPT,
    "ARRIVED": ARRIVED,
}
_OPERATIONS = {operation.letter: operation for operation in _NAMED.values()}

_COMMIT = script(
    "commit",
    NOW
    + f"local {', '.join(_NAMED)} = {', '.join(repr(operation.letter) for operation in _NAMED.values())}\n"
    + """
local h = redis.call('HMGET', KEYS[1], 'token', 'offset')
if h[1] ~= ARGV[1] then return {'fenced', h[1] or '0'} end
if h[2] ~= ARGV[3] then
  if h[2] == ARGV[4] then return {'already', h[2]} end
  return {'moved', h[2]}
end
local mirror = string.sub(ARGV[8], 2)
if mirror ~= '' and ARGV[3] ~= ARGV[4] and not redis.call('XRANGE', KEYS[2], ARGV[4], ARGV[4])[1] then
  return {'gone', ARGV[4]}
end
local types, alien = {h = 'hash', H = 'hash', s = 'stream', S = 'stream'}, {}
for k = 1, #KEYS do
  local kind = string.sub(ARGV[10], k, k)
  local found = types[kind] and redis.pcall('TYPE', KEYS[k]).ok
  if found and found ~= 'none' and found ~= types[kind] then
    if kind == 'h' or kind == 's' then
      return redis.error_reply('WRONGTYPE ' .. KEYS[k] .. ' is a ' .. found .. ', no ' .. types[kind])
    end
    alien[k] = true
  end
end
ROOM
local lag = {'ok', ARGV[4]}
local i = 11
while ARGV[i] do
  local op = ARGV[i]
  local ours = not alien[tonumber(ARGV[i + 1])]
  if op == PUBLISH then
    -- An id that the log is past already is refused: then the topics have the event too, for they came together.
    local added = ours and redis.pcall('XADD', KEYS[tonumber(ARGV[i + 1])], ARGV[i + 2], '__data__', ARGV[i + 3])
    local last = i + 4 + ARGV[i + 4]
    if type(added) ~= 'table' then
      for j = i + 5, last do
        redis.call('XADD', KEYS[tonumber(ARGV[j])], 'MAXLEN', '~', ARGV[9], '*', '__data__', ARGV[i + 3])
      end
    end
    i = last + 1
  elseif op == APPEND then
    local last = i + 2 + ARGV[i + 2]
    if ours then redis.call('XADD', KEYS[tonumber(ARGV[i + 1])], '*', unpack(ARGV, i + 3, last)) end
    i = last + 1
  elseif op == TELL then
    redis.call('XADD', KEYS[tonumber(ARGV[i + 1])], 'MAXLEN', '~', ARGV[9], '*', '__data__', ARGV[i + 2])
    i = i + 3
  elseif op == COUNT then
    redis.call('HINCRBY', KEYS[tonumber(ARGV[i + 1])], 'arrived', ARGV[i + 2])
    i = i + 3
  elseif op == SET then
    local last = i + 2 + ARGV[i + 2]
    if ours then redis.call('HSET', KEYS[tonumber(ARGV[i + 1])], unpack(ARGV, i + 3, last)) end
    i = last + 1
  elseif op == DELETE then
    if ours then redis.call('HDEL', KEYS[tonumber(ARGV[i + 1])], ARGV[i + 2]) end
    i = i + 3
  elseif op == EXPIRE then
    if ours then redis.call('PEXPIRE', KEYS[tonumber(ARGV[i + 1])], ARGV[i + 2]) end
    i = i + 3
  elseif op == CLOSE_ATTEMPT then
    local run = KEYS[tonumber(ARGV[i + 1])]
    if ours and redis.call('HGET', run, 'closed') ~= ARGV[i + 2] then
      redis.call('XADD', KEYS[tonumber(ARGV[i + 3])], '*', ARGV[i + 6], ARGV[i + 7])
      redis.call('HINCRBY', KEYS[tonumber(ARGV[i + 4])], 'arrived', #ARGV[i + 7])
      redis.call('XADD', KEYS[tonumber(ARGV[i + 5])], 'MAXLEN', '~', 1000, '*', ARGV[i + 6], ARGV[i + 8])
      redis.call('HSET', run, 'closed', ARGV[i + 2])
    end
    i = i + 9
  else -- ARRIVED
    local key = KEYS[tonumber(ARGV[i + 1])]
    local arrived = redis.call('HINCRBY', key, 'arrived', ARGV[i + 2])
    lag[#lag + 1] = arrived - tonumber(redis.call('HGET', key, 'done') or '0')
    i = i + 3
  end
end
redis.call('HSET', KEYS[1], 'offset', ARGV[4], 'watermark', ARGV[5], 'until', now + ARGV[2])
local entries = redis.call('HINCRBY', KEYS[1], 'entries', ARGV[6])
redis.call('HINCRBY', KEYS[1], 'done', ARGV[7])
if mirror ~= '' then
  if string.sub(ARGV[8], 1, 1) == '7' then
    redis.pcall('XGROUP', 'SETID', KEYS[2], mirror, ARGV[4], 'ENTRIESREAD', entries)
  else
    redis.pcall('XGROUP', 'SETID', KEYS[2], mirror, ARGV[4])
  end
  -- An input that is others' too has no watermark, and whoever reads it needs no right to trim.
  if ARGV[5] ~= '0-0' then redis.call('XTRIM', KEYS[2], 'MINID', '~', ARGV[5]) end
end
return lag
""".replace("ROOM", ROOM),
)

HELD_PER_ARG = 24
"""Bytes of memory that an argument takes beside its payload: a place in the list, and now and then a short text."""


class Commit:
    """One atomic commit of a partition: gathers the writes, then becomes a `Call`.

    The server checks the lease token, then that the offset stands where the batch began and that a stage's input is
    still there, then the type of each key, and then writes all or nothing: it would not undo what a script wrote before
    it failed. What goes to a key of a single run that is of another type (somebody wrote there) is left out, for the
    others' sake; a shared key of another type fails the commit.

    Reply: ``['ok', offset, lag bytes of each output counted with `arrived`…]``, ``['already', …]`` (this very commit is
    in: a lost reply), ``['fenced', token]``, ``['moved', offset]`` or ``['gone', end]`` (a fail-over lost the batch
    after it was read); these four write nothing.
    """

    def __init__(self, lease: str, stream: str) -> None:
        self._keys: list[str] = [lease, stream]
        self._kinds: list[str] = ["h", "s"]
        """What each key is: a hash or a stream, in capitals where it is a single run's; ``?``: whatever it is."""
        self._index: dict[str, int] = {lease: 1, stream: 2}
        self._ops: list[Arg] = []
        self._logs: dict[str, str] = {}
        self._data = 0

    @property
    def held(self) -> int:
        """About how many bytes it takes in memory."""
        return self._data + HELD_PER_ARG * len(self._ops)

    def _key(self, key: str, kind: str) -> int:
        found = self._index.get(key)
        if found is None:
            self._keys.append(key)
            self._kinds.append(kind)
            found = self._index[key] = len(self._keys)
        elif self._kinds[found - 1] == "?":
            self._kinds[found - 1] = kind
        return found

    def publish(self, log: str, entry_id: str, data: bytes, topics: Sequence[str]) -> None:
        """One public event: to the run's log under ``entry_id``, and to each topic stream."""
        self._logs[log] = entry_id
        self._data += len(data)
        places = [self._key(topic, "s") for topic in topics]
        self._ops += (PUBLISH.letter, self._key(log, "S"), entry_id, data, len(topics), *places)

    def tell(self, topic: str, data: bytes) -> None:
        """One event that is of no run's log, to a topic stream."""
        self._ops += (TELL.letter, self._key(topic, "s"), data)

    def count(self, lease: str, size: int) -> None:
        """Count ``size`` bytes as arrived at the group whose lease hash this is. Its lag holds no writer up."""
        self._ops += (COUNT.letter, self._key(lease, "h"), size)

    def append(self, stream: str, fields: Sequence[Arg], *, of_run: bool = False) -> None:
        """One internal entry; ``fields`` are names and values in turn, MAX_VALUES at the most. ``of_run``: the stream
        is a single run's."""
        assert len(fields) <= MAX_VALUES
        self._data += _bytes(fields)
        self._ops += (APPEND.letter, self._key(stream, "S" if of_run else "s"), len(fields), *fields)

    def put(self, key: str, *fields: Arg) -> None:
        """Set fields of a hash; ``fields`` are names and values in turn."""
        self._data += _bytes(fields)
        self._ops += (SET.letter, self._key(key, "H"), len(fields), *fields)

    def drop(self, key: str, field: str) -> None:
        """Delete a field of a hash."""
        self._ops += (DELETE.letter, self._key(key, "H"), field)

    def expire(self, key: str, ttl_ms: int) -> None:
        """Set a key's time to live."""
        self._ops += (EXPIRE.letter, self._key(key, "?"), ttl_ms)

    def close_attempt(
        self,
        run_key: str,
        attempt: int,
        raw: str,
        normalizer_lease: str,
        control: str,
        *,
        run: str,
        lost: bytes,
        control_frame: bytes,
    ) -> None:
        """Unless the attempt is closed: end it in `raw` with the frame ``lost``, refuse what it still writes, and tell
        its fetcher, which would not hear of it while its provider is silent."""
        places = (self._key(raw, "s"), self._key(normalizer_lease, "h"), self._key(control, "s"))
        self._ops += (CLOSE_ATTEMPT.letter, self._key(run_key, "H"), attempt, *places, run, lost, control_frame)

    def arrived(self, lease: str, size: int) -> None:
        """Count ``size`` bytes as arrived at the group whose lease hash this is; the reply tells its lag."""
        self._ops += (ARRIVED.letter, self._key(lease, "h"), size)

    def repeat(self, other: Commit, keys: Collection[str]) -> None:
        """The writes of ``other`` to these keys once more, with what those put on topics; each writes once."""
        ops: list[Any] = list(other._ops)
        at = 0
        while at < len(ops):
            operation = _OPERATIONS[ops[at]]
            end = at + _length(operation, ops, at)
            key, kind = other._keys[int(ops[at + 1]) - 1], other._kinds[int(ops[at + 1]) - 1]
            if key in keys:
                rest = self._renumbered(operation, ops[at + 2 : end], other)
                self._ops += (operation.letter, self._key(key, kind), *rest)
            at = end

    def _renumbered(self, operation: Operation, rest: list[Any], other: Commit) -> list[Any]:
        """What follows an operation's first key, its further keys numbered as here."""
        keys = range(*operation.keys.indices(len(rest)))

        def renumbered(arg: Any) -> int:
            return self._key(other._keys[int(arg) - 1], other._kinds[int(arg) - 1])

        return [renumbered(arg) if i in keys else arg for i, arg in enumerate(rest)]

    def last_of(self, log: str) -> str | None:
        """The id of the last event that goes to this log."""
        return self._logs.get(log)

    def call(
        self,
        *,
        token: str,
        ttl_ms: int,
        begin: str,
        end: str,
        watermark: str,
        entries: int,
        size: int,
        mirror: str,
        entries_read: bool,
        topic_entries: int,
    ) -> ScriptCall:
        """The commit of the batch after offset ``begin`` up to ``end``, of ``entries`` entries and ``size`` bytes.

        ``mirror`` names the consumer group that shows the offset (with ENTRIESREAD from Redis 7 on); with it
        the input is trimmed to the watermark.
        """
        head: list[Arg] = [token, ttl_ms, begin, end, watermark, entries, size]
        head += [("7" if entries_read else "6") + mirror, topic_entries, "".join(self._kinds)]
        return ScriptCall(_COMMIT, self._keys, head + self._ops)


def _bytes(fields: Sequence[Arg]) -> int:
    """Of the payloads among them."""
    return sum([len(field) for field in fields if isinstance(field, bytes)])


def _length(operation: Operation, ops: Sequence[Any], at: int) -> int:
    """How many values the operation that begins here is, its letter and its key included."""
    length = 2 + operation.arguments
    return length + ops[at + length - 1] if operation.counts_more else length
