"""A stored blob while it is read: the last chunk of a whole one is given out only if the content matches its id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import sha256

from tokenbus.blobs import BlobRef
from tokenbus.errors import BlobCorrupt
from tokenbus_services.blobs.backend import store_errors


class OpenBlob:
    """A blob opened for reading."""

    def __init__(self, ref: BlobRef, digest: str | None, read: AsyncIterator[bytes]) -> None:
        """``digest``: None for a part, which cannot be verified."""
        self.ref = ref
        self._digest = digest
        self._read = read

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the content, once. The last chunk is yielded only after the whole was verified.

        Raises BlobCorrupt if the stored bytes do not match the id, BlobUnavailable if the store fails.
        """
        hasher = sha256()
        held = b""
        with store_errors("read"):
            async for chunk in self._read:
                hasher.update(chunk)
                if held:
                    yield held
                held = chunk
        if self._digest not in {None, hasher.hexdigest()}:
            raise BlobCorrupt(self.ref.blob_id)
        if held:
            yield held
