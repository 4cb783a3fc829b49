"""The keys that seal the logs of tenants: a file for each, read again at each use, so that a deleted one is gone.

A file is named after its tenant, percent-encoded, with `.key` appended. Its lines are keys: the first one seals, the
others still open what they sealed.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, unquote

from tokenbus.errors import BlobUnavailable, SettingsError
from tokenbus_services.blobs.archive_format import key_id

LEAST_BYTES = 32
KEY_SUFFIX = ".key"


def tenant_ref(tenant: str) -> str:
    """The tenant in the names of objects."""
    return sha256(tenant.encode()).hexdigest()[:32]


class TenantKeys:
    """The keys in a directory; None if it has no keys."""

    def __init__(self, directory: Path | None) -> None:
        """Raises SettingsError if the existing keys cannot be used."""
        self._directory = directory
        if directory is None:
            return
        if find_spec("cryptography") is None:
            raise SettingsError("settings", "archive.keys", "needs the package cryptography: install tokenbus[archive]")
        try:
            for path in directory.iterdir():
                if path.name.endswith(KEY_SUFFIX):
                    _keys_in(path)
        except (OSError, BlobUnavailable) as e:
            raise SettingsError("settings", "archive.keys", str(e)) from None

    def sealing(self, tenant: str) -> bytes | None:
        """The key for a new log of the tenant; None: it is stored in clear. Raises BlobUnavailable for one that cannot
        be used, so that nothing is stored in clear by mistake.
        """
        if self._directory is None:
            return None
        keys = _keys_in(self._directory / f"{quote(tenant, safe='')}{KEY_SUFFIX}")
        return keys[0] if keys else None

    def opening(self, ref: str) -> Mapping[bytes, bytes]:
        """The keys of the tenant with this `tenant_ref`, by `key_id`. Raises BlobUnavailable."""
        if self._directory is None:
            return {}
        try:
            names = [path for path in self._directory.iterdir() if path.name.endswith(KEY_SUFFIX)]
        except OSError as e:
            raise BlobUnavailable("archive.keys", e.strerror or str(e)) from e
        of_tenant = [path for path in names if tenant_ref(unquote(path.name.removesuffix(KEY_SUFFIX))) == ref]
        return {key_id(key): key for path in of_tenant for key in _keys_in(path)}


def _keys_in(path: Path) -> list[bytes]:
    try:
        keys = path.read_bytes().split()
    except FileNotFoundError:
        return []
    except OSError as e:
        raise BlobUnavailable("archive.keys", f"{path.name}: {e.strerror or e}") from e
    if not keys or min(map(len, keys)) < LEAST_BYTES:
        raise BlobUnavailable("archive.keys", f"{path.name}: each line must be a key of {LEAST_BYTES} characters")
    return keys
