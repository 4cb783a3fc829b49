"""The checks of `tokenbus doctor` around the bus: the blob store, this disk. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.cli.render.event_text import size

LITTLE_ROOM = 2**30
"""Free bytes below which the disk may soon be too full for the server's files and blobs."""


def check_blobs(url: str, *, problem: str | None, stranger: bool = False) -> Finding:
    """``problem``: why the blob service did not answer; None if it did. ``stranger``: something else answered."""
    if problem is None:
        return Finding(level="ok", about="blobs", says=f"answers at {url}")
    todo = "start it with `tokenbus worker blobs`, or set blobs.service_url"
    if stranger:
        todo = "set http.blobs to a free port, or 0 under `tokenbus up`; or set blobs.service_url"
    return Finding(level="wrong", about="blobs", says=f"{url}: {problem}", todo=todo)


def check_disk(path: str, *, free_bytes: int) -> Iterator[Finding]:
    """Check the data directory's disk, which holds the blob store and the server of `tokenbus up`."""
    if free_bytes < LITTLE_ROOM:
        yield Finding(
            level="wrong",
            about="disk",
            says=f"{size(free_bytes)} are free where {path} lies",
            todo="make room, or set data_dir to another disk",
        )
