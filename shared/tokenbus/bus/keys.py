"""Key names. A run's keys and its partition's streams share the hash tag ``{n}``, and so one Cluster slot."""

from __future__ import annotations

from typing import Literal
from zlib import crc32

import msgspec

WIRE_VERSION = 1
DEFAULT_PREFIX = "tokenbus"
DEFAULT_PARTITIONS = 8
MAX_PARTITIONS = 4096

InternalTopic = Literal["turns", "raw", "events", "drafts", "tools", "control", "records"]
PublicTopic = Literal["visible", "chunks", "blocks", "runs"]
RecordTopic = Literal["decisions"]
"""Topics for monitoring; their events are in no run's log."""
SubscribedTopic = PublicTopic | RecordTopic
PUBLIC_TOPICS: tuple[PublicTopic, ...] = ("visible", "chunks", "blocks", "runs")
TOPICS: tuple[SubscribedTopic, ...] = (*PUBLIC_TOPICS, "decisions")
"""All topics that clients can subscribe to."""
DATA_FIELD = "__data__"
TENANT_FIELD = "tenant"
"""Optional field of inbound entries: the request's tenant, equal to ``metadata.tenant``. Tenants take turns by it. If
it is missing, the server searches the request for it.
"""


def order_keys(stream: str) -> tuple[str, str]:
    """Keys of a work queue's order, in the stream's slot: the sorted set of waiting entries and the hash of its
    tenants.
    """
    prefix = stream.rpartition(":")[0]
    base = stream if "{" in stream else f"{prefix}:{{{stream}}}"
    return f"{base}:order", f"{base}:tenants"


class Keys(msgspec.Struct, frozen=True):
    """Key names of one deployment: its prefix and its number of partitions P."""

    prefix: str = DEFAULT_PREFIX
    partitions: int = DEFAULT_PARTITIONS

    def __post_init__(self) -> None:
        if not self.prefix or any(c in self.prefix for c in "{}\r\n "):
            raise ValueError(f"prefix {self.prefix!r}: must be non-empty, without braces, blanks or line ends")
        if not 1 <= self.partitions <= MAX_PARTITIONS:
            raise ValueError(f"partitions {self.partitions}: must be 1 to {MAX_PARTITIONS}")

    def partition_of(self, run: str) -> int:
        """``crc32(run) mod P``: the partition of all events of the run."""
        return crc32(run.encode()) % self.partitions

    @property
    def requests(self) -> str:
        """Inbound stream."""
        return f"{self.prefix}:requests"

    @property
    def meta(self) -> str:
        """Hash: partitions and wire version of the deployment."""
        return f"{self.prefix}:meta"

    @property
    def dead(self) -> str:
        """Stream of dead letters."""
        return f"{self.prefix}:dead"

    @property
    def rejected(self) -> str:
        """List: ids of the entries of `dead` that are rejected requests, oldest first; in the same slot."""
        return f"{self.prefix}:{{{self.dead}}}:rejected"

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

    def gateway_counted(self, run: str) -> str:
        """Hash: what was counted of a run already."""
        return f"{self.prefix}:{{gateway}}:counted:{run}"

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

    def members(self, group: str) -> str:
        """Sorted set: live workers of a group by the server time of their last heartbeat in ms."""
        return f"{self.prefix}:members:{group}"

    def topic(self, partition: int, topic: InternalTopic | PublicTopic | RecordTopic) -> str:
        """The stream of one topic in one partition."""
        return f"{self.prefix}:{{{partition}}}:{topic}"

    def lease(self, partition: int, group: str) -> str:
        """Hash: owner, token and expiry of the lease, with the group's offset, watermark and counters."""
        return f"{self.prefix}:{{{partition}}}:lease:{group}"

    def state(self, partition: int, group: str) -> str:
        """Hash: checkpoints of long open runs, by run id."""
        return f"{self.prefix}:{{{partition}}}:state:{group}"

    def pieces(self, partition: int, group: str, run: str) -> str:
        """Hash: the large part of an open run's checkpoint, in numbered pieces; deleted with the run."""
        return f"{self.prefix}:{{{partition}}}:pieces:{group}:{run}"

    def run(self, run: str) -> str:
        """Hash: the run's status, attempt, request and result."""
        return f"{self.prefix}:{{{self.partition_of(run)}}}:run:{run}"

    def open_runs(self, partition: int) -> str:
        """Sorted set: the partition's open runs by the time of acceptance in ms."""
        return f"{self.prefix}:{{{partition}}}:index:open"

    def ended_runs(self, partition: int) -> str:
        """Sorted set: the partition's ended runs by the time of their end in ms, for as long as their hashes live."""
        return f"{self.prefix}:{{{partition}}}:index:ended"

    def log(self, run: str) -> str:
        """Stream: all public events of the run, ids ``<attempt>-<seq>``."""
        return f"{self.prefix}:{{{self.partition_of(run)}}}:log:{run}"

    def tape(self, run: str) -> str:
        """Stream: the parser's input of a recorded run, in order."""
        return f"{self.prefix}:{{{self.partition_of(run)}}}:tape:{run}"
