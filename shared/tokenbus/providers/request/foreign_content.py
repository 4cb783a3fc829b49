"""What of the model's earlier messages only their maker understands: signatures, ids, encrypted thinking, own items.

A part's `opaque` data say whose they are (``api``, ``provider``). They go back to that provider alone. For any other
the part goes without them: text and calls as they are, an image as one of the user's, thinking as text or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import (
    ContentPart,
    ExtraPart,
    Generate,
    ImagePart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from tokenbus.providers import plugins
from tokenbus.providers.request.notes import Notes
from tokenbus.providers.request.turns import Spoken, Takes

ORIGIN = ("api", "provider")
"""Names of opaque data that say whose the others are."""
MADE = "Images that the assistant made:"
"""What the model reads before its predecessor's images."""
_NAMES: dict[str, ApiName] = {
    "signature": "anthropic",
    "redacted": "anthropic",
    "reasoning_details": "openai-chat",
    "extra_content": "openai-chat",
    "encrypted": "openai-responses",
    "thought_signature": "gemini",
}
"""Whose data are that do not say it: names that one API alone has."""

_ITEMS = ("msg_", "rs_", "fc_", "ctc_", "ig_")
"""How ids of items begin in the Responses API, which is not alone in having ids."""

_Own = TextPart | ThinkingPart | ImagePart | ToolCallPart


def owner_of(part: _Own) -> tuple[str | None, str | None]:
    """The API and the provider whose data the part has; None where nothing tells."""
    opaque = part.opaque or {}
    api = opaque.get("api")
    if api is None:
        signed = isinstance(part, ThinkingPart) and part.signature
        apis = {_NAMES[name] for name in (*opaque, *(["signature"] if signed else ())) if name in _NAMES}
        if opaque.get("item_id", "").startswith(_ITEMS):
            apis.add("openai-responses")
        api = apis.pop() if len(apis) == 1 else None
    return api, opaque.get("provider")


def item_owner(part: ExtraPart) -> str | None:
    """The API whose own item it is. Decoders name what they cannot name otherwise ``<api>.<type>``; a name without an
    API in front was written by the client, for this request."""
    owner, dot, _ = part.name.partition(".")
    return owner if dot and owner in plugins.names() else None


class Adapted:
    """A message of the model as one API takes it."""

    def __init__(self, message: Spoken, request: Generate, takes: Takes, notes: Notes) -> None:
        self.parts: list[ContentPart] = []
        self.images: list[ContentPart] = []
        """Those that go as the user's, after the message and the results of its calls."""
        self._where = message.where
        self._own_run = message.where.startswith("history")
        self._request = request
        self._takes = takes
        self._notes = notes
        self._item_id = ""
        """Of the latest thinking: other parts of the same item belong to it."""
        for part in message.parts:
            self._add(part)

    def _add(self, part: ContentPart) -> None:
        if isinstance(part, ExtraPart):
            owner = item_owner(part)
            if owner in (None, self._takes.api):
                self.parts.append(part)
            else:
                self._notes.add(self._where, f"an item of {owner} ({part.name}) was left out: no other API knows it")
        elif isinstance(part, _Own):
            api, provider = owner_of(part)
            mine = api in (None, self._takes.api) and provider in (None, self._request.provider)
            bare = _bare(part) if mine else _stripped(part)
            match bare:
                case ThinkingPart():
                    self._think(bare, provider or api, mine=mine)
                case ImagePart() if not (mine and self._takes.model_images):
                    self._notes.add(self._where, "the model's images go as the user's")
                    self.images += [bare] if self.images else [TextPart(text=MADE), bare]
                case _:
                    if not mine and "citations" in (part.opaque or {}):
                        self._notes.add(self._where, f"citations of {provider or api} were left out")
                    self.parts.append(bare)
        else:
            self.parts.append(part)

    def _think(self, part: ThinkingPart, maker: str | None, *, mine: bool) -> None:
        """Thinking, where the API knows it again or takes it plain."""
        names = {"signature", *(part.opaque or {})} if part.signature else part.opaque or {}
        item_id = (part.opaque or {}).get("item_id", "")
        known = any(name in names for name in self._takes.thinking) or (item_id and item_id == self._item_id)
        if known or (self._takes.plain_thinking and part.text):
            self._item_id = item_id
            self.parts.append(part)
        elif part.text and self._request.convert_unsigned_thinking_to_text:
            self._notes.add(self._where, "thinking without a signature was turned into text")
            self.parts.append(TextPart(text=f"<thinking>{part.text}</thinking>"))
        elif not mine:
            self._notes.add(self._where, f"thinking of {maker} was left out: no other provider takes it back")
        elif part.text and not self._own_run:
            self._notes.add(self._where, "thinking was left out: this provider takes none back without its signature")


def without_last_thoughts(said: Sequence[Spoken], notes: Notes) -> list[Spoken]:
    """The messages without thinking that nothing of the same message follows: APIs refuse it. Where the model goes on
    with its own message, it stays."""
    kept: list[Spoken] = []
    for i, message in enumerate(said):
        parts = list(message.parts)
        after = said[i + 1] if i + 1 < len(said) else None
        goes_on = after.role == "assistant" if after else message.where.startswith("history")
        if message.role == "assistant" and not goes_on:
            while parts and isinstance(parts[-1], ThinkingPart):
                parts.pop()
        if len(parts) < len(message.parts):
            notes.add(message.where, "thinking that nothing follows was left out")
        if parts:
            kept.append(msgspec.structs.replace(message, parts=parts))
    return kept


def _bare(part: _Own) -> _Own:
    """Without what says whose it is."""
    opaque = {name: value for name, value in (part.opaque or {}).items() if name not in ORIGIN}
    return msgspec.structs.replace(part, opaque=opaque or None)


def _stripped(part: _Own) -> _Own:
    """Without anything that only another provider understands."""
    if isinstance(part, ThinkingPart):
        return msgspec.structs.replace(part, opaque=None, signature=None)
    return msgspec.structs.replace(part, opaque=None)
