"""The object store underneath the blob store: opening, listing, error mapping, leftover files."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from tokenbus.errors import BlobStoreFull, BlobUnavailable, SettingsError

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta

_STAGED = re.compile(r".+#\d+")
"""object_store writes a local file as ``NAME#1`` and renames it once it is complete."""


def opened(url: str | None, directory: Path) -> ObjectStore:
    """Open the object store at the URL, or a local one in ``directory``. Raises SettingsError.

    S3 credentials, region and endpoint come from the environment (``AWS_…``), as obstore reads them.
    """
    try:
        if url is None:
            return LocalStore(directory, mkdir=True, automatic_cleanup=True)
        if url.startswith("file:"):
            return LocalStore.from_url(url, mkdir=True, automatic_cleanup=True)
        return from_url(url)
    except (BaseError, ValueError, OSError) as e:
        raise SettingsError("settings", "blobs.url", _first_line(e)) from None


def listed(objects: ObjectStore, prefix: str) -> ListStream[Sequence[ObjectMeta]]:
    # obstore's other overload refers to arro3, which is not installed.
    return obstore.list(objects, prefix)  # pyright: ignore[reportUnknownMemberType]


@contextmanager
def store_errors(where: str) -> Generator[None]:
    """Convert errors of obstore and the disk to BlobStoreFull and BlobUnavailable."""
    try:
        yield
    except OSError as e:
        full = e.errno in {errno.ENOSPC, errno.EDQUOT}
        raise (BlobStoreFull if full else BlobUnavailable)(where, e.strerror or str(e)) from e
    except BaseError as e:
        # object_store has no error type for a full disk; the kind of the I/O error is in its text.
        full = any(
            kind in str(e) for kind in ("kind: StorageFull", "kind: QuotaExceeded", "kind: FilesystemQuotaExceeded")
        )
        raise (BlobStoreFull if full else BlobUnavailable)(where, _first_line(e)) from e


def remove_staged(root: Path, before: float) -> None:
    """Remove partial local files left by a killed process, if last modified before this time (Unix seconds)."""
    for folder, _, names in os.walk(root):
        for name in filter(_STAGED.fullmatch, names):
            path = Path(folder, name)
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()


def _first_line(e: Exception) -> str:
    """An error's message without the debug dump that obstore appends."""
    return str(e).partition("\n")[0] or type(e).__name__
