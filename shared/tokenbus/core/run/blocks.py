"""The blocks of one attempt: a provider's interleaved regions become numbered public blocks.

Every block gives `block_start`, its chunks, `block_complete`, in this order; the chunks concatenate to exactly
the content. The table also keeps what the next turn must send back to the provider, each part at its place.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenbus.core.run.opaque import OpaqueTracker, check_size
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.public_blocks import call_heads, content_fields
from tokenbus.errors import TooLarge
from tokenbus.events.normalized import Opaque
from tokenbus.events.public import BlockComplete, BlockKind, BlockStarted, ImagePreview, ImageRef
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    ContentPart,
    ExtraPart,
    ImagePart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)

CARRIED = -(2**62)
"""Ordinal of a text that an earlier attempt left open, until this attempt goes on with it; below all others."""

MAX_EXTRAS = 100
"""Provider extras kept of one block, and of one run; more are dropped, for they are an account and no content."""


class OpenBlock(msgspec.Struct):
    """A block that is being written."""

    number: int
    kind: BlockKind
    pieces: list[str] = []
    size: int = 0
    tool_id: str | None = None
    tool_name: str | None = None
    opaque: dict[str, str] = {}
    handed_on: OpaqueTracker = msgspec.field(default_factory=OpaqueTracker)
    """The same as the block's end tells it."""
    extras: list[dict[str, object]] = []
    image: ImageRef | None = None
    previews: int = 0


class ToolCall(msgspec.Struct):
    """A tool call that the provider completed."""

    block: int
    tool_id: str
    name: str
    arguments: str
    problem: str = ""
    """What is wrong with the call's form: then it has its error result already, and never runs."""


class BlockTable(msgspec.Struct):
    """The open and the finished blocks of one attempt; `Outbox` takes their public events."""

    turn: int
    attempt: int
    limit: int
    next_number: int
    open: dict[int, OpenBlock] = {}
    """By the decoder's ordinal."""
    parts: dict[int, ContentPart] = {}
    """What the next turn sends back, by the decoder's ordinal; below 0 what earlier attempts of the turn brought."""
    begun: dict[int, tuple[int, BlockKind]] = {}
    """Number and kind of every block, by the decoder's ordinal."""
    calls: list[ToolCall] = []
    cut_calls: list[ToolCall] = []
    """Calls that broke off: they never run."""
    origin: dict[str, str] = {}
    """Whose opaque data it is: ``api`` and ``provider``; empty where that is not known."""

    def start(
        self,
        ordinal: int,
        kind: BlockKind,
        out: Outbox,
        tool_id: str | None = None,
        name: str | None = None,
        *,
        prompt: str | None = None,
    ) -> None:
        """A block begins. A tool call's id and name are its first chunks.

        The first text of an attempt that goes on from another is no block of its own: it goes on with the open one.
        """
        if CARRIED in self.open and kind == "text":
            self.open[ordinal] = self.open.pop(CARRIED)
            self.begun[ordinal] = (self.open[ordinal].number, kind)
            return
        if CARRIED in self.open and kind != "thinking":
            self.complete(CARRIED, out)
        block = OpenBlock(self.next_number, kind, tool_id=tool_id, tool_name=name)
        self.next_number += 1
        self.open[ordinal] = block
        self.begun[ordinal] = (block.number, kind)
        about = {"block": block.number, "kind": kind, "tool_id": tool_id, "tool_name": name, "prompt": prompt}
        out.event(self.turn, self.attempt, BlockStarted, **about)
        if kind == "tool_call":
            for part, text in call_heads(name, tool_id):
                out.chunk(
                    self.turn,
                    self.attempt,
                    block.number,
                    kind,
                    text,
                    part=part,
                    tool_id=tool_id,
                    tool_name=name,
                )

    def write(self, ordinal: int, text: str, out: Outbox) -> None:
        """A piece of an open block. Raises TooLarge where the block grows beyond its limit, in characters."""
        block = self.open[ordinal]
        block.size += len(text)
        if block.size > self.limit:
            raise TooLarge(f"block {block.number}", block.size, self.limit, unit="characters")
        block.pieces.append(text)
        out.chunk(
            self.turn,
            self.attempt,
            block.number,
            block.kind,
            text,
            visible=block.kind == "text",
            part="input" if block.kind == "tool_call" else None,
            tool_id=block.tool_id,
            tool_name=block.tool_name,
        )

    def show(self, ordinal: int, image: ImageRef, out: Outbox, *, final: bool) -> None:
        """An image of an open block: the one that its end tells, or a preview, told at once. Raises TooLarge where its
        bytes are inline and more characters than the limit."""
        block = self.open.get(ordinal)
        if block is None:
            return
        if (size := len(image.base64 or "")) > self.limit:
            raise TooLarge(f"block {block.number}", size, self.limit, unit="characters")
        if final:
            block.image = image
            return
        shown = {"block": block.number, "kind": "image", "index": block.previews, "image": image}
        out.event(self.turn, self.attempt, ImagePreview, **shown)
        block.previews += 1

    def note(self, ordinal: int, extra: dict[str, object]) -> bool:
        """Provider data shown with an open block; False where no such block is open."""
        block = self.open.get(ordinal)
        if block and len(block.extras) < MAX_EXTRAS:
            block.extras.append(extra)
        return block is not None

    def keep(self, data: Opaque) -> int | None:
        """Opaque data that goes back to the provider with its block; the block's number where that has ended already.
        Raises TooLarge."""
        if block := self.open.get(data.block):
            check_size(block.opaque, data, block.number, self.limit)
            block.opaque[data.name] = data.value
            if (data.name, block.kind) != ("signature", "thinking"):  # it has a field of its own
                block.handed_on.add(data.name, data.value, data.blob_id)
            return None
        part = self.parts.get(data.block)
        if not isinstance(part, TextPart | ThinkingPart | ToolCallPart | ImagePart):
            return None
        number, _ = self.begun[data.block]
        check_size(part.opaque or {}, data, number, self.limit)
        opaque = {**self.origin, **(part.opaque or {}), data.name: data.value}
        self.parts[data.block] = msgspec.structs.replace(part, opaque=opaque)
        return number

    def keep_item(self, ordinal: int, name: str, json: str) -> None:
        """A content item of the provider's own that goes back at its place."""
        self.parts[ordinal] = ExtraPart(name=name, json=json)

    def complete(self, ordinal: int, out: Outbox, *, cut: bool = False, problem: str = "") -> None:
        """The block ends; ``cut``: it broke off, and a tool call in it never runs, nor one with a ``problem``."""
        block = self.open.pop(ordinal)
        content = "".join(block.pieces)
        fields: dict[str, Any] = {"block": block.number, "kind": block.kind}
        fields |= content_fields(block.kind, content, cut=cut, problem=problem)
        if block.kind == "tool_call":
            fields |= {"tool_id": block.tool_id, "tool_name": block.tool_name}
            call = ToolCall(block.number, block.tool_id or "", block.tool_name or "", content, problem)
            (self.cut_calls if cut else self.calls).append(call)
        elif block.kind == "image":
            fields["image"] = block.image
        if cut:
            fields["cut"] = True
        if signature := block.opaque.get("signature"):
            fields["signature"] = signature
        if block.opaque or block.kind == "image":  # an image goes back as the model's own to its origin alone
            block.opaque |= self.origin
            block.handed_on.opaque |= self.origin
        if not cut:
            fields |= block.handed_on.fields
            block.extras += block.handed_on.notes
        if block.extras:
            fields["provider_extra"] = block.extras
        out.event(self.turn, self.attempt, BlockComplete, **fields)
        if not cut and (part := _part_of(block, content)):
            self.parts[ordinal] = part

    def complete_all(self, out: Outbox, *, cut: bool) -> None:
        """The attempt ends: whatever is open ends with it. A call that its provider never completed is cut anyway."""
        for ordinal in list(self.open):
            self.complete(ordinal, out, cut=cut or self.open[ordinal].kind == "tool_call")

    def can_continue(self) -> bool:
        """Whether a next attempt could go on from this one's last text: nothing before it is lost to the model.

        A call or an image has no place in a message that is to be continued, nor has a second open text.
        """
        last = self._last_text()
        if last is None:
            return False
        void = self._first_after(last)
        for ordinal, (number, kind) in self.begun.items():
            if ordinal <= last and (kind not in ("text", "thinking") or number >= void):
                return False
        return all(ordinal == last for ordinal, block in self.open.items() if block.kind == "text")

    def going_on(self, out: Outbox) -> tuple[BlockTable, int, list[ContentPart]]:
        """A table to go on with from this one's last text; the number from which on blocks are void;
        and the answer so far, the text the last of it. All open blocks end as cut, but for that text."""
        last = self._last_text()
        assert last is not None
        for ordinal in list(self.open):
            if ordinal != last:
                self.complete(ordinal, out, cut=True)
        kept = [self.parts[ordinal] for ordinal in sorted(self.parts) if ordinal <= last]
        table = BlockTable(self.turn, self.attempt, self.limit, self.next_number)
        table.parts = dict(enumerate(kept, CARRIED - len(kept)))
        so_far = kept
        if text := self.open.get(last):
            table.open[CARRIED] = text
            table.begun[CARRIED] = (text.number, "text")
            so_far = [*kept, TextPart(text="".join(text.pieces))]
        return table, self._first_after(last), so_far

    def number_before(self, ordinal: int) -> int:
        """The highest number of this attempt's blocks that stand before an ordinal; -1 where none does."""
        return max((number for begun, (number, _) in self.begun.items() if begun < ordinal), default=-1)

    def _last_text(self) -> int | None:
        texts = [ordinal for ordinal, block in self.open.items() if block.kind == "text"]
        texts += [ordinal for ordinal, part in self.parts.items() if isinstance(part, TextPart)]
        return max(texts, default=None)

    def _first_after(self, last: int) -> int:
        """The lowest number of a block that began after the one of this ordinal."""
        numbers = [number for ordinal, (number, _) in self.begun.items() if ordinal > last]
        return min(numbers, default=self.next_number)

    def message_parts(self) -> list[ContentPart]:
        """The attempt's content as the next turn sends it back, in the provider's order."""
        return [self.parts[ordinal] for ordinal in sorted(self.parts)]


def _part_of(block: OpenBlock, content: str) -> ContentPart | None:
    opaque = block.opaque or None
    if block.kind == "text":
        return TextPart(text=content, opaque=opaque)
    if block.kind == "thinking":
        more = {name: value for name, value in block.opaque.items() if name != "signature"}
        return ThinkingPart(text=content, signature=block.opaque.get("signature"), opaque=more or None)
    if block.kind == "tool_call":
        return ToolCallPart(
            tool_id=block.tool_id or "", tool_name=block.tool_name or "", arguments=content, opaque=opaque
        )
    return _image_part(block.image, opaque) if block.image else None


def _image_part(image: ImageRef, opaque: dict[str, str] | None) -> ImagePart | None:
    """An image as the next turn sends it back. A draft is only for people to see."""
    if image.draft:
        return None
    if image.blob_id:
        source = BlobSource(blob_id=image.blob_id, media_type=image.media_type, size_bytes=image.size_bytes)
    else:
        source = Base64Source(media_type=image.media_type, data=image.base64 or "")
    return ImagePart(source=source, opaque=opaque)
