"""What is kept, where and for how long: finished runs, topics, blobs, debug records."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus.blob_wire import DEFAULT_URL
from tokenbus_services.settings.types import Bytes, Count, HttpUrl, ImportPath, Seconds, Table


class RetentionSettings(Table, frozen=True, kw_only=True):
    """How long finished data stays readable."""

    open_run_s: Seconds = 86_400.0
    """Maximum life of a run's keys without a new turn."""
    finished_run_s: Seconds = 3_600.0
    session_s: Seconds = 7 * 86_400.0
    """How long a session stays after its last event, and each of its runs after its own end."""
    topic_entries: Annotated[int, Meta(ge=1000)] = 50_000
    """Approximate number of entries kept per public topic and partition. Must exceed what a subscriber reads at once,
    so that it can detect when unread entries were trimmed.
    """
    dead_entries: Count = 10_000
    full_share: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Above this share of the server's `maxmemory`, public events, dead letters and ended runs are deleted before their
    time, oldest first, until a tenth of `maxmemory` less is in use. 1: never.
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
