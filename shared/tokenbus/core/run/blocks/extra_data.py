"""The `provider_extra` of one block, or of a run."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

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
