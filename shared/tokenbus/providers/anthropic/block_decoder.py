"""Decodes the blocks of a message: their starts, deltas and ends, by the provider's index."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus.errors import Malformed, TooLarge
from tokenbus.events import normalized as n
from tokenbus.providers.anthropic import wire
from tokenbus.providers.anthropic.stream_blocks import (
    EmittedBlock,
    StreamedBlock,
    fields_of,
    further_fields,
    opening_of,
)
from tokenbus.providers.response.decoder import MAX_OPEN_BLOCKS, ResponseDecoder
from tokenbus.providers.response.json_decode import is_null, tag_of, text_of
from tokenbus.providers.response.unknown_fields import named

_NO_INPUT = msgspec.Raw(b"{}")


class BlockDecoder(ResponseDecoder, kw_only=True):
    """Emits what blocks bring. The subclass decodes the message around them."""

    blocks: dict[int, StreamedBlock] = msgspec.field(default_factory=dict[int, StreamedBlock])
    """Open blocks by the provider's index."""
    last_index: int = -1
    last_ordinal: int = -1
    """The last closed block; its citations may arrive late."""
    emitted: list[EmittedBlock] = msgspec.field(default_factory=list[EmittedBlock])
    """Completed blocks, in order."""
    calls: int = 0
    """Number of completed tool calls."""
    tool_names: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Tools that the provider runs, by the id of the call; a result has only the id."""

    def _open(
        self, index: int, data: bytes, out: list[n.Normalized], *, whole: bool = False, text: str | None = None
    ) -> None:
        """Start a block. ``text`` overrides the block's text if part of it was already emitted."""
        parsed, unknown = wire.read_block(data)
        further = named("anthropic", unknown, "content_block") if unknown else {}
        if not whole and self._continues_block(index, parsed, out):
            self._beside_block(self.blocks[index], further, out)
            return
        if index in self.blocks:
            raise Malformed("content_block_start", f"index {index} is already open")
        if len(self.blocks) >= MAX_OPEN_BLOCKS:
            raise TooLarge("open blocks", len(self.blocks) + 1, MAX_OPEN_BLOCKS, unit="blocks")
        if isinstance(parsed, wire.TextBlock):
            self.blocks[index] = block = StreamedBlock("text", whole=whole)
            self._begin_with(block, parsed.text or "" if text is None else text, out)
            self._beside_block(block, further, out)
            for citation in parsed.citations or []:
                self._cite(block, citation, out)
            return
        ordinal = self._take_ordinal()
        match parsed:
            case wire.ThinkingBlock():
                self.blocks[index] = block = StreamedBlock("thinking", ordinal, whole)
                out.append(n.BlockStart(ordinal, "thinking"))
                self._begin_with(block, parsed.thinking or "" if text is None else text, out)
                if parsed.signature:
                    out.append(n.Opaque(ordinal, "signature", parsed.signature))
            case wire.RedactedBlock():
                self.blocks[index] = StreamedBlock("thinking", ordinal, whole)
                out.append(n.BlockStart(ordinal, "thinking"))
                out.append(n.Opaque(ordinal, "redacted", parsed.data))
            case wire.ToolUseBlock():
                if not parsed.name:
                    raise Malformed("content_block_start", "tool_use has no name")
                prefilled = "" if is_null(parsed.input) else text_of(parsed.input)
                self.blocks[index] = StreamedBlock("tool", ordinal, whole, parsed.id, prefilled=prefilled)
                out.append(n.ToolCallStart(ordinal, parsed.id or f"call_{ordinal}", parsed.name, derived=not parsed.id))
                if fields := further_fields(data):
                    out.append(n.Opaque(ordinal, "fields", fields))
            case wire.Unknown():
                self.blocks[index] = block = StreamedBlock("item", ordinal, whole, name=parsed.type)
                self._begin_item(block, data, out)
        self._beside_block(self.blocks[index], further, out)

    def _begin_item(self, block: StreamedBlock, data: bytes, out: list[n.Normalized]) -> None:
        """Start an item. Its JSON is emitted at once up to its input; one without input, when it is complete."""
        fields = fields_of(data)
        item = wire.read_item(data)
        tool_id = item.id or item.tool_use_id or ""
        name = item.name or self.tool_names.get(tool_id) or _tool_of(block.name)
        if item.id and item.name:
            self._hold_for(block, len(item.id) + len(item.name))
            self.tool_names[item.id] = item.name
        out.append(n.ItemStart(block.ordinal, f"anthropic.{block.name}", name, tool_id))
        if "input" in fields or block.name.endswith("tool_use"):
            block.prefilled = text_of(fields.get("input", _NO_INPUT))
            out.append(n.ToolCallDelta(block.ordinal, opening_of(fields)))
        else:
            block.item = data.decode()
        self._hold_for(block, len(block.item) + len(block.prefilled))

    def _continues_block(self, index: int, parsed: wire.Block | wire.Unknown, out: list[n.Normalized]) -> bool:
        """Whether this start belongs to a block from `message_start`. Earlier such blocks are complete and get
        closed.
        """
        for before in [at for at, block in self.blocks.items() if block.whole and at < index]:
            self._close_block(before, out)
        block = self.blocks.get(index)
        if block is None or not block.whole:
            return False
        block.whole = False
        match parsed:
            case wire.TextBlock() if block.kind == "text":
                self._repeat_start(block, parsed.text or "", out)
            case wire.ThinkingBlock() if block.kind == "thinking":
                self._repeat_start(block, parsed.thinking or "", out)
                if parsed.signature:
                    out.append(n.Opaque(block.ordinal, "signature", parsed.signature))
            case wire.RedactedBlock() if block.kind == "thinking":
                pass
            case wire.ToolUseBlock() if block.kind == "tool" and block.tool_id == parsed.id:
                pass
            case wire.Unknown() if block.kind == "item" and block.name == parsed.type:
                pass
            case _:
                self._close_block(index, out)
                return False
        return True

    def _begin_with(self, block: StreamedBlock, text: str, out: list[n.Normalized]) -> None:
        """Emit the text in a block's start."""
        self._text(block, text, out)
        block.begun = text
        self._hold_for(block, len(text))

    def _repeat_start(self, block: StreamedBlock, text: str, out: list[n.Normalized]) -> None:
        """Handle a second start of the same block, which may have more text."""
        if new := block.emitted.rest(text):
            self._text(block, new, out)
            self._hold_for(block, len(new))
            block.begun = text

    def _delta(self, parsed: wire.BlockDelta, out: list[n.Normalized]) -> None:
        delta = parsed.delta
        block = self.blocks.get(parsed.index)
        if block is None:
            if isinstance(delta, wire.CitationsDelta) and parsed.index == self.last_index:
                return self._extra("citation", text_of(delta.citation), out, self.last_ordinal)
            raise Malformed("content_block_delta", f"index {parsed.index} is not open")
        match delta:
            case wire.TextDelta() if block.kind == "text":
                self._text(block, block.new_part(delta.text), out)
            case wire.ThinkingDelta() if block.kind == "thinking":
                self._text(block, block.new_part(delta.thinking), out)
            case wire.InputDelta() if block.kind == "tool":
                if delta.partial_json:
                    block.streamed = True
                    block.emitted.add(delta.partial_json)
                    out.append(n.ToolCallDelta(block.ordinal, delta.partial_json))
            case wire.InputDelta() if block.kind == "item" and not block.item:
                if delta.partial_json:
                    self._hold_for(block, len(delta.partial_json))
                    block.pieces.append(delta.partial_json)
                    out.append(n.ToolCallDelta(block.ordinal, delta.partial_json))
            case wire.SignatureDelta() if block.kind == "thinking":
                out.append(n.Opaque(block.ordinal, "signature", delta.signature))
            case wire.CitationsDelta() if block.kind == "text":
                self._cite(block, delta.citation, out)
            case _:
                self._extra(str(delta.__struct_config__.tag), msgspec.json.encode(delta).decode(), out, block.ordinal)
        return None

    def _unknown_delta(self, parsed: wire.UnknownDelta, out: list[n.Normalized]) -> None:
        """Handle a delta of unknown type. One named after its block's type (compaction) carries fields of the block."""
        block = self.blocks.get(parsed.index)
        fields = fields_of(bytes(parsed.delta))
        name = tag_of(bytes(parsed.delta))
        if block and block.item and name == f"{block.name}_delta":
            for field, value in fields.items():
                if field != "type" and not is_null(value):
                    self._hold_for(block, len(bytes(value)))
                    block.fields[field] = text_of(value)
        else:
            self._extra(name, text_of(parsed.delta), out, block.ordinal if block else -1)

    def _close_block(self, index: int, out: list[n.Normalized]) -> None:
        block = self.blocks.pop(index, None)
        if block is None:
            return
        self._text(block, block.again, out)
        match block.kind:
            case "tool":
                if block.prefilled and not block.streamed:
                    out.append(n.ToolCallDelta(block.ordinal, block.prefilled))
                out.append(n.ToolCallDone(block.ordinal))
                self.calls += 1
            case "item":
                rest = block.rest_of_item()
                if rest is not None:
                    out += [n.ToolCallDelta(block.ordinal, rest), n.BlockStop(block.ordinal)]
            case "text" | "thinking":
                if block.pieces:
                    out.append(n.Opaque(block.ordinal, "citations", f"[{','.join(block.pieces)}]"))
                if block.ordinal >= 0:
                    out.append(n.BlockStop(block.ordinal))
                else:
                    self._note(block.fields)
        self._hold(96 - block.held)
        self.emitted.append(EmittedBlock(block.kind, block.tool_id, block.emitted))
        self.last_index, self.last_ordinal = index, block.ordinal

    def _text(self, block: StreamedBlock, text: str, out: list[n.Normalized]) -> None:
        if text:
            self._open_text(block, out)
            block.emitted.add(text)
            delta = n.TextDelta if block.kind == "text" else n.ThinkingDelta
            out.append(delta(block.ordinal, text))

    def _beside_block(self, block: StreamedBlock, fields: Mapping[str, str], out: list[n.Normalized]) -> None:
        """Emit data of a block. What comes before a text waits for it."""
        if block.ordinal >= 0:
            self._beside(fields, block.ordinal, out)
        else:
            self._hold_for(block, sum(map(len, (*fields, *fields.values()))))
            block.fields |= fields

    def _cite(self, block: StreamedBlock, citation: msgspec.Raw, out: list[n.Normalized]) -> None:
        """Emit a citation at once, and keep it to send back with its block."""
        json = text_of(citation)
        self._hold_for(block, len(json))
        block.pieces.append(json)
        self._open_text(block, out)
        self._extra("citation", json, out, block.ordinal)

    def _open_text(self, block: StreamedBlock, out: list[n.Normalized]) -> None:
        """Emit the start of a text block with its first content."""
        if block.ordinal < 0:
            block.ordinal = self._take_ordinal()
            out.append(n.BlockStart(block.ordinal, "text"))
            self._beside(block.fields, block.ordinal, out)
            block.fields = {}

    def _hold_for(self, block: StreamedBlock, size: int) -> None:
        size += 64  # approximate memory overhead of a small piece
        block.held += size
        self._hold(size)

    def _extra(self, name: str, json: str, out: list[n.Normalized], ordinal: int = -1) -> None:
        out.append(n.Extra(f"anthropic.{name}", json, ordinal if ordinal >= 0 else None))


def _tool_of(item: str) -> str:
    """The tool of a result whose call is unknown; empty if the item is no result."""
    tool, of_result, _ = item.partition("_tool_result")
    return tool if of_result else ""
