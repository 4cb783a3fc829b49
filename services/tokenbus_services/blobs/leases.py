"""Leases: keep a blob beyond its lifetime because an open run may need it.

A lease is an empty object next to the blobs, ``leases/<first two digits>/<digest>/<until>``. All data is in its name,
so writers cannot overwrite each other's leases; the latest counts. Leases are looked up only if a blob's own lifetime
has ended or would end before the requested lease.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

ROOT = "leases"
_KEY = re.compile(rf"{ROOT}/([0-9a-f]{{2}})/(\1[0-9a-f]{{62}})/(\d{{1,12}})")


def prefix_of(digest: str) -> str:
    """The prefix of this blob's leases."""
    return f"{ROOT}/{digest[:2]}/{digest}"


def key_of(digest: str, until: int) -> str:
    """The key of this blob's lease until this time (Unix seconds)."""
    return f"{prefix_of(digest)}/{until}"


def until_of(key: str) -> int | None:
    """When the lease ends; None if the key is not a lease."""
    match = _KEY.fullmatch(key)
    return int(match[3]) if match else None


def latest(keys: Iterable[str]) -> int:
    """The latest end of these leases; 0 if there are none."""
    return max((until for key in keys if (until := until_of(key)) is not None), default=0)
