"""The blob store and the service in front of it."""

from __future__ import annotations

from tokenbus.errors.base import TokenbusError


class BlobError(TokenbusError):
    """An error of the blob store."""

    code = "blob_error"


class BlobNotFound(BlobError):
    """No blob has this id, or it has expired."""

    code = "blob_not_found"

    def __init__(self, blob_id: str) -> None:
        super().__init__(f"no blob {blob_id}")
        self.blob_id = blob_id


class BlobTooLarge(BlobError):
    """The content exceeds the store's limit, in bytes."""

    code = "blob_too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the blob has {size} bytes or more, the limit is {limit}")
        self.size = size
        self.limit = limit


class BlobRefused(BlobError):
    """The blob was not stored or not returned: bad media type or id, wrong checksum, or a truncated upload."""

    code = "blob_refused"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class BlobCorrupt(BlobError):
    """The stored bytes do not match the id, because of a faulty disk or store. Storing the blob again repairs it."""

    code = "blob_corrupt"

    def __init__(self, blob_id: str, problem: str = "the stored bytes do not match their checksum") -> None:
        super().__init__(f"{blob_id}: {problem}")
        self.blob_id = blob_id
        self.problem = problem


class BlobUnauthorized(BlobError):
    """The blob service requires a token (`TOKENBUS_BLOB_TOKEN`), or the token is wrong."""

    code = "blob_unauthorized"
    told = "the blob store refuses this deployment"

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: the blob service requires a valid token")
        self.where = where


class BlobUnavailable(BlobError):
    """The store, or the service in front of it, is unreachable or failed.

    An upload may or may not have been stored; storing the same content again is safe.
    """

    code = "blob_unavailable"
    told = "the blob store is unavailable"
    retryable = True

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class BlobStoreFull(BlobUnavailable):
    """The store has no space for the blob; nothing was stored."""

    code = "blob_store_full"
    told = "the blob store is full"


class BlobQuotaExceeded(BlobStoreFull):
    """The store has reached its configured quota; nothing was stored. Space is freed when blobs expire."""

    code = "blob_quota_exceeded"
