"""OpenRouter's `reasoning_details`: reasoning in pieces, some with a signature or encrypted, to be given back whole.

See https://openrouter.ai/docs/use-cases/reasoning-tokens: the list goes back with the message as it came, with the
pieces of one item put together.
"""

from __future__ import annotations

from typing import cast

import msgspec

_TEXT_FIELDS = ("text", "summary")
_OPAQUE_FIELDS = ("signature", "data")


class Detail(msgspec.Struct):
    """One item: the pieces of its text, and its other fields as they were last."""

    key: str
    """Its type and index: pieces of the same, one after another, are of one item."""
    pieces: dict[str, list[str]] = {}
    fields: dict[str, str] = {}
    """As JSON."""


def pieces_of(value: object) -> list[dict[str, object]]:
    """The field's pieces; none where it is no list of objects."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, object]", item) for item in items if isinstance(item, dict)]


def text_of(pieces: list[dict[str, object]]) -> str:
    """What can be read of them."""
    texts = [piece.get(field) for piece in pieces for field in _TEXT_FIELDS]
    return "".join(text for text in texts if isinstance(text, str))


def add(details: list[Detail], piece: dict[str, object]) -> int:
    """Take a piece in; how many bytes more are kept, about."""
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


def to_give_back(details: list[Detail]) -> str | None:
    """The items as JSON; None where none of them holds anything opaque, for then nobody wants them back."""
    if not any(field in detail.fields for detail in details for field in _OPAQUE_FIELDS):
        return None
    items: list[dict[str, object]] = []
    for detail in details:
        item: dict[str, object] = {field: msgspec.Raw(value) for field, value in detail.fields.items()}
        items.append(item | {field: "".join(texts) for field, texts in detail.pieces.items()})
    return _json(items)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
