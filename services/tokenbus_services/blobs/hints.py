"""What to do about a blob store without room: said by its log and by `tokenbus doctor`."""

from __future__ import annotations

from tokenbus.errors import BlobQuotaExceeded, BlobStoreFull

FULL = {
    BlobQuotaExceeded.code: "raise blobs.quota_bytes, or lower blobs.ttl_s so that blobs expire sooner",
    BlobStoreFull.code: "make room where blobs are stored, or lower blobs.ttl_s so that blobs expire sooner",
}
