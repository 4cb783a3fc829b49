"""JSON values into storage and back, their large parts in a blob store. The rules are in `tokenbus.core.blob_refs`."""

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
    """A copy of a JSON value whose base64 of more than ``threshold`` characters is in the blob store, and whatever is
    at ``paths``: in its place stands ``{"__blobRef": blob id, "originalSize": characters, "mediaType": …}``.

    `restore_from_storage` gives the value back to the letter: data URLs, base64 with or without padding, URL-safe or
    in lines, and members of the value's own called `__blobRef`. A path is a JSON Pointer (RFC 6901) in which `*` stands
    for any member or place. Raises NotStorable (a value that is not JSON, CircularValue, NestedTooDeep), ValueError
    for a path that is none, BlobError; then blobs may have been stored, which nothing names, and which their lifetime
    removes.
    """
    sanitized = storage.sanitize(value, threshold=threshold, paths=paths)
    for blob_id, part in sanitized.parts.items():
        ref = await blobs.store(part.content, part.media_type)
        if ref.blob_id != blob_id:
            raise BlobCorrupt(blob_id, f"the store gave it the id {ref.blob_id}")
    return sanitized.value


async def restore_from_storage(value: object, blobs: BlobLoader) -> Any:
    """The value that `sanitize_for_storage` was given. ``value`` may have been through JSON.

    Raises BlobError where a blob is gone, Malformed for a reference that is none, NestedTooDeep.
    """
    contents = {blob_id: await blobs.load(blob_id) for blob_id in sorted(storage.refs(value))}
    return storage.restore(value, contents)
