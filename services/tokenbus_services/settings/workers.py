"""How the workers run: retries, stages and queues, ports."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus_services.settings.types import Count, Seconds, Table


class RetrySettings(Table, frozen=True, kw_only=True):
    """How often and how soon a turn is tried again."""

    max_attempts: Count = 4
    """Tries of one turn that ended in a provider's error, the first included."""
    max_losses: Count = 20
    """Tries of one turn whose worker was lost; bounds a request that kills its workers."""
    base_delay_s: Seconds = 0.5
    max_delay_s: Seconds = 30.0


class StageSettings(Table, frozen=True, kw_only=True):
    """How the ordered stages and work queues run."""

    lease_s: Seconds = 3.0
    """Kill -9 is noticed within this; must be longer than any pause of a healthy worker."""
    tick_s: Seconds = 0.25
    max_records: Count = 256
    linger_ms: Annotated[float, Meta(ge=0, le=100)] = 3.0
    """Longest that the source gathers under load; nothing waits while idle."""
    drain_s: Seconds = 6.0
    """At shutdown, how long a fetcher lets its runs finish before it hands them over."""


class HttpSettings(Table, frozen=True, kw_only=True):
    """Each service's HTTP server: health, readiness and metrics pages, and the blob store. Its ports, one a service."""

    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    """Names by which the blob service is reached beside `localhost`, addresses and `blobs.service_url`."""
    connections: Count = 256
    """To one worker; beyond them, the one that has waited longest without a whole request is closed."""
    fetcher: int = 8081
    normalizer: int = 8082
    parser: int = 8083
    tools: int = 8084
    blobs: int = 8085
    recorder: int = 8086
    policy: int = 8087
