"""Blocks of one attempt: maps a provider's interleaved regions to numbered public blocks.

Every block emits `block_start`, its chunks and `block_complete`, in this order; the chunks concatenate to exactly its
content. The table also keeps the parts that the next turn sends back to the provider, in order.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenbus.core.run.blocks.opaque import ExtraData, OpaqueTracker, append_piece, check_size
from tokenbus.core.run.blocks.public_blocks import call_heads, content_fields
from tokenbus.core.run.outbox import Outbox
from tokenbus.errors import TooLarge
from tokenbus.events.normalized import ApprovalAsked, Opaque
from tokenbus.events.public import (
    AudioRef,
    BlockComplete,
    BlockKind,
    BlockProgress,
    BlockStarted,
    Chunk,
    ImagePreview,
    ImageRef,
    decode,
)
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

VISIBLE = ("text", "audio")
"""Kinds of blocks whose chunks a person should see."""

NOT_STORED = "tokenbus.image_not_stored"
"""Name of the note that an image is in its event because the blob store did not take it."""

CARRIED = -(2**62)
"""Ordinal of a text that an earlier attempt left open, until this attempt continues it; sorts before all others."""


class OpenBlock(msgspec.Struct):
    """A block that is not complete yet."""

    number: int
    kind: BlockKind
    pieces: list[str] = []
    size: int = 0
    tool_id: str | None = None
    tool_name: str | None = None
    free_text: bool | None = None
    """tool_call: its input is no JSON."""
    item: str | None = None
    """server_tool: the provider's type of the item."""
    phase: str | None = None
    """text: see `BlockStarted`."""
    opaque: dict[str, str] = {}
    handed_on: OpaqueTracker = msgspec.field(default_factory=OpaqueTracker)
    """Opaque data as `block_complete` publishes it."""
    extras: ExtraData = msgspec.field(default_factory=ExtraData)
    image: ImageRef | None = None
    audio: AudioRef | None = None
    previews: int = 0


class HostedCall(msgspec.Struct, frozen=True):
    """How a provider's API says whether a call that it runs itself may run; see `ApprovalAsked`."""

    server: str
    item: str
    allow: str
    deny: str


class CompleteCall(msgspec.Struct):
    block: int
    tool_id: str
    name: str
    arguments: str
    problem: str = ""
    """Why the call is malformed, if it is: it gets an error result at once and never runs."""
    free_text: bool = False
    """``arguments`` is no JSON."""
    hosted: HostedCall | None = None
    """Set if the provider runs it, once somebody has allowed it."""


class BlockTable(msgspec.Struct):
    """Open and finished blocks of one attempt; writes their public events to an `Outbox`."""

    turn: int
    attempt: int
    limit: int
    next_number: int
    open: dict[int, OpenBlock] = {}
    """Keyed by the decoder's ordinal."""
    parts: dict[int, ContentPart] = {}
    """Parts that the next turn sends back, by the decoder's ordinal; below 0: parts from earlier attempts of the
    turn.
    """
    begun: dict[int, tuple[int, BlockKind]] = {}
    """Number and kind of every block, by the decoder's ordinal."""
    calls: list[CompleteCall] = []
    cut_calls: list[CompleteCall] = []
    """Calls that were cut off; they never run."""
    asked: list[CompleteCall] = []
    """Calls that the provider runs once somebody has allowed them."""
    origin: dict[str, str] = {}
    """Origin of the opaque data: ``api`` and ``provider``; empty if unknown."""

    def start(
        self,
        ordinal: int,
        kind: BlockKind,
        out: Outbox,
        tool_id: str | None = None,
        name: str | None = None,
        *,
        prompt: str | None = None,
        item: str | None = None,
        phase: str | None = None,
        free_text: bool | None = None,
    ) -> None:
        """Start a block. The first chunks of a tool call are its name and its id.

        The first text of an attempt that continues another starts no block; it continues the open one.
        """
        if CARRIED in self.open and kind == "text":
            self.open[ordinal] = self.open.pop(CARRIED)
            self.begun[ordinal] = (self.open[ordinal].number, kind)
            return
        if CARRIED in self.open and kind not in ("thinking", "server_tool"):
            self.complete(CARRIED, out)
        block = OpenBlock(
            self.next_number, kind, tool_id=tool_id, tool_name=name, item=item, phase=phase, free_text=free_text
        )
        self.next_number += 1
        self.open[ordinal] = block
        self.begun[ordinal] = (block.number, kind)
        about = {"block": block.number, "kind": kind, "tool_id": tool_id, "tool_name": name}
        out.event(
            self.turn, self.attempt, BlockStarted, **about, prompt=prompt, item=item, phase=phase, free_text=free_text
        )
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
        """Append to an open block. Raises TooLarge if the block exceeds its limit in characters."""
        block = self.open[ordinal]
        block.size += len(text)
        if block.size > self.limit:
            raise TooLarge(f"block {block.number}", block.size, self.limit, unit="characters")
        append_piece(block.pieces, text)
        out.chunk(
            self.turn,
            self.attempt,
            block.number,
            block.kind,
            text,
            visible=block.kind in VISIBLE and out.shows(block.phase),
            part="input" if block.kind == "tool_call" else None,
            tool_id=block.tool_id,
            tool_name=block.tool_name,
        )

    def show(self, ordinal: int, image: ImageRef, out: Outbox, *, final: bool) -> None:
        """Set the final image of an open block, or publish a preview at once. Raises TooLarge if the inline base64 has
        more characters than the limit.
        """
        block = self.open.get(ordinal)
        if block is None:
            return
        if (size := len(image.base64 or "")) > self.limit:
            notes = [note["json"] for note in block.extras.entries() if note.get("name") == NOT_STORED]
            why = f"it is not in the blob store: {notes[-1]}" if notes else ""
            raise TooLarge(f"block {block.number}", size, self.limit, unit="characters", why=why)
        if final:
            block.image = image
            return
        shown = {"block": block.number, "kind": "image", "index": block.previews, "image": image}
        out.event(self.turn, self.attempt, ImagePreview, **shown)
        block.previews += 1

    def sound(self, ordinal: int, audio: AudioRef) -> None:
        """Set the sound of an open block. Raises TooLarge if the inline base64 has more characters than the limit."""
        if block := self.open.get(ordinal):
            if (size := len(audio.base64 or "")) > self.limit:
                raise TooLarge(f"block {block.number}", size, self.limit, unit="characters")
            block.audio = audio
            if audio.audio_id:  # only for the run's own turns: the provider soon forgets it
                block.opaque["audio"] = audio.audio_id

    def report(self, ordinal: int, status: str, out: Outbox) -> None:
        """Publish the progress of an open block's tool at once."""
        if block := self.open.get(ordinal):
            about = {"block": block.number, "kind": block.kind, "tool_id": block.tool_id, "tool_name": block.tool_name}
            out.event(self.turn, self.attempt, BlockProgress, **about, status=status)

    def ask(self, asked: ApprovalAsked) -> None:
        """Keep what the provider asks about the call in an open block."""
        if block := self.open.get(asked.block):
            hosted = HostedCall(asked.server, asked.item, asked.allow, asked.deny)
            self.asked.append(CompleteCall(block.number, asked.tool_id, asked.name, asked.arguments, hosted=hosted))

    def note(self, ordinal: int, extra: dict[str, object]) -> bool:
        """Attach provider data to an open block; False if the block is not open."""
        block = self.open.get(ordinal)
        if block:
            block.extras.add(extra)
        return block is not None

    def keep(self, data: Opaque) -> int | None:
        """Keep opaque data that goes back to the provider with its block. Returns the block's number if the block has
        ended.

        Raises TooLarge.
        """
        if block := self.open.get(data.block):
            check_size(block.opaque, data, block.number, self.limit)
            block.opaque[data.name] = data.value
            if (data.name, block.kind) != ("signature", "thinking"):  # the signature has a field of its own
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

    def complete(self, ordinal: int, out: Outbox, *, cut: bool = False, problem: str = "") -> None:
        """Complete a block. A tool call that is ``cut`` or has a ``problem`` never runs."""
        block = self.open.pop(ordinal)
        content = "".join(block.pieces)
        fields: dict[str, Any] = {"block": block.number, "kind": block.kind}
        free = block.free_text
        fields |= content_fields(block.kind, content, cut=cut, problem=problem, as_json=out.only_json, free_text=free)
        if block.kind == "tool_call":
            fields |= {"tool_id": block.tool_id, "tool_name": block.tool_name}
            tool_id, name = block.tool_id or "", block.tool_name or ""
            call = CompleteCall(block.number, tool_id, name, content, problem, free_text=bool(free))
            (self.cut_calls if cut else self.calls).append(call)
        elif block.kind == "image":
            fields["image"] = block.image
        elif block.kind == "audio":
            fields["audio"] = block.audio
        elif block.kind == "server_tool":
            fields |= {"tool_id": block.tool_id, "tool_name": block.tool_name, "item": block.item}
        if block.phase:
            fields["phase"] = block.phase
        if cut:
            fields["cut"] = True
        if signature := block.opaque.get("signature"):
            fields["signature"] = signature
        if block.kind == "audio":
            block.opaque |= self.origin
        elif block.opaque or block.kind == "image":  # only its origin gets an image back as the model's own
            block.opaque |= self.origin
            block.handed_on.opaque |= self.origin
        if not cut:
            fields |= block.handed_on.fields
        if extras := block.extras.entries(() if cut else block.handed_on.notes):
            fields["provider_extra"] = extras
        out.event(self.turn, self.attempt, BlockComplete, **fields)
        if not cut and (part := _part_of(block, content)):
            self.parts[ordinal] = part

    def complete_all(self, out: Outbox, *, cut: bool) -> None:
        """Complete all open blocks at the end of an attempt. Calls and items that the provider did not complete are
        cut.
        """
        for ordinal in list(self.open):
            self.complete(ordinal, out, cut=cut or self.open[ordinal].kind in ("tool_call", "server_tool"))

    def can_continue(self) -> bool:
        """Whether another attempt can continue from the last text without losing earlier content for the model.

        A message to be continued cannot contain a call, an image, or a second open text.
        """
        last = self._last_text()
        if last is None:
            return False
        void = self._first_after(last)
        for ordinal, (number, kind) in self.begun.items():
            if ordinal <= last and (kind not in ("text", "thinking", "server_tool") or number >= void):
                return False
        return all(ordinal == last for ordinal, block in self.open.items() if block.kind == "text")

    def going_on(self, out: Outbox) -> tuple[BlockTable, int, list[ContentPart]]:
        """Prepare to continue from the last text: complete the other open blocks as cut.

        Returns the next attempt's table, the number from which blocks are void, and the answer so far, which ends in
        that text.
        """
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

    def _last_text(self) -> int | None:
        texts = [ordinal for ordinal, block in self.open.items() if block.kind == "text"]
        texts += [ordinal for ordinal, part in self.parts.items() if isinstance(part, TextPart)]
        return max(texts, default=None)

    def _first_after(self, last: int) -> int:
        """Lowest block number after this ordinal."""
        numbers = [number for ordinal, (number, _) in self.begun.items() if ordinal > last]
        return min(numbers, default=self.next_number)

    def message_parts(self) -> list[ContentPart]:
        """The attempt's content as the next turn sends it back, in the provider's order."""
        return [self.parts[ordinal] for ordinal in sorted(self.parts)]


def _part_of(block: OpenBlock, content: str) -> ContentPart | None:
    opaque = block.opaque or None
    if block.kind in VISIBLE:
        return TextPart(text=content, opaque=opaque) if content or block.kind == "text" else None
    if block.kind == "thinking":
        more = {name: value for name, value in block.opaque.items() if name != "signature"}
        return ThinkingPart(text=content, signature=block.opaque.get("signature"), opaque=more or None)
    if block.kind == "tool_call":
        return ToolCallPart(
            tool_id=block.tool_id or "",
            tool_name=block.tool_name or "",
            arguments=content,
            free_text=bool(block.free_text),
            opaque=opaque,
        )
    if block.kind == "server_tool":
        return ExtraPart(name=block.item or "", json=content)
    return _image_part(block.image, opaque) if block.image else None


def _image_part(image: ImageRef, opaque: dict[str, str] | None) -> ImagePart | None:
    """The image as the next turn sends it back. Drafts are not sent back."""
    if image.draft:
        return None
    if image.blob_id:
        source = BlobSource(blob_id=image.blob_id, media_type=image.media_type, size_bytes=image.size_bytes)
    else:
        source = Base64Source(media_type=image.media_type, data=image.base64 or "")
    return ImagePart(source=source, opaque=opaque)


class OpenBlocks:
    """Collects open blocks. Pass a log's events to `read` in order."""

    def __init__(self) -> None:
        self.by_number: dict[int, OpenBlock] = {}

    def read(self, event: bytes) -> None:
        """Process one event. Undecodable events and unknown kinds are ignored."""
        try:
            found = decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        match found:
            case BlockStarted():
                block = OpenBlock(
                    found.block,
                    found.kind,
                    tool_id=found.tool_id,
                    tool_name=found.tool_name,
                )
                self.by_number[found.block] = block
            case Chunk() if found.tool_call_part in (None, "input") and found.block in self.by_number:
                self.by_number[found.block].pieces.append(found.text)
            case BlockComplete():
                self.by_number.pop(found.block, None)
            case _:
                pass
