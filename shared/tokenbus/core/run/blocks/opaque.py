"""Opaque block data that a provider wants back, as public events carry it.

`block_complete` carries it, except for the signature, which has a field of its own. If a provider sends some of it
after the block's end, the run's terminal event carries it as `provider_extra` entries that name their block. Large
values are stored as blobs, and events name the blobs.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus.errors import TooLarge
from tokenbus.events.normalized import Opaque

MAX_INLINE_CHARS = 256 * 1024
"""Maximum size of one inline value in a public event. Larger values occur only if the blob store did not take them."""


def check_size(kept: Mapping[str, str], new: Opaque, number: int, limit: int) -> None:
    """Raise TooLarge if a block would have more than ``limit`` characters of opaque data."""
    size = len(new.value) + sum(len(value) for name, value in kept.items() if name != new.name)
    if size > limit:
        raise TooLarge(f"block {number}, opaque data", size, limit, unit="characters")


class OpaqueTracker(msgspec.Struct):
    """Collects one block's opaque data in the form that events carry."""

    opaque: dict[str, str] = {}
    opaque_blobs: dict[str, str] = {}
    too_large: list[str] = []
    """Names of values that are too large for an event and not in the blob store."""

    def add(self, name: str, value: str, blob_id: str) -> None:
        """Add one value, replacing an earlier one of the same name."""
        self.opaque.pop(name, None)
        self.opaque_blobs.pop(name, None)
        if blob_id:
            self.opaque_blobs[name] = blob_id
        elif len(value) <= MAX_INLINE_CHARS:
            self.opaque[name] = value
        elif name not in self.too_large:
            self.too_large.append(name)

    @property
    def notes(self) -> list[dict[str, object]]:
        """What is missing, as `provider_extra` entries."""
        return [{"note": f"{name!r} is too large to be handed on without a blob store"} for name in self.too_large]

    @property
    def fields(self) -> dict[str, dict[str, str]]:
        """The non-empty fields for an event."""
        fields = {"opaque": self.opaque, "opaque_blobs": self.opaque_blobs}
        return {name: value for name, value in fields.items() if value}
