"""OpenRouter's `reasoning_details`: reasoning in pieces, some signed or encrypted, to be sent back complete.

See https://openrouter.ai/docs/use-cases/reasoning-tokens: the list is sent back with the message as received, with the
pieces of each item joined.
"""

from __future__ import annotations

from typing import cast

import msgspec

_TEXT_FIELDS = ("text", "summary")
_OPAQUE_FIELDS = ("signature", "data")


class Detail(msgspec.Struct):
    """One item: the pieces of its text, and the latest value of every other field."""

    key: str
    """Its type and index. Consecutive pieces with the same key belong to one item."""
    pieces: dict[str, list[str]] = {}
    fields: dict[str, str] = {}
    """Values are JSON."""


def pieces_of(value: object) -> list[dict[str, object]]:
    """Return the field's pieces; empty if it is not a list of objects."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, object]", item) for item in items if isinstance(item, dict)]


def text_of(pieces: list[dict[str, object]]) -> str:
    """The readable text of the pieces."""
    texts = [piece.get(field) for piece in pieces for field in _TEXT_FIELDS]
    return "".join(text for text in texts if isinstance(text, str))


def add(details: list[Detail], piece: dict[str, object]) -> int:
    """Add a piece. Return roughly how many more bytes are now buffered."""
    key = _json([piece.get("type"), piece.get("index")])
    if not (details and details[-1].key == key):
        details.append(Detail(key))
    detail = details[-1]
    size = 16
    for field, value in piece.items():
        if field in _TEXT_FIELDS and isinstance(value, str):
            if value:
                detail.pieces.setdefault(field, []).append(value)
                size += len(value)
        elif value not in (None, ""):
            detail.fields[field] = _json(value)
            size += len(detail.fields[field])
    return size


def to_send_back(details: list[Detail]) -> str | None:
    """The items as JSON; None if none has opaque data, because then nothing needs to be sent back."""
    if not any(field in detail.fields for detail in details for field in _OPAQUE_FIELDS):
        return None
    items: list[dict[str, object]] = []
    for detail in details:
        item: dict[str, object] = {field: msgspec.Raw(value) for field, value in detail.fields.items()}
        items.append(item | {field: "".join(texts) for field, texts in detail.pieces.items()})
    return _json(items)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
