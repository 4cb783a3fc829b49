"""Run ids for requests without one: UUIDv7 (RFC 9562 section 5.7), which sorts by creation time."""

from __future__ import annotations

from hashlib import sha256
from uuid import UUID

RANDOM_BITS = 74


def uuid7(unix_ms: int, rest: int) -> str:
    """UUIDv7 of a time and 74 further bits; deterministic. Sorts by time, then by ``rest``."""
    a, b = divmod(rest & ((1 << RANDOM_BITS) - 1), 1 << 62)
    value = (unix_ms & ((1 << 48) - 1)) << 80 | 7 << 76 | a << 64 | 0b10 << 62 | b
    return str(UUID(int=value))


def id_of_entry(stream: str, entry_id: str) -> str:
    """Run id for a request without one, derived from its stream and entry id.

    An entry that is delivered twice, because its first reader died between accepting and acknowledging it, therefore
    gets the same run both times.
    """
    digest = sha256(f"{stream}\0{entry_id}".encode()).digest()
    return uuid7(int(entry_id.partition("-")[0]), int.from_bytes(digest[:10], "big"))
