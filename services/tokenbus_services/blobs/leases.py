"""Leases: until when a blob stays although its lifetime is over, because a run that is still open may need it.

A lease is one small object beside the blobs, ``leases/<first two digits>/<digest>/<until>``, with nothing in it: all is
in its name, so that no two writers can overwrite each other's, and the latest counts. Looked for only where it matters:
when a blob's own lifetime is over, or will be over before the lease that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

ROOT = "leases"
_KEY = re.compile(rf"{ROOT}/([0-9a-f]{{2}})/(\1[0-9a-f]{{62}})/(\d{{1,12}})")


def prefix_of(digest: str) -> str:
    """Beneath which the leases of this blob lie."""
    return f"{ROOT}/{digest[:2]}/{digest}"


def key_of(digest: str, until: int) -> str:
    """The lease of this blob until then (Unix seconds)."""
    return f"{prefix_of(digest)}/{until}"


def until_of(key: str) -> int | None:
    """When the lease ends; None for what is no lease."""
    match = _KEY.fullmatch(key)
    return int(match[3]) if match else None


def latest(keys: Iterable[str]) -> int:
    """The end of the longest of these leases; 0 where there is none."""
    return max((until for key in keys if (until := until_of(key)) is not None), default=0)
