"""Commit of an ordered stage: outputs, offset and watermark of one batch in one atomic step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from tokenbus.bus.scripts.run_index import INDEX_ENDED
from tokenbus.bus.scripts.script import MAX_VALUES, NOW, ROOM, Arg, ScriptCall, script


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
_OPERATIONS = {operation.letter: operation for operation in _NAMED.values()}

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

_COMMIT = script(
    "commit",
    """
-- Commit one batch of a stage: its outputs, its offset and its watermark.
-- KEYS: 1 lease (hash), 2 the stage's input (stream), 3 and further: the keys that the operations name.
-- ARGV: 1 token, 2 lease time in ms, 3 offset before, 4 offset after, 5 watermark, 6 entries, 7 bytes, 8 group that
-- shows
-- the offset, 9 entries kept in a topic, 10 kinds of all keys, 11 and further: the operations.
-- Reply: see `Commit`.
-- Atomic: outputs and offset move together, and only for the owner of the lease: that makes each output exactly once.
"""
    + NOW
    + OPERATE
    + """
local h = redis.call('HMGET', KEYS[1], 'token', 'offset', 'entries', 'done')
if h[1] ~= ARGV[1] then return {'fenced', h[1] or '0'} end
if h[2] ~= ARGV[3] then
  if h[2] == ARGV[4] then return {'already', h[2]} end
  return {'moved', h[2]}
end
local mirror = string.sub(ARGV[8], 2)
if mirror ~= '' and ARGV[3] ~= ARGV[4] and not redis.call('XRANGE', KEYS[2], ARGV[4], ARGV[4])[1] then
  return {'gone', ARGV[4]}
end
local alien, wrong = misfits(0, ARGV[10], {[KEYS[1]] = true})
if wrong then return redis.error_reply(wrong) end
ROOM
operate(11, #ARGV, 0, alien, ARGV[9])
local read, done = (h[3] or 0) + ARGV[6], (h[4] or 0) + ARGV[7]
move(KEYS[1], KEYS[2], ARGV[4], ARGV[5], now + ARGV[2], read, done, ARGV[8])
return {'ok', ARGV[4], unpack(lag)}
""".replace("ROOM", ROOM),
)

HELD_PER_ARG = 24
"""Approximate memory per argument in addition to its payload: a list slot, and sometimes a short string."""


class Commit:
    """One atomic commit of a partition: collects the writes, then becomes a `ScriptCall`.

    The server checks the lease token, then that the offset is where the batch began and the stage's input still exists,
    then the type of each key. Only then does it write, because Redis does not undo the writes of a script that fails.
    If a key of a single run has the wrong type, its writes are skipped so that other runs are not affected. If a shared
    key has the wrong type, the whole commit fails.

    Reply: ``['ok', offset, lag in bytes of each output counted with `arrived`…]``, ``['already', …]`` (this commit was
    applied and its reply was lost), ``['fenced', token]``, ``['moved', offset]`` or ``['gone', end]`` (a fail-over lost
    the batch after it was read). The last four write nothing.
    """

    def __init__(self, lease: str, stream: str) -> None:
        self._keys: list[str] = [lease, stream]
        self._kinds: list[str] = ["h", "s"]
        """Type of each key: ``h`` hash, ``s`` stream, upper case if it belongs to a single run; ``?``: any type."""
        self._index: dict[str, int] = {lease: 1, stream: 2}
        self._ops: list[Arg] = []
        self._logs: dict[str, str] = {}
        self._data = 0

    @property
    def held(self) -> int:
        """Approximate memory use in bytes."""
        return self._data + HELD_PER_ARG * len(self._ops)

    @property
    def keys(self) -> Sequence[str]:
        """The keys, the lease and the input first."""
        return self._keys

    @property
    def kinds(self) -> str:
        """The type of each key, a letter each."""
        return "".join(self._kinds)

    @property
    def operations(self) -> Sequence[Arg]:
        """The writes, as arguments of the script."""
        return self._ops

    def appended(self, stream: str) -> list[dict[bytes, bytes]]:
        """The fields of each entry that this commit appends to the stream."""
        return [
            {str(n).encode(): data for n, data in zip(fields[1::2], fields[2::2], strict=True)}
            for fields in self._written(APPEND, stream)
        ]

    def published_to_topic(self, stream: str) -> list[bytes]:
        """The events that this commit publishes to the topic stream alone."""
        return [data for (data,) in self._written(PUBLISH_TO_TOPIC, stream)]

    def _written(self, wanted: Operation, stream: str) -> Iterator[Sequence[Any]]:
        """What follows the key in each such operation on the stream."""
        ops: list[Any] = self._ops
        at = 0
        while at < len(ops):
            operation = _OPERATIONS[ops[at]]
            end = at + _length(operation, ops, at)
            if operation is wanted and self._keys[ops[at + 1] - 1] == stream:
                yield ops[at + 2 : end]
            at = end

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
        """Publish one public event: to the run's log under ``entry_id``, and to each topic stream."""
        self._logs[log] = entry_id
        self._data += len(data)
        places = [self._key(topic, "s") for topic in topics]
        self._ops += (PUBLISH.letter, self._key(log, "S"), entry_id, data, len(topics), *places)

    def publish_to_topic(self, topic: str, data: bytes) -> None:
        """Publish one event to a topic stream only, not to a run's log."""
        self._ops += (PUBLISH_TO_TOPIC.letter, self._key(topic, "s"), data)

    def count(self, lease: str, size: int) -> None:
        """Count ``size`` bytes as arrived at the group with this lease hash. Its lag does not slow down writers."""
        self._ops += (COUNT.letter, self._key(lease, "h"), size)

    def append(self, stream: str, fields: Sequence[Arg], *, of_run: bool = False) -> None:
        """Append one internal entry. ``fields``: alternating names and values, at most MAX_VALUES. ``of_run``: the
        stream belongs to a single run.
        """
        assert len(fields) <= MAX_VALUES
        self._data += _bytes(fields)
        self._ops += (APPEND.letter, self._key(stream, "S" if of_run else "s"), len(fields), *fields)

    def put(self, key: str, *fields: Arg) -> None:
        """Set fields of a hash; ``fields`` alternates names and values."""
        self._data += _bytes(fields)
        self._ops += (SET.letter, self._key(key, "H"), len(fields), *fields)

    def drop(self, key: str, field: str) -> None:
        """Delete a field of a hash."""
        self._ops += (DELETE.letter, self._key(key, "H"), field)

    def void(self, state_key: str, stream: str, run: str) -> None:
        """Save in a stage's state that all present entries of the run in the stream must be ignored."""
        self._ops += (VOID.letter, self._key(state_key, "H"), self._key(stream, "s"), run)

    def expire(self, key: str, ttl_ms: int) -> None:
        """Set the TTL of a key."""
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
        """Close the attempt unless it is closed: end it in `raw` with the frame ``lost``, refuse its further writes,
        and notify its fetcher, which would not learn of it while its provider is silent.
        """
        places = (self._key(raw, "s"), self._key(normalizer_lease, "h"), self._key(control, "s"))
        self._ops += (CLOSE_ATTEMPT.letter, self._key(run_key, "H"), attempt, *places, run, lost, control_frame)

    def end_run(
        self,
        run_key: str,
        open_runs: str,
        ended_runs: str,
        *,
        of_tenant: tuple[str, str] | None = None,
        run: str,
        keep_ms: int,
    ) -> None:
        """Note the time of the run's end in its hash, and move it from the index of open runs to that of ended ones,
        from which runs that ended more than ``keep_ms`` ago go; likewise in ``of_tenant``, those of its tenant.
        """
        names = (open_runs, ended_runs, *(of_tenant or (open_runs, ended_runs)))
        places = [self._key(name, "?") for name in names]
        self._ops += (END_RUN.letter, self._key(run_key, "H"), *places, run, keep_ms)

    def arrived(self, lease: str, size: int) -> None:
        """Count ``size`` bytes as arrived at the group with this lease hash; the reply includes the group's lag."""
        self._ops += (ARRIVED.letter, self._key(lease, "h"), size)

    def repeat(self, other: Commit, keys: Collection[str]) -> None:
        """Add the writes of ``other`` to ``keys`` again, including their publications to topics; nothing is written
        twice.
        """
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
        """The arguments after an operation's first key, with further keys renumbered for this commit."""
        keys = range(*operation.keys.indices(len(rest)))

        def renumbered(arg: Any) -> int:
            return self._key(other._keys[int(arg) - 1], other._kinds[int(arg) - 1])

        return [renumbered(arg) if i in keys else arg for i, arg in enumerate(rest)]

    def last_of(self, log: str) -> str | None:
        """Id of the last event for this log, if any."""
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
        """Build the call that commits the batch after offset ``begin`` up to ``end``: ``entries`` entries of ``size``
        bytes.

        ``mirror`` names the consumer group that shows the offset (with ENTRIESREAD from Redis 7). If it is set, the
        input is trimmed to the watermark.
        """
        head: list[Arg] = [token, ttl_ms, begin, end, watermark, entries, size]
        head += [("7" if entries_read else "6") + mirror, topic_entries, "".join(self._kinds)]
        return ScriptCall(_COMMIT, self._keys, head + self._ops)


def _bytes(fields: Sequence[Arg]) -> int:
    """Total size of the payloads in ``fields``."""
    return sum([len(field) for field in fields if isinstance(field, bytes)])


def _length(operation: Operation, ops: Sequence[Any], at: int) -> int:
    """Number of values of the operation at ``at``, including its letter and key."""
    length = 2 + operation.arguments
    return length + ops[at + length - 1] if operation.counts_more else length
