"""Limits: provider rate limits, bounds on everything else, and what is kept for how long."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus.blob_wire import DEFAULT_URL
from tokenbus.bus.scripts.commit import MOST_EVENTS, MOST_RUNS
from tokenbus.bus.server.durability import Durability
from tokenbus.events.requests import DurabilityLevel
from tokenbus_services.settings.types import Bytes, Count, HttpUrl, ImportPath, Seconds, Table, WaitSeconds


class RateSettings(Table, frozen=True, kw_only=True):
    """Limits of all fetchers together in one scope; None: no limit. See docs/guides/limits.md."""

    requests_per_second: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    """Allows bursts of one second's worth, and of at least one request."""
    tokens_per_minute: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    """Input and output tokens. Allows bursts of one minute's worth."""
    concurrency: Count | None = None
    """Concurrent calls."""


class ProviderRates(RateSettings, frozen=True, kw_only=True):
    """The limits of one provider and its models."""

    models: dict[str, RateSettings] = {}
    """By name, or by prefix followed by `*` (`gpt-5*`), whose models share one limit. Exact names take precedence, then
    the longest prefix.
    """


class LimitSettings(Table, frozen=True, kw_only=True):
    """Limits; exceeding one gives a specific error."""

    request_bytes: Bytes = 4 * 2**20
    inbound_entries: Count = 100_000
    answer_bytes: Bytes = 256 * 2**20
    """Maximum size of one provider response, decoded; images count as base64."""
    block_characters: Annotated[int, Meta(ge=1, le=16 * 2**20)] = 2**20
    """Maximum characters of one block; beyond it the run fails. A block's content is written in one step of the server.
    """
    run_input_events: Count = 500_000
    """Maximum events that the parser reads of one run, from its provider and its tools; beyond it the run fails."""
    turn_bytes: Bytes = 64 * 2**20
    """Maximum events of a turn's attempts; beyond it the run fails with `turn_too_large`. The parser keeps a turn in
    memory.
    """
    run_bytes: Bytes = 256 * 2**20
    """The same for a whole run, including tool results and policy verdicts: `run_too_large`."""
    child_runs: Annotated[int, Meta(ge=0, le=1000)] = 32
    """Maximum child runs that one run begins; beyond it a call gets the error `too_many_children`."""
    child_depth: Annotated[int, Meta(ge=0, le=10)] = 3
    """Maximum depth of a child run, 1 for that of a run that a client began; beyond it a call gets `child_too_deep`."""
    hosted_approval_timeout_s: WaitSeconds = 86_400.0
    """How long a call that its provider runs waits for somebody who allows it; then it is denied."""
    runs_per_fetcher: Count = 512
    """Concurrent calls of one fetcher. If one tenant or one provider takes more than its share of them, up to half as
    many more begin for other tenants, and as many for other providers.
    """
    waiting_per_fetcher: Count = 1024
    """Additional queued runs that a fetcher considers, so that every tenant gets its turn. One tenant never fills the
    queue.
    """
    longest_wait_s: Seconds = 3600.0
    """Maximum time a run waits for its turn before it fails with `limit_wait`. A request's `deadline_s` may be
    shorter.
    """
    providers: dict[str, ProviderRates] = {}
    """By provider name. With a table, even an empty one, a provider's Retry-After applies to all fetchers."""
    tenant: RateSettings | None = None
    """For each tenant (`metadata.tenant`) without its own table. Runs without a tenant count as one tenant."""
    tenants: dict[str, RateSettings] = {}
    """By tenant name; empty string: runs without a tenant."""
    tool_calls_per_worker: Count = 64
    tool_executors: bool = True
    """Python tools run in processes of their own, one call in each, so that one that blocks or dies costs other calls
    nothing. False: in the worker itself, and a tool that blocks it costs them all.
    """
    tool_memory_bytes: Bytes = 512 * 2**20
    """Memory that such a process may use beyond what it has at its start. Beyond it, the call gets an error result."""
    tool_slack_s: Seconds = 120.0
    """How long a call may stay open after its timeout, because it may have waited for an executor or been reassigned.
    Then it gets an error result.
    """
    silent_run_s: Seconds = 10.0
    """A run without events for this long is looked for in the queues. If its work is in none of them at two looks, it
    was lost: its attempt is repeated as after the loss of a worker, and an open tool call gets an error result.
    """
    tool_result_bytes: Bytes = 64 * 2**10
    """Larger results go to the blob store; the model and the bus get the beginning and the blob id."""
    tool_image_bytes: Annotated[int, Meta(ge=0)] = 2**20
    """Maximum image bytes per result that the model sees; further images are only mentioned."""
    mcp_message_bytes: Bytes = 8 * 2**20
    """Maximum size of one MCP server message."""
    policy_slack_s: Seconds = 30.0
    """How long beyond its policies' timeouts a run may wait for a policy worker, which may have to restart."""
    policy_calls_per_worker: Count = 64
    """Concurrent policy calls per worker, including deferred work; runs take turns."""
    policy_executors: Annotated[int, Meta(ge=0, le=64)] = 2
    """Processes per worker that run policies, so that one that blocks or dies costs other runs nothing. 0: policies run
    in the worker itself, and a policy that blocks it costs them all.
    """
    policy_starts: Count = 3
    """How often a policy may block or end its process in one run before its `on_error` decides."""
    policy_memory_bytes: Bytes = 512 * 2**20
    """Memory that such a process may use beyond what it has at its start. Beyond it, it ends at the cost of the run at
    fault.
    """
    policy_waiting_events: Count = 50_000
    """Maximum events waiting in one policy worker; beyond it, reading pauses."""
    session_share: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """What one tenant appends to its sessions within `retention.session_s`, as a share of the server's `maxmemory`. The
    server keeps each append several times. The same holds for conversations of the Responses API. What has no tenant is
    not limited.
    """
    lag_bytes: Bytes = 8 * 2**20
    """Backpressure threshold per partition and hop: a fetcher pauses reading sockets while a later stage lags this far
    behind; for runs with policies, also while the policy stage does.
    """


class RetentionSettings(Table, frozen=True, kw_only=True):
    """How long finished data stays readable."""

    open_run_s: Seconds = 86_400.0
    """Maximum life of a run's keys without a new turn."""
    finished_run_s: Seconds = 3_600.0
    session_s: Seconds = 7 * 86_400.0
    """How long a session stays after its last event, and each of its runs after its own end."""
    session_runs: Annotated[int, Meta(ge=1, le=100_000)] = MOST_RUNS
    """So many of its newest runs a session keeps, with what they added to its history. A run that begins beyond that
    makes it forget the oldest, and has a note of it.
    """
    session_events: Annotated[int, Meta(ge=100, le=1_000_000)] = MOST_EVENTS
    """So many of its newest events a session keeps, besides those of its runs, with the fates that they tell."""
    topic_entries: Annotated[int, Meta(ge=1000)] = 50_000
    """Approximate number of entries kept per public topic and partition. Must exceed what a subscriber reads at once,
    so that it can detect when unread entries were trimmed.
    """
    topic_bytes: Annotated[int, Meta(ge=0)] = 0
    """The same in bytes of the server's memory, beyond 1,000 entries. 0: no such bound."""
    ended_bytes: Annotated[int, Meta(ge=0)] = 0
    """Bytes of memory that the ended runs of one partition may use, with logs and results: beyond it the oldest are
    deleted before their time. Runs of sessions do not count. 0: no such bound.
    """
    dead_entries: Count = 10_000
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    """The same as `full_share`, in bytes of a node's memory: also for a server without `maxmemory`, or one that others
    use. Whichever is less counts. 0: no such bound.
    """
    full_share: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Above this share of the server's `maxmemory`, public events, dead letters and ended runs are deleted before their
    time, oldest first, until an eighth of that is free. 1: never.
    """


class BlobSettings(Table, frozen=True, kw_only=True):
    """The blob store. `url` is anything obstore accepts: `file:///…`, `memory://`, `s3://bucket/prefix`."""

    url: str | None = None
    """None: `blobs` in the data directory."""
    service_url: HttpUrl | None = None
    """URL at which other services reach the blob service (TOKENBUS_BLOBS_URL). None: the port `http.blobs` of this
    machine.
    """
    max_bytes: Bytes = 64 * 2**20
    """Maximum size of one blob."""
    quota_bytes: Annotated[int, Meta(ge=0)] = 32 * 2**30
    """Maximum size of all blobs; 0: limited only by the store."""
    ttl_s: Seconds = 86_400.0
    """Lifetime of a blob after it was last put. A blob that is read lives at least `retention.open_run_s` from then."""
    token_env: str = "TOKENBUS_BLOB_TOKEN"
    """Environment variable with the token that the blob service requires and other services send; with `_FILE`
    appended: a file with the token. Without a token, the service requires none and listens only on loopback.
    """
    loader: ImportPath | None = None
    """`module:factory`: your own store in place of the blob service; the factory returns a
    `tokenbus.blobs.BlobLoader`.
    """
    inline_characters: Count = 64 * 2**10
    """Base64 media in a request with more characters than this moves to the store when the request is accepted."""
    cache_bytes: Annotated[int, Meta(ge=0)] = 32 * 2**20
    """Recent blobs that each fetcher caches in memory; blobs larger than a quarter of this are never cached."""

    @property
    def address(self) -> str:
        """Where the blob service is reached."""
        return self.service_url or DEFAULT_URL


class DurabilitySettings(Table, frozen=True, kw_only=True):
    """What must not be lost in a fail-over: if the table exists, a request may wait for replicas or the disk. See
    docs/operate/failover.md.
    """

    default: DurabilityLevel = "server"
    """Of requests and providers that name none: `server` or `replicated`."""
    replicas: Annotated[int, Meta(ge=0, le=8)] = 1
    """How many replicas must have a request before its publisher is told that the server has it, what led to a tool's
    call before that runs, and a run before its end is published.
    """
    disk: bool = False
    """Whether it must be on the server's disk, too. Wants `appendfsync always`, else each wait takes up to a second."""

    def __post_init__(self) -> None:
        if not (self.replicas or self.disk):
            raise ValueError("with 0 replicas and no disk there is nothing to wait for")

    @property
    def meant(self) -> Durability:
        return Durability(self.default, self.replicas, self.disk)


class RecordSettings(Table, frozen=True, kw_only=True):
    """Debug records. If this table exists, even empty, a request may ask to be recorded; see
    docs/operate/records.md.
    """

    sample: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Fraction of runs to record without a request, among those that match all of the following."""
    providers: tuple[str, ...] = ()
    """Only runs with these providers; empty: any."""
    models: tuple[str, ...] = ()
    """Only runs with these models, exact or as prefixes followed by `*` (`gpt-5*`); empty: any."""
    metadata: dict[str, str] = {}
    """Only runs whose metadata contains these values."""
    raw_bytes: Bytes = 32 * 2**20
    """Maximum size of one run's raw stream; the rest is cut off, and the record notes it."""
    keep_s: Seconds = 7 * 86_400.0
    """How long a record is kept."""
    keep_entries: Count = 1_000
    """Maximum number of records; the oldest are removed first."""


class ArchiveSettings(Table, frozen=True, kw_only=True):
    """The archive of ended runs. If this table exists, even empty, recorders move the logs of ended runs to the object
    store of the blobs; see docs/operate/archive.md.
    """

    keep_s: Seconds = 30 * 86_400.0
    """How long a run is kept there after its end."""
    keep_tenants_s: dict[str, Seconds] = {}
    """The same for runs of these tenants."""
    keys: str | None = None
    """Directory with a key for each tenant whose logs are sealed; None: no log is."""
    hold_s: Seconds = 600.0
    """How long a server that is nearly full waits for a run's recorder before it forgets the run."""

    @property
    def longest_s(self) -> float:
        """The longest time for which a run is kept."""
        return max(self.keep_s, *self.keep_tenants_s.values(), self.keep_s)
