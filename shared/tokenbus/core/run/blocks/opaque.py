"""Opaque block data that a provider wants back, as public events carry it.

`block_complete` carries it, except for the signature, which has a field of its own. If a provider sends some of it
after the block's end, the run's terminal event carries it as `provider_extra` entries that name their block. Large
values are stored as blobs, and events name the blobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
        """The data that is missing, as `provider_extra` entries."""
        return [{"note": f"{name!r} is too large to be handed on without a blob store"} for name in self.too_large]

    @property
    def fields(self) -> dict[str, dict[str, str]]:
        """The non-empty fields for an event."""
        fields = {"opaque": self.opaque, "opaque_blobs": self.opaque_blobs}
        return {name: value for name, value in fields.items() if value}


MAX_EXTRA_CHARS = 1024 * 1024
"""Maximum JSON characters of one `provider_extra`."""
MAX_LEFT_OUT = 32
"""Maximum names that are listed of what was left out."""
JOINED_CHARS = 1024
"""Maximum characters of a piece that is joined from shorter ones; what a checkpoint stores whole is longer."""

_entries = msgspec.json.Decoder(list[dict[str, object]])


class LeftOut(msgspec.Struct):
    """What was left out under one name."""

    entries: int = 0
    chars: int = 0


class ExtraData(msgspec.Struct):
    """Collects entries up to a size. The result says what was left out."""

    pieces: list[str] = []
    """The entries as JSON, each followed by a comma. A growing text, so each checkpoint writes only what is new."""
    size: int = 0
    left_out: dict[str, LeftOut] = {}

    def add(self, extra: dict[str, object]) -> None:
        """Add one entry, or count it as left out."""
        text = _json(extra)
        if self.size + len(text) <= MAX_EXTRA_CHARS:
            self.size += len(text)
            append_piece(self.pieces, text)
            return
        name = str(extra.get("name") or "notes")
        name = name if name in self.left_out or len(self.left_out) < MAX_LEFT_OUT else "others"
        left_out = self.left_out.setdefault(name, LeftOut())
        left_out.entries += 1
        left_out.chars += len(text)

    def has(self, extra: dict[str, object]) -> bool:
        """Whether an equal entry was added."""
        text = _json(extra)
        return any(text in piece for piece in self.pieces)  # inside a string the quotes would be escaped

    def entries(self, further: Iterable[dict[str, object]] = ()) -> list[dict[str, object]]:
        """All entries in order, the ``further`` ones, and a note on each name of which some were left out."""
        own = _entries.decode(f"[{''.join(self.pieces)[:-1]}]") if self.pieces else []
        return [*own, *further, *(_note(name, left_out) for name, left_out in self.left_out.items())]


def append_piece(pieces: list[str], text: str) -> None:
    """Append to a growing text. Joins short pieces of like length: a word alone takes ten times its characters, and a
    run may be open for long. Longer pieces stay as they are, because checkpoints know them by identity.
    """
    pieces.append(text)
    while len(pieces) > 1 and len(pieces[-2]) <= len(pieces[-1]) and 2 * len(pieces[-1]) <= JOINED_CHARS:
        last = pieces.pop()
        pieces[-1] += last


def _json(extra: dict[str, object]) -> str:
    return msgspec.json.encode(extra).decode() + ","


def _note(name: str, left_out: LeftOut) -> dict[str, object]:
    size = f"{left_out.entries} with {left_out.chars} characters"
    return {"note": f"{name}: {size} left out, because provider_extra is limited to {MAX_EXTRA_CHARS} characters"}
