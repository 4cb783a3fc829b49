"""Opaque data of blocks: what a provider wants back with them, as public events hand it on.

It is told with the end of its block (`block_complete`), without the signature, which has a field of its own. A provider
may send some of it later; that is told with the run's end, as entries of `provider_extra` that name their block. Large
values lie in the blob store, and events name the blobs.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus.errors import TooLarge
from tokenbus.events.normalized import Opaque

MAX_INLINE_CHARS = 256 * 1024
"""Of one value in a public event. Only a value that the blob store did not take is ever that large."""


def check_size(kept: Mapping[str, str], new: Opaque, number: int, limit: int) -> None:
    """Raises TooLarge where a block would have more than ``limit`` characters of it."""
    size = len(new.value) + sum(len(value) for name, value in kept.items() if name != new.name)
    if size > limit:
        raise TooLarge(f"block {number}, what goes back with it", size, limit)


class OpaqueTracker(msgspec.Struct):
    """Opaque data of one block as an event tells it."""

    opaque: dict[str, str] = {}
    opaque_blobs: dict[str, str] = {}
    too_large: list[str] = []
    """Names of values that neither an event nor the blob store takes."""

    def add(self, name: str, value: str, blob_id: str) -> None:
        """One value; a newer one of the same name takes its place."""
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
        """What is missing, for a `provider_extra`."""
        return [{"note": f"{name!r} is too large to be handed on without a blob store"} for name in self.too_large]

    @property
    def fields(self) -> dict[str, dict[str, str]]:
        """The fields of an event, empty ones left out."""
        fields = {"opaque": self.opaque, "opaque_blobs": self.opaque_blobs}
        return {name: value for name, value in fields.items() if value}
