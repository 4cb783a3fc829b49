"""Commit of an ordered stage: outputs, offset and watermark of one batch in one atomic step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokenbus.bus.scripts.runs.index import LIFETIMES, MOST_FORGOTTEN
from tokenbus.bus.scripts.script import MAX_VALUES, Arg, ScriptCall, script


@script()
def owe(lease: str, owed: str, *, token: str, name: str, part: bytes, ttl_ms: int) -> ScriptCall:
    """Store one part of a large commit under this name, before the commit. Reply: 0 if another token holds the
    lease.
    """
    ...


COMMIT_VALUES = 3000
"""Maximum keys and arguments of one commit, unless one operation has more: a server takes about 2 µs for each."""
COMMIT_BYTES = 2**20
"""Maximum payload of one commit, unless one operation has more: a server takes 2 to 8 ms for it."""
DELETED_MS = 600_000
"""How long the fate of the append that deleted a session can be asked."""
MOST_EVENTS = 10_000
"""About so many of its newest events a session keeps, with the fates that they tell, unless its hash says
`most_events`.
"""
MOST_EVENT_BYTES = 16 * 2**20
"""And so many bytes of them, but for the newest."""
MOST_TAKEN_BYTES = 2 * 2**20
"""Up to this size what waits begins a run together, steers one, or is added between two; one message always does."""
MOST_RUNS = 4000
"""A session keeps so many of its newest runs, and what they added to its history, unless its hash says `most_runs`."""
FORGOTTEN_AT_ONCE = 100
"""Of so many runs one script forgets what they added to a history."""
TRIMMED_AT_ONCE = 16
"""Maximum older events that one script removes."""
TRIMMED_BYTES = 2**20
"""It removes no further one after so many bytes."""
LARGE_BYTES = 2**16
"""Of an event with a longer item the size is kept too: to read one of 4 MiB takes a server 5 ms. The topic has its type
and size alone.
"""


class Operation(NamedTuple):
    """One write of a commit. `Commit` builds a flat list of them, each as its letter, the number of the key it writes
    to, and its arguments; the scripts that commit (commit.lua, chain.lua) run it with pieces/operate.lua.
    """

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
END_RUN = Operation("z", 8, keys=slice(0, 6))
# open runs, ended runs, waits, those of the run's tenant (or the same again); run, milliseconds
ARRIVED = Operation("l")  # bytes
VOID = Operation("v", 3, keys=slice(0, 1))  # input; run, state
END_SESSION_RUN = Operation("f", 23, keys=slice(0, 18))
# the session's log, appends, queue and history; the run's log; hash and log of the next run; events, turns, the
# parser's lease; open runs, ended runs, those of the tenant (or the same again); the run's hash; sessions, those of
# the tenant (or the same again); the topic; run, status, next run, lifetimes
STEER_SESSION_RUN = Operation("g", 9, keys=slice(0, 6))
# the session's log, appends, queue and history; the run's log; the topic; run, turn, lifetime
WAIT = Operation("w", 7, keys=slice(0, 2))  # indexes of waits, of all and of the tenant; run, wait, record, since, kept
UNWAIT = Operation("y", 4, keys=slice(0, 2))  # the same indexes; run, wait
CANCEL_CHILD = Operation("k", 8, keys=slice(0, 5))
# events, raw, control, leases of parser and normalizer; run, event, control frame
JOIN_TREE = Operation("j", 2)  # run, entry
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
    "END_SESSION_RUN": END_SESSION_RUN,
    "STEER_SESSION_RUN": STEER_SESSION_RUN,
    "WAIT": WAIT,
    "UNWAIT": UNWAIT,
    "CANCEL_CHILD": CANCEL_CHILD,
    "JOIN_TREE": JOIN_TREE,
}
OPERATIONS = {operation.letter: operation for operation in _NAMED.values()}
"""By letter."""

LUA: Mapping[str, Any] = {
    **{name: operation.letter for name, operation in _NAMED.items() if operation is not ARRIVED},
    "MOST_FORGOTTEN": MOST_FORGOTTEN,
    "LIFETIMES": LIFETIMES,
    "DELETED_MS": DELETED_MS,
    "FORGOTTEN_AT_ONCE": FORGOTTEN_AT_ONCE,
    "MOST_RUNS": MOST_RUNS,
    "MOST_TAKEN_BYTES": MOST_TAKEN_BYTES,
    "MOST_EVENTS": MOST_EVENTS,
    "MOST_EVENT_BYTES": MOST_EVENT_BYTES,
    "TRIMMED_AT_ONCE": TRIMMED_AT_ONCE,
    "TRIMMED_BYTES": TRIMMED_BYTES,
    "LARGE_BYTES": LARGE_BYTES,
}
"""Constants of pieces/operate.lua, which takes every other letter for ARRIVED."""


def length_of(operation: Operation, ops: Sequence[Any], at: int) -> int:
    """Number of values of the operation at ``at``, including its letter and key."""
    length = 2 + operation.arguments
    return length + ops[at + length - 1] if operation.counts_more else length


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
            operation = OPERATIONS[ops[at]]
            end = at + length_of(operation, ops, at)
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
        self._data += len(data)
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

    def void(self, state_key: str, stream: str, run: str, state: bytes | None = None) -> None:
        """Save in a stage's state that all present entries of the run in the stream must be ignored; ``state``: and
        that this is its state after them.
        """
        self._data += len(state or b"")
        saved = b"".join(map(msgspec.msgpack.encode, (state, None, True)))
        self._ops += (VOID.letter, self._key(state_key, "H"), self._key(stream, "s"), run, saved)

    def expire(self, key: str, ttl_ms: int) -> None:
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
        and notify its fetcher, which would not notice while its provider is silent.
        """
        places = (self._key(raw, "s"), self._key(normalizer_lease, "h"), self._key(control, "s"))
        self._ops += (CLOSE_ATTEMPT.letter, self._key(run_key, "H"), attempt, *places, run, lost, control_frame)

    def end_run(
        self,
        run_key: str,
        open_runs: str,
        ended_runs: str,
        waiting: str,
        *,
        of_tenant: tuple[str, str, str] | None = None,
        run: str,
        keep_ms: int,
    ) -> None:
        """Write the time of the run's end to its hash, close its waits, and move the run from the index of open runs to
        that of ended ones. Runs that ended more than ``keep_ms`` ago are removed from the latter. The same for
        ``of_tenant``, the indexes of its tenant.
        """
        names = (open_runs, ended_runs, waiting)
        places = [self._key(name, "?") for name in (*names, *(of_tenant or names))]
        self._ops += (END_RUN.letter, self._key(run_key, "H"), *places, run, keep_ms)

    def end_session_run(
        self,
        session: str,
        *,
        of_session: Sequence[str],
        run_key: str,
        logs: tuple[str, str],
        next_key: str,
        inputs: tuple[str, str, str],
        indexes: Sequence[str],
        sessions: tuple[str, str],
        topic: str,
        run: str,
        status: str,
        next_run: str,
        open_ms: int,
        keep_ms: int,
    ) -> None:
        """Tell the session that its run has ended, and start ``next_run`` with what waits there. No effect unless the
        run is the session's open one.

        ``of_session``: its log, appends, queue and history. ``logs``: of the run and of the next one, whose hash is
        ``next_key``. ``inputs``: events, turns, the parser's lease. ``indexes``: of open and ended runs, of all and of
        the tenant, or of all again; ``sessions``: of all and of the tenant, or of all again. ``topic``: that of all
        sessions. ``open_ms``: lifetime of the next run's hash; ``keep_ms``: of an idle session.
        """
        places = [self._key(key, kind) for key, kind in zip((*of_session, logs[0]), "SH?HS", strict=True)]
        places += [self._key(next_key, "H"), self._key(logs[1], "S")]
        places += [self._key(key, kind) for key, kind in zip(inputs, "ssh", strict=True)]
        places += [*(self._key(key, "?") for key in indexes), self._key(run_key, "H")]
        places += [*(self._key(key, "?") for key in sessions), self._key(topic, "s")]
        rest = (run, status, next_run, open_ms, keep_ms)
        self._ops += (END_SESSION_RUN.letter, self._key(session, "H"), *places, *rest)

    def steer_session_run(
        self, session: str, *, of_session: Sequence[str], log: str, topic: str, run: str, turn: int, keep_ms: int
    ) -> None:
        """Put messages that steer the session's open run into its turn ``turn``, which begins. ``log``: the run's;
        otherwise as in `end_session_run`.
        """
        places = [self._key(key, kind) for key, kind in zip((*of_session, log, topic), "SH?HSs", strict=True)]
        self._ops += (STEER_SESSION_RUN.letter, self._key(session, "H"), *places, run, turn, keep_ms)

    def wait(
        self, run_key: str, indexes: tuple[str, str], *, run: str, wait: str, record: bytes, since_ms: int, keep_ms: int
    ) -> None:
        """Open a wait of the run, and list it in the indexes, of all and of the tenant, or of all again. Each listing
        removes some that were listed more than ``keep_ms`` before.
        """
        self._data += len(record)
        places = [self._key(index, "?") for index in indexes]
        self._ops += (WAIT.letter, self._key(run_key, "H"), *places, run, wait, record, since_ms, keep_ms)

    def unwait(self, run_key: str, indexes: tuple[str, str], *, run: str, wait: str) -> None:
        """Close a wait of the run, which goes on, if it is open."""
        places = [self._key(index, "?") for index in indexes]
        self._ops += (UNWAIT.letter, self._key(run_key, "H"), *places, run, wait)

    def cancel_child(
        self, run_key: str, inputs: tuple[str, str, str, str, str], *, run: str, event: bytes, control_frame: bytes
    ) -> None:
        """Cancel a child run of the partition, if it is open. ``event``: a `CancelRequested`; ``inputs``: events, raw,
        control, the leases of parser and normalizer.
        """
        places = [self._key(key, kind) for key, kind in zip(inputs, "ssshh", strict=True)]
        self._ops += (CANCEL_CHILD.letter, self._key(run_key, "H"), *places, run, event, control_frame)

    def begin_tree(self, tree: str, *, run: str, entry: bytes) -> None:
        """Write the first entry of a tree's order, in place of that of an earlier run with the root's id."""
        self.expire(tree, 0)
        self.append(tree, [run, entry], of_run=True)

    def join_tree(self, tree: str, *, run: str, entry: bytes) -> None:
        """Append an entry to a tree's order, unless it has expired: nothing would delete it then."""
        self._data += len(entry)
        self._ops += (JOIN_TREE.letter, self._key(tree, "S"), run, entry)

    def arrived(self, lease: str, size: int) -> None:
        """Count ``size`` bytes as arrived at the group with this lease hash; the reply includes the group's lag."""
        self._ops += (ARRIVED.letter, self._key(lease, "h"), size)

    @property
    def is_large(self) -> bool:
        """Whether the script would hold up everybody else; see `parts`."""
        return self.load > 1

    @property
    def load(self) -> float:
        """How much of what one script may do it takes; 1 is all."""
        return max((len(self._ops) + len(self._keys)) / COMMIT_VALUES, self._data / COMMIT_BYTES)

    def parts(self) -> list[Commit]:
        """The same writes in the same order, as commits that are not large."""
        parts = [part := Commit(*self._keys[:2])]
        ops: list[Any] = self._ops
        at = size = 0
        while at < len(ops):
            operation = OPERATIONS[ops[at]]
            end = at + length_of(operation, ops, at)
            more = _bytes(ops[at:end])
            values = len(part._ops) + len(part._keys) + end - at
            if part._ops and (values > COMMIT_VALUES or size + more > COMMIT_BYTES):
                parts.append(part := Commit(*self._keys[:2]))
                size = 0
            key = int(ops[at + 1]) - 1
            rest = part._renumbered(operation, ops[at + 2 : end], self)
            part._ops += (operation.letter, part._key(self._keys[key], self._kinds[key]), *rest)
            at, size = end, size + more
        return parts

    def encoded(self) -> bytes:
        """For `decode`: a third of the memory of the objects."""
        return msgspec.msgpack.encode((self._keys, self._kinds, self._ops, self._logs))

    @classmethod
    def decode(cls, data: bytes) -> Commit:
        """A commit that was stored as `encoded`."""
        keys, kinds, ops, logs = msgspec.msgpack.decode(data)
        self = cls(*keys[:2])
        self._keys, self._kinds, self._ops, self._logs = keys, kinds, ops, logs
        self._index = {key: number for number, key in enumerate(keys, 1)}
        return self

    def repeat(self, other: Commit, keys: Collection[str]) -> None:
        """Add the writes of ``other`` to ``keys`` again, including their publications to topics; nothing is written
        twice.
        """
        ops: list[Any] = list(other._ops)
        at = 0
        while at < len(ops):
            operation = OPERATIONS[ops[at]]
            end = at + length_of(operation, ops, at)
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
        owed: str = "",
        owes: str = "",
    ) -> ScriptCall:
        """Build the call that commits the batch after offset ``begin`` up to ``end``: ``entries`` entries of ``size``
        bytes.

        ``owed``: what the partition owes until then; if that is another, nothing is written. ``owes``: the same
        afterwards. Empty: nothing.

        ``mirror`` names the consumer group that shows the offset (with ENTRIESREAD from Redis 7). If it is set, the
        input is trimmed to the watermark.
        """
        return _commit(
            self._keys[0],
            self._keys[1],
            self._keys[2:],
            token=token,
            ttl_ms=ttl_ms,
            begin=begin,
            till=end,
            watermark=watermark,
            count=entries,
            size=size,
            mirror=("7" if entries_read else "6") + mirror,
            topic_entries=topic_entries,
            kinds="".join(self._kinds),
            owed=owed,
            owes=owes,
            operations=self._ops,
        )


@script(**LUA)
def _commit(
    lease: str,
    stream: str,
    others: Sequence[str],
    *,
    token: str,
    ttl_ms: int,
    begin: str,
    till: str,
    watermark: str,
    count: int,
    size: int,
    mirror: str,
    topic_entries: int,
    kinds: str,
    owed: str,
    owes: str,
    operations: Sequence[Arg],
) -> ScriptCall: ...


def _bytes(fields: Sequence[Arg]) -> int:
    """Total size of the payloads in ``fields``."""
    return sum([len(field) for field in fields if type(field) is bytes])
