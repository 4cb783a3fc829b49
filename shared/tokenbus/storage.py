"""Stores JSON values with their large parts in a blob store, and restores them. `tokenbus.core.blob_refs` has the
rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenbus.blobs import BlobLoader
from tokenbus.core import blob_refs as storage
from tokenbus.core.blob_refs import MAX_DEPTH, REF, THRESHOLD
from tokenbus.errors import BlobCorrupt

__all__ = ["MAX_DEPTH", "REF", "THRESHOLD", "restore_from_storage", "sanitize_for_storage"]


async def sanitize_for_storage(
    value: object, blobs: BlobLoader, *, threshold: int = THRESHOLD, paths: Sequence[str] = ()
) -> Any:
    """Copy a JSON value and move its large parts to the blob store.

    Moved are base64 of more than ``threshold`` characters, and everything at ``paths``.
    Each moved part is replaced by ``{"__blobRef": blob id, "originalSize": characters, "mediaType": …}``.
    `restore_from_storage` restores the value exactly: data URLs, base64 with or without padding, URL-safe or wrapped,
    and the value's own members called `__blobRef`. A path is a JSON Pointer (RFC 6901) in which `*` matches any member
    or index.

    Raises NotStorable (a value that is not JSON, CircularValue, NestedTooDeep), ValueError for an invalid path, and
    BlobError. Some blobs may have been stored by then; nothing refers to them, and they expire.
    """
    sanitized = storage.sanitize(value, threshold=threshold, paths=paths)
    for blob_id, part in sanitized.parts.items():
        ref = await blobs.store(part.content, part.media_type)
        if ref.blob_id != blob_id:
            raise BlobCorrupt(blob_id, f"the store returned the id {ref.blob_id}")
    return sanitized.value


async def restore_from_storage(value: object, blobs: BlobLoader) -> Any:
    """Restore the value given to `sanitize_for_storage`. ``value`` may have been through JSON.

    Raises BlobError if a blob is missing, Malformed for an invalid reference, NestedTooDeep.
    """
    contents = {blob_id: await blobs.load(blob_id) for blob_id in sorted(storage.refs(value))}
    return storage.restore(value, contents)
