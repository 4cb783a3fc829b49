"""Key names. A run's keys and its partition's streams share the hash tag ``{n}``, and so one Cluster slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal
from zlib import crc32

from tokenbus.events.sessions import placing

WIRE_VERSION = 1
DEFAULT_PREFIX = "tokenbus"
DEFAULT_PARTITIONS = 8
MAX_PARTITIONS = 4096

InternalTopic = Literal["turns", "raw", "events", "drafts", "tools", "control", "records", "notices"]
PublicTopic = Literal["visible", "chunks", "blocks", "runs"]
RecordTopic = Literal["decisions", "sessions"]
"""Their events are in no run's log."""
SubscribedTopic = PublicTopic | RecordTopic
PUBLIC_TOPICS: tuple[PublicTopic, ...] = ("visible", "chunks", "blocks", "runs")
TOPICS: tuple[SubscribedTopic, ...] = (*PUBLIC_TOPICS, "decisions", "sessions")
"""All topics that clients can subscribe to."""
DATA_FIELD = "__data__"
TENANT_FIELD = "tenant"
"""Optional field of inbound entries: the request's tenant, equal to ``metadata.tenant``. Tenants take turns by it. If
it is missing, the server searches the request for it.
"""


def partition_in(stream: str) -> int | None:
    """The partition of a stream's name; None if it has none."""
    number = stream.partition("{")[2].partition("}")[0]
    return int(number) if number.isascii() and number.isdigit() else None


def order_keys(stream: str) -> tuple[str, str]:
    """Keys of a work queue's order, in the stream's slot: the sorted set of waiting entries and the hash of its
    tenants.
    """
    prefix = stream.rpartition(":")[0]
    base = stream if "{" in stream else f"{prefix}:{{{stream}}}"
    return f"{base}:order", f"{base}:tenants"


class Keys:
    """Key names of one deployment: its prefix, its number of partitions, and in which of them a run is.

    The number for new runs may change while the deployment runs (bus/layout.py, `apply`). A run stays in the partition
    where it began. So one object is shared by all parts of a process, and `note` records a run that is in another
    partition than the present number gives.
    """

    __slots__ = ("_elsewhere", "_held", "epoch", "ever", "numbers", "numbers_read_at", "partitions", "prefix")

    def __init__(self, prefix: str = DEFAULT_PREFIX, partitions: int = DEFAULT_PARTITIONS) -> None:
        """Raises ValueError for an impossible prefix or number."""
        if not prefix or any(c in prefix for c in "{}\r\n "):
            raise ValueError(f"prefix {prefix!r}: must be non-empty, without braces, blanks or line ends")
        if not 1 <= partitions <= MAX_PARTITIONS:
            raise ValueError(f"partitions {partitions}: must be 1 to {MAX_PARTITIONS}")
        self.prefix = prefix
        self.partitions = partitions
        """Number of partitions that may have runs: the largest that the deployment ever had."""
        self.numbers: tuple[int, ...] = (partitions,)
        """Numbers of partitions by which runs were placed that may still be kept; the first one places new runs."""
        self.ever = self.numbers
        """All numbers that the deployment ever had."""
        self.epoch = 0
        """Counts the changes of `numbers`."""
        self.numbers_read_at = 0.0
        """Monotonic time at which `numbers` was last read from the server."""
        self._elsewhere: dict[str, int] = {}
        """Partitions of runs that an earlier number placed. No further ones are placed by it, so this is bounded."""
        self._held: dict[str, tuple[int, int]] = {}
        """Runs on which this process works: their partition, and how often they are held."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and (self.prefix, self.numbers) == (other.prefix, other.numbers)

    def __hash__(self) -> int:
        return hash(self.prefix)

    def __repr__(self) -> str:
        return f"Keys({self.prefix!r}, {self.partitions}, numbers={self.numbers})"

    def apply(self, numbers: Sequence[int], partitions: int, epoch: int, ever: Sequence[int]) -> None:
        """Take over what the deployment has agreed on."""
        self.numbers, self.partitions, self.epoch, self.ever = tuple(numbers), partitions, epoch, tuple(ever)
        if len(self.numbers) == 1:
            self._elsewhere.clear()

    def widen(self, numbers: Sequence[int], partitions: int) -> None:
        """Look runs up by these numbers too; place them as before."""
        self.numbers = tuple(dict.fromkeys([*self.numbers, *numbers]))
        self.partitions = max(self.partitions, partitions)

    def partition_of(self, run: str) -> int:
        """``crc32(run) mod P``: the partition of all events of the run, or the partition noted for it. Runs of one
        session are in one partition (events/sessions.py).
        """
        if self._held and (held := self._held.get(run)) is not None:
            return held[0]
        if self._elsewhere and (noted := self._elsewhere.get(run)) is not None:
            return noted
        return crc32(placing(run).encode()) % self.numbers[0]

    def places(self, run: str) -> tuple[int, ...]:
        """The partitions where the run may be, first that of a new run. One, unless it may be in several."""
        if len(self.numbers) == 1 or run in self._elsewhere or run in self._held:
            return (self.partition_of(run),)
        number = crc32(placing(run).encode())
        return tuple(dict.fromkeys(number % p for p in self.numbers))

    def may_hold(self, partition: int, run: str) -> bool:
        """Whether a run with this id may be in the partition."""
        number = crc32(placing(run).encode())
        return any(number % p == partition for p in self.numbers)

    def note(self, run: str, partition: int) -> None:
        """Remember where a run was found."""
        if partition != self.partition_of(run):
            self._elsewhere[run] = partition

    def hold(self, runs: Iterable[str], stream: str) -> None:
        """Declare that these runs are in this stream's partition, even if new ones are placed otherwise.

        Call `release` as often.
        """
        if (partition := partition_in(stream)) is not None:
            for run in runs:
                self._held[run] = partition, self._held.get(run, (0, 0))[1] + 1

    def release(self, runs: Iterable[str]) -> None:
        """The end of a `hold`."""
        for run in runs:
            partition, holds = self._held.pop(run, (self.partition_of(run), 1))
            if holds > 1:
                self._held[run] = partition, holds - 1
            else:
                self.note(run, partition)

    def within(self, partition: int) -> Keys:
        """Key names for code that handles one partition's runs only: every run is in it."""
        return _KeysWithin(self, partition)

    @property
    def requests(self) -> str:
        """Inbound stream."""
        return f"{self.prefix}:requests"

    @property
    def meta(self) -> str:
        """Hash: partitions and wire version of the deployment (bus/layout.py)."""
        return f"{self.prefix}:meta"

    @property
    def dead(self) -> str:
        """Stream of dead letters."""
        return f"{self.prefix}:dead"

    @property
    def rejected(self) -> str:
        """List: ids of the entries of `dead` that are rejected requests, oldest first; in the same slot."""
        return f"{self.prefix}:{{{self.dead}}}:rejected"

    def added(self, name: str) -> str:
        """String: the entry of this name was added to `dead`; in the same slot."""
        return f"{self.prefix}:{{{self.dead}}}:added:{name}"

    def mcp(self, server: str) -> str:
        """JSON: the tools that this MCP server listed."""
        return f"{self.prefix}:mcp:{server}"

    @property
    def records(self) -> str:
        """Sorted set: recorded runs by the time of acceptance in ms; in the slot of `record_entries`."""
        return f"{self.prefix}:{{records}}:index"

    @property
    def record_entries(self) -> str:
        """Hash: index entry of each recorded run, as JSON."""
        return f"{self.prefix}:{{records}}:entries"

    @property
    def webhook_receivers(self) -> str:
        """Set: the receivers for which deliveries were ever added."""
        return f"{self.prefix}:{{webhooks}}:receivers"

    def webhook_due(self, receiver: str) -> str:
        """Sorted set: deliveries to this receiver of webhooks by the time of their next try in ms; in the slot of
        `webhook_bodies`.
        """
        return f"{self.prefix}:{{webhooks}}:due:{receiver}"

    def webhook_of(self, key: str) -> str | None:
        """The receiver whose deliveries wait at this key; None if none do."""
        begin = self.webhook_due("")
        return key.removeprefix(begin) if key.startswith(begin) else None

    def webhook_bodies(self, receiver: str) -> str:
        """Hash: what is delivered, by delivery id."""
        return f"{self.prefix}:{{webhooks}}:bodies:{receiver}"

    def limit(self, scope: str) -> str:
        """Hash: usage of one limit; all limits share a slot. With the suffix `:held`: its running calls."""
        return f"{self.prefix}:{{limits}}:{scope}"

    def file(self, name: str) -> str:
        """Text: id of the provider file with a blob's content; empty: the blob was sent, but not as a file."""
        return f"{self.prefix}:files:{name}"

    @property
    def gateway_keys(self) -> str:
        """Hash: entries of the gateway's clients by key id, as JSON; all keys of the gateway share a slot."""
        return f"{self.prefix}:{{gateway}}:keys"

    def gateway_use(self, key: str) -> str:
        """Hash: what a client has left of its rates. With the suffix ``:open``, a sorted set: its open answers by the
        time at which each counts as left.
        """
        return f"{self.prefix}:{{gateway}}:use:{key}"

    def gateway_spend(self, key: str) -> str:
        """Hash: what a client spent, by day and in all."""
        return f"{self.prefix}:{{gateway}}:spend:{key}"

    def gateway_held(self, key: str) -> str:
        """Hash: what a client's budget holds back for its open runs, and the sum. With the suffix ``:ends``, a sorted
        set: those runs by the time at which it expires.
        """
        return f"{self.prefix}:{{gateway}}:held:{key}"

    def gateway_counted(self, run: str) -> str:
        """Hash: what has been counted for a run, and what is reserved for it."""
        return f"{self.prefix}:{{gateway}}:counted:{run}"

    def gateway_owner(self, thing: str) -> str:
        """Text: who made a file or a batch of a provider's account, as JSON; by its id."""
        return f"{self.prefix}:{{gateway}}:owner:{thing}"

    def gateway_published(self, run: str) -> str:
        """Text: a background response that intake has not accepted yet, as JSON."""
        return f"{self.prefix}:{{gateway}}:published:{run}"

    def gateway_answers(self, ref: str) -> str:
        """Sorted set: the keys of the answers in a session that clients may come back to, by the time in ms."""
        return f"{self.prefix}:{{gateway}}:answers:{ref}"

    def gateway_writers(self, ref: str) -> str:
        """Hash: the last append of each producer that writes to a session as a stream."""
        return f"{self.prefix}:{{gateway}}:writers:{ref}"

    def gateway_deleted(self, run: str) -> str:
        """Text: exists if the response was deleted."""
        return f"{self.prefix}:{{gateway}}:deleted:{run}"

    @property
    def audit(self) -> str:
        """Stream: what operators changed in the deployment, newest last (bus/audit.py)."""
        return f"{self.prefix}:audit"

    @property
    def audit_clients(self) -> str:
        """Stream: what clients of the gateway changed, newest last."""
        return f"{self.prefix}:audit:clients"

    @property
    def gateway_members(self) -> str:
        """Sorted set: live gateways by the server time of their last heartbeat in ms."""
        return f"{self.prefix}:{{gateway}}:members"

    def activity(self, slot: int) -> str:
        """Hash: what the deployment did in this slot of time."""
        return f"{self.prefix}:{{activity}}:{slot}"

    @property
    def console_secret(self) -> str:
        """Text: the random bytes that sign logins and links of the console."""
        return f"{self.prefix}:{{gateway}}:console:secret"

    def console_login(self, nonce: str) -> str:
        """Text: exists until this login of the console ends."""
        return f"{self.prefix}:{{gateway}}:console:login:{nonce}"

    def members(self, group: str) -> str:
        """Sorted set: live workers of a group by the server time of their last heartbeat in ms."""
        return f"{self.prefix}:members:{group}"

    def topic(self, partition: int, topic: InternalTopic | PublicTopic | RecordTopic) -> str:
        """The stream of one topic in one partition."""
        return f"{self.prefix}:{{{partition}}}:{topic}"

    def lease(self, partition: int, group: str) -> str:
        """Hash: owner, token and expiry of the lease, with the group's offset, watermark and counters."""
        return f"{self.prefix}:{{{partition}}}:lease:{group}"

    def failed_tries(self, partition: int, group: str) -> str:
        """Hash: how often each event of a group of subscribers failed, and whose events are in hand."""
        return f"{self.lease(partition, group)}:failed"

    def returned(self, partition: int, group: str) -> str:
        """Stream: dead letters that were given back to a group of subscribers."""
        return f"{self.lease(partition, group)}:returned"

    def state(self, partition: int, group: str) -> str:
        """Hash: checkpoints of long open runs, by run id."""
        return f"{self.prefix}:{{{partition}}}:state:{group}"

    def pieces(self, partition: int, group: str, run: str) -> str:
        """Hash: the large part of an open run's checkpoint, in numbered pieces; deleted with the run."""
        return f"{self.prefix}:{{{partition}}}:pieces:{group}:{run}"

    def owed(self, partition: int, group: str) -> str:
        """Hash: the writes of a large commit that are still to be done, in parts."""
        return f"{self.prefix}:{{{partition}}}:owed:{group}"

    def run(self, run: str) -> str:
        """Hash: the run's status, attempt, request and result."""
        return f"{self.prefix}:{{{self.partition_of(run)}}}:run:{run}"

    def open_runs(self, partition: int, tenant: str = "") -> str:
        """Sorted set: the partition's open runs, or one tenant's, by the time of acceptance in ms."""
        return f"{self.prefix}:{{{partition}}}:index:open" + (tenant and f":{tenant}")

    def ended_runs(self, partition: int, tenant: str = "") -> str:
        """Sorted set: the partition's ended runs, or one tenant's, by the time of their end in ms, for as long as their
        hashes live.
        """
        return f"{self.prefix}:{{{partition}}}:index:ended" + (tenant and f":{tenant}")

    def waiting(self, partition: int, tenant: str = "") -> str:
        """Sorted set: what the partition's runs, or one tenant's, wait for, ``<run>/<wait>`` by the time since when."""
        return f"{self.prefix}:{{{partition}}}:index:waiting" + (tenant and f":{tenant}")

    def away(self, partition: int) -> str:
        """Sorted set: the partition's runs that are put away, by the time in ms at which they must be back."""
        return f"{self.prefix}:{{{partition}}}:index:away"

    def decision(self, run: str, decision: str) -> str:
        """Text: what became of a decision on one of the run's waits, as JSON."""
        return f"{self.prefix}:{{{self.partition_of(run)}}}:decision:{run}:{decision}"

    def log(self, run: str) -> str:
        """Stream: all public events of the run, ids ``<attempt>-<seq>``."""
        return f"{self.prefix}:{{{self.partition_of(run)}}}:log:{run}"

    def tree(self, root: str) -> str:
        """Stream: the order of the events of this run and of all child runs below it (`TreeEntry`)."""
        return f"{self.prefix}:{{{self.partition_of(root)}}}:log:tree/{root}"

    def kept_of(self, run: str) -> tuple[str, str, str]:
        """The hash and the log of a run, and the order of the tree whose root it is: what stays after its end."""
        return self.run(run), self.log(run), self.tree(run)

    def session(self, ref: str) -> str:
        """Hash: the session's configuration and counters. Its log is named as a run's: `log`."""
        return f"{self.prefix}:{{{self.partition_of(ref)}}}:session:{ref}"

    def sessions(self, partition: int, tenant: str = "") -> str:
        """Sorted set: the partition's sessions, or one tenant's, by the time of their last event in ms."""
        return f"{self.prefix}:{{{partition}}}:index:sessions" + (tenant and f":{tenant}")

    def of_session(self, ref: str) -> tuple[str, str, str, str]:
        """The session's other keys: its log; hash: the fate of each append, and what those that wait would start;
        sorted set: the messages that wait; hash: the history in pieces.
        """
        session = self.session(ref)
        return self.log(ref), f"{session}:appends", f"{session}:queue", f"{session}:history"

    def tape(self, run: str) -> str:
        """Stream: the parser's input of a recorded run, in order."""
        return f"{self.prefix}:{{{self.partition_of(run)}}}:tape:{run}"


class _KeysWithin(Keys):
    __slots__ = ("_all", "_partition")

    def __init__(self, every: Keys, partition: int) -> None:
        super().__init__(every.prefix, every.partitions)
        self._all = every
        self._partition = partition

    def partition_of(self, run: str) -> int:
        return self._partition

    def may_hold(self, partition: int, run: str) -> bool:
        return self._all.may_hold(partition, run)
