"""What is kept, where and how long: finished runs, topics, blobs, debug records."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus_services.settings.types import Bytes, Count, ImportPath, Seconds, Table


class RetentionSettings(Table, frozen=True, kw_only=True):
    """How long finished things stay readable."""

    open_run_s: Seconds = 86_400.0
    """Longest life of a run's keys without a new turn."""
    finished_run_s: Seconds = 3_600.0
    topic_entries: Annotated[int, Meta(ge=1000)] = 50_000
    """Entries kept of each public topic in each partition, about. More than a subscriber reads at once, so that it
    can tell when what it had not read was trimmed."""
    dead_entries: Count = 10_000


class BlobSettings(Table, frozen=True, kw_only=True):
    """The blob store. `url` is what obstore takes: `file:///…`, `memory://`, `s3://bucket/prefix`."""

    url: str | None = None
    """None: `blobs` in the data directory."""
    service_url: str = "http://127.0.0.1:8085"
    """Where other services reach the blob service."""
    max_bytes: Bytes = 64 * 2**20
    """Of one blob."""
    quota_bytes: Annotated[int, Meta(ge=0)] = 32 * 2**30
    """Of all blobs; 0: what the store has room for."""
    ttl_s: Seconds = 86_400.0
    """Life of a blob after it was last put. One that is read lives at least `retention.open_run_s` from then."""
    token_env: str = "TOKENBUS_BLOB_TOKEN"
    """Environment variable with the token that the blob service asks for and the other services send; the same name
    with `_FILE` behind it: a file with the token. Without one it asks for none, and listens on loopback alone."""
    loader: ImportPath | None = None
    """`module:factory`: a store of your own in place of the blob service; the factory gives a
    `tokenbus.blobs.BlobLoader`."""
    inline_bytes: Bytes = 64 * 2**10
    """Base64 media of a request that is longer than so many characters goes to the store when the request is taken."""
    cache_bytes: Annotated[int, Meta(ge=0)] = 32 * 2**20
    """Recent blobs that each fetcher keeps in memory; one of more than a quarter of this is never kept."""


class RecordSettings(Table, frozen=True, kw_only=True):
    """Debug records. With this table, even an empty one, a request may ask for its own; see docs/operate/records.md."""

    sample: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The share of runs that are recorded unasked, of those to which all of the following apply."""
    providers: tuple[str, ...] = ()
    """Only runs with these; empty: with any."""
    models: tuple[str, ...] = ()
    """Only with these, or those with a beginning and `*` after it (`gpt-5*`); empty: with any."""
    metadata: dict[str, str] = {}
    """Only runs whose metadata has these texts."""
    raw_bytes: Bytes = 32 * 2**20
    """Kept of one run's raw stream; what is beyond is cut off, and the record says so."""
    keep_s: Seconds = 7 * 86_400.0
    """How long a record is kept."""
    keep_entries: Count = 1_000
    """How many records are kept; beyond it the oldest goes first."""
