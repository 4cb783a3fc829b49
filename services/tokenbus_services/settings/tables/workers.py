"""Worker settings: retries, stages and queues, ports."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus_services.settings.types import Count, HttpUrl, Seconds, Table


class RetrySettings(Table, frozen=True, kw_only=True):
    """How often and how soon a turn is retried."""

    max_attempts: Count = 4
    """Maximum tries of one turn that end in a provider error, including the first."""
    max_losses: Count = 10
    """Maximum tries of one turn whose worker was lost; bounds a request that kills its workers. From the third on they
    are delayed like tries that end in a provider error.
    """
    base_delay_s: Seconds = 0.5
    max_delay_s: Seconds = 30.0


class StageSettings(Table, frozen=True, kw_only=True):
    """How the ordered stages and work queues run."""

    lease_s: Seconds = 3.0
    """A killed worker is noticed within this time; must be longer than any pause of a healthy worker."""
    tick_s: Seconds = 0.25
    max_records: Count = 256
    linger_ms: Annotated[float, Meta(ge=0, le=100)] = 3.0
    """Maximum time the source batches, when its process is saturated; no delay while it is less than half busy."""
    chained: bool = False
    """Whether `tokenbus up` runs fetcher, normalizer and parser as one process, the pipeline."""
    drain_s: Annotated[float, Meta(ge=0)] = 6.0
    """At shutdown, how long a fetcher lets its runs finish before handing them over."""


class HttpSettings(Table, frozen=True, kw_only=True):
    """HTTP server of each service: health, readiness and metrics pages, and the blob store. One port per service."""

    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    """Host names of the blob service and the gateway in addition to `localhost`, addresses and `blobs.service_url`."""
    connections: Count = 256
    """Maximum connections per worker; beyond it, the one that has waited longest without a complete request is
    closed.
    """
    fetcher: int = 8081
    normalizer: int = 8082
    parser: int = 8083
    tools: int = 8084
    blobs: int = 8085
    recorder: int = 8086
    policy: int = 8087
    pipeline: int = 8089
    gateway: int = 8088


class OtelSettings(Table, frozen=True, kw_only=True):
    """If the table exists, even empty, workers send traces and metrics by OTLP over HTTP. The standard variables
    (`OTEL_…`) apply to keys that are left out. See docs/operate/telemetry.md.
    """

    endpoint: HttpUrl | None = None
    """The collector's address, without `/v1/traces`. None: that of the environment, else `http://localhost:4318`."""
    sample: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of the runs that are traced, of those whose publisher does not decide it. None: that of the environment,
    else 1.
    """
    content: bool = False
    """Whether spans hold messages, answers, and arguments and results of tools."""
