"""Turns output items into blocks, from their announcement through their parts to their end."""

from __future__ import annotations

import msgspec

from tokenbus.errors import Malformed
from tokenbus.events.normalized import (
    BlockStart,
    BlockStop,
    Extra,
    Image,
    Normalized,
    Opaque,
    OpenKind,
    RefusalDelta,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStart,
)
from tokenbus.providers.openai_responses import wire
from tokenbus.providers.openai_responses.item_table import ItemTable
from tokenbus.providers.openai_responses.items import (
    Item,
    ItemKind,
    Part,
    arguments_of,
    further_fields,
    ids_of,
    is_raw,
    kind_of,
    sort_of,
    texts_of,
)
from tokenbus.providers.response.decoder import ResponseDecoder
from tokenbus.providers.response.json_decode import text_of
from tokenbus.providers.response.repeats import not_emitted

_RAW_REASONING = '{"type":"reasoning_text"}'


class OutputDecoder(ResponseDecoder, kw_only=True):
    """Defines what happens to items. The subclass maps API events to these operations."""

    custom_tools: list[str] | None = None
    """Names of the request's custom tools; None if the response does not repeat them."""
    table: ItemTable = msgspec.field(default_factory=ItemTable)
    next_ordinal: int = 0
    calls: int = 0
    """Number of completed tool calls."""
    refused: bool = False
    image_model: str = ""
    """The model behind the image tool, if the response repeats it."""

    def _announce(self, index: int | None, data: bytes, out: list[Normalized]) -> None:
        """Start an item. Ignore repetitions; after the item's end, later events decide whether it is a new one."""
        parsed = wire.read_item(data)
        kind, ids = kind_of(parsed, self.custom_tools), ids_of(parsed)
        at = self.table.find(sort_of(kind, parsed.type), index, ids, parsed.call_id)
        if at is not None:
            item = self.table.items[at]
            known = item.has(ids, parsed.call_id)
            if item.ended and known:
                self._hold(len(data) - len(item.again or b""))
                item.again = data
                if index is not None:
                    self.table.by_index[index] = at
                return
            if not item.ended and (known or not (ids and item.ids)):
                return
        there = None if index is None else self.table.by_index.get(index)
        if there is not None and there in self.table.open and not (ids and self.table.items[there].ids):
            raise Malformed("response.output_item.added", f"output_index {index} is already open")
        self._begin_item(index, parsed, kind, out)

    def _begin_item(self, index: int | None, parsed: wire.Item, kind: ItemKind, out: list[Normalized]) -> int:
        at = self._open(index, Item(parsed.type, kind, call_id=parsed.call_id or ""), ids_of(parsed), out)
        if kind == "call":
            self._begin_call(self.table.items[at], parsed, out)
        return at

    def _open(self, index: int | None, item: Item, ids: list[str], out: list[Normalized]) -> int:
        at = self.table.add(item, index, ids)
        if item.kind in ("reasoning", "image", "other"):
            item.ordinal = self._take_ordinal()
        if item.kind in ("reasoning", "image"):
            out.append(BlockStart(item.ordinal, "image" if item.kind == "image" else "thinking"))
        return at

    def _begin_repeated(self, at: int, index: int | None, out: list[Normalized]) -> int:
        """Start the new item that was announced after the end of another with the same id."""
        data, self.table.items[at].again = self.table.items[at].again, None
        assert data is not None
        self._hold(-len(data))
        parsed = wire.read_item(data)
        return self._begin_item(index, parsed, self.table.items[at].kind, out)

    def _end_item(self, index: int | None, data: bytes, out: list[Normalized]) -> None:
        """End an item, given in its final form. One that was never announced is emitted whole."""
        parsed = wire.read_item(data)
        kind = kind_of(parsed, self.custom_tools)
        there = None if index is None else self.table.by_index.get(index)
        if there is not None and there in self.table.open and (item := self.table.items[there]).kind != kind:
            unknown = self.table.find(sort_of(kind, parsed.type), None, ids_of(parsed), parsed.call_id) is None
            if unknown and not (item.ids and ids_of(parsed)):
                problem = f"output_index {index} is a {item.type}, not a {parsed.type}"
                raise Malformed("response.output_item.done", problem)
        self._conclude(self.table.of_item(kind, index, parsed), index, parsed, data, out)

    def _conclude(
        self, at: int | None, index: int | None, parsed: wire.Item, data: bytes, out: list[Normalized]
    ) -> None:
        """Process an item's final form. ``at``: the known item that it belongs to, if any."""
        if at is not None and (item := self.table.items[at]).ended:
            if item.again is None or item.is_repeat(parsed):
                self._emit_late(item, parsed, data, out)
                return
            at = self._begin_repeated(at, index, out)
        if at is None:
            at = self._begin_item(index, parsed, kind_of(parsed, self.custom_tools), out)
        item = self.table.items[at]
        match item.kind:
            case "message" | "reasoning":
                self._end_content(item, parsed, data, out)
            case "call":
                self._end_call(item, parsed, data, out)
            case "image":
                self._end_image(item, parsed, data, out)
            case "other":
                out.append(Extra(f"openai-responses.{parsed.type}", data.decode(), ordinal=item.ordinal))
        self.table.end(at)
        self._hold(256 + 64 * len(item.parts) - item.held)

    def _complete(self, output: list[msgspec.Raw], out: list[Normalized]) -> None:
        """Process the final response, which repeats all items. Emit what is still missing."""
        items = [(bytes(data), wire.read_item(bytes(data))) for data in output]
        kinds: list[ItemKind] = [kind_of(parsed, self.custom_tools) for _, parsed in items]
        found = self.table.of_whole(kinds, [parsed for _, parsed in items])
        for (data, parsed), at in zip(items, found, strict=True):
            self._conclude(at, None, parsed, data, out)
        self._close_open_items(out)

    def _close_open_items(self, out: list[Normalized]) -> None:
        """Handle items without an end: keep text and thinking as they are; calls stay incomplete."""
        for at in self.table.open:
            item = self.table.items[at]
            self._emit_alternate(item, out)
            self._close_parts(item, out)
            if item.kind == "image":
                out.append(BlockStop(item.ordinal))

    # --- messages and reasoning -------------------------------------------------------------------------------

    def _content_item(self, parsed: wire.ItemEvent, kind: OpenKind, out: list[Normalized]) -> Item:
        """Return the open item of a delta. If it was never announced, create it with the kind the delta implies."""
        wanted: ItemKind = "message" if kind == "text" else "reasoning"
        index = parsed.output_index
        at = self.table.of_delta(wanted, index, parsed.item_id)
        if at is not None and self.table.items[at].ended and self.table.items[at].again is not None:
            at = self._begin_repeated(at, index, out)
        if at is None:
            there = None if index is None else self.table.by_index.get(index)
            if there is not None and there in self.table.open:
                raise Malformed("event", f"output_index {index} is a {self.table.items[there].type}, not a {wanted}")
            at = self._open(index, Item(wanted, wanted), [parsed.item_id] if parsed.item_id else [], out)
        if self.table.items[at].ended:
            raise Malformed("event", f"the {wanted} at output_index {index} has ended")
        return self.table.items[at]

    def _emit_text(self, item: Item, key: str, kind: OpenKind, text: str, out: list[Normalized]) -> None:
        """Emit a piece of a part. If both summary and raw reasoning exist, the second is held back: often the texts are
        equal.
        """
        if text and self._is_beside(item, key):
            self._hold_for(item, len(text) + 64)
            item.beside.setdefault(key, []).append(text)
        elif text:
            part = self._part(item, key, kind, out)
            part.emitted.add(text)
            out.append(TextDelta(part.ordinal, text) if kind == "text" else ThinkingDelta(part.ordinal, text))

    def _refuse(self, item: Item, key: str, text: str, out: list[Normalized]) -> None:
        if text:
            self.refused = True
            part = self._part(item, key, "text", out)
            part.emitted.add(text)
            out.append(RefusalDelta(part.ordinal, text))

    def _end_part(
        self, item: Item, key: str, kind: OpenKind, whole: str, out: list[Normalized], *, refusal: bool = False
    ) -> None:
        """Process the end of a part with its full text. Deltas already brought it; if they lack the end, the item's end
        adds it.
        """
        self.refused = self.refused or refusal
        if self._is_beside(item, key):
            if key not in item.beside:
                self._emit_text(item, key, kind, whole, out)
            return
        part = item.part_ended(key, whole)
        if part is None and refusal:
            self._refuse(item, key, whole, out)
        elif part is None:
            self._emit_text(item, key, kind, whole, out)
        if part := part or item.open_part(key):
            part.ended_as = key

    def _is_beside(self, item: Item, key: str) -> bool:
        return item.kind == "reasoning" and bool(item.parts) and is_raw(item.parts[0].key) != is_raw(key)

    def _emit_alternate(self, item: Item, out: list[Normalized]) -> None:
        """Emit the reasoning that was held back (summary or raw), unless it repeats what was emitted."""
        whole = [(key, "".join(pieces)) for key, pieces in item.beside.items()]
        emitted = [part.emitted for part in item.parts]
        item.beside = {}
        if not_emitted(emitted, [text for _, text in whole]) == [""] * len(whole):
            return
        for key, text in whole:
            if not any(one.rest(text) == "" for one in emitted):
                part = self._part(item, key, "thinking", out)
                part.emitted.add(text)
                out.append(ThinkingDelta(part.ordinal, text))

    def _cite(self, item: Item, key: str, citation: msgspec.Raw, out: list[Normalized]) -> None:
        """Emit a citation at once, and keep it to send back with its block."""
        json = text_of(citation)
        self._hold_for(item, len(json) + 64)
        part = self._part(item, key, "text", out)
        part.citations.append(json)
        part.cited = True
        self._extra("annotation", json, out, part.ordinal)

    def _part(self, item: Item, key: str, kind: OpenKind, out: list[Normalized]) -> Part:
        """Return the block of a part, opening it if needed. The first part of a reasoning item uses the item's own
        block.
        """
        part = item.open_part(key)
        if part is not None:
            return part
        if item.kind == "reasoning" and not item.parts and not item.ended:
            part = Part(item.ordinal, key)
        else:
            part = Part(self._take_ordinal(), key)
            out.append(BlockStart(part.ordinal, kind))
        if is_raw(key):
            out.append(Opaque(part.ordinal, "fields", _RAW_REASONING))
        self._hold_for(item, 64)
        item.open[key] = len(item.parts)
        item.parts.append(part)
        return part

    def _close_parts(self, item: Item, out: list[Normalized]) -> None:
        """End the blocks of a message or reasoning item, including an empty reasoning block."""
        if item.kind == "reasoning" and not item.parts:
            out.append(BlockStop(item.ordinal))
        for at in item.open.values():
            part = item.parts[at]
            if part.citations:
                out.append(Opaque(part.ordinal, "citations", f"[{','.join(part.citations)}]"))
                part.citations = []
            out.append(BlockStop(part.ordinal))
        item.open = {}

    def _end_content(self, item: Item, parsed: wire.Item, data: bytes, out: list[Normalized]) -> None:
        self._emit_remaining(item, parsed, out)
        self._emit_alternate(item, out)
        if item.kind == "reasoning" and parsed.encrypted_content:
            out.append(Opaque(item.ordinal, "encrypted", parsed.encrypted_content))
        self._send_back(item, parsed, further_fields(parsed.type, data), out)
        self._close_parts(item, out)

    def _send_back(self, item: Item, parsed: wire.Item, more: str, out: list[Normalized]) -> None:
        """Emit the data to send back with an item's open blocks, before they end."""
        empty = item.kind == "reasoning" and not item.parts
        for block in [item.ordinal] if empty else [item.parts[at].ordinal for at in item.open.values()]:
            if parsed.id:
                out.append(Opaque(block, "item_id", parsed.id))
            if more:
                out.append(Opaque(block, "fields", more))

    def _emit_remaining(self, item: Item, parsed: wire.Item, out: list[Normalized]) -> None:
        """Emit the parts of an item's final form that are still missing."""
        texts = texts_of(parsed)
        self.refused = self.refused or any(part.refusal for *_, part in texts)
        if item.kind == "reasoning" and item.has_content:
            texts = [text for text in texts if is_raw(text[0]) == is_raw(item.parts[0].key)]
        rests = item.remaining_of([(key, text) for key, _, text, _ in texts])
        for (key, kind, whole, part), rest in zip(texts, rests, strict=True):
            if not rest:
                continue
            open_part = item.open_part(key) or (item.open_part(next(reversed(item.open))) if item.open else None)
            at = open_part.key if open_part and rest != whole else key
            if part.refusal:
                self._refuse(item, at, rest, out)
            else:
                self._emit_text(item, at, kind, rest, out)
            for citation in part.annotations or () if rest == whole else ():
                self._cite(item, at, citation, out)

    def _emit_late(self, item: Item, parsed: wire.Item, data: bytes, out: list[Normalized]) -> None:
        """Process a repetition of an ended item. Missing content becomes a new block."""
        if item.kind in ("message", "reasoning"):
            self._emit_remaining(item, parsed, out)
            if item.open:
                self._send_back(item, parsed, further_fields(parsed.type, data), out)
                self._close_parts(item, out)
            self._hold(-item.held)
            item.held = 0

    # --- tool calls and images --------------------------------------------------------------------------------

    def _begin_call(self, item: Item, parsed: wire.Item, out: list[Normalized]) -> None:
        """Start the call, if its name is known."""
        if parsed.name:
            item.ordinal, item.name = self._take_ordinal(), parsed.name
            own = parsed.call_id or parsed.id
            out.append(ToolCallStart(item.ordinal, own or f"call_{item.ordinal}", parsed.name, derived=not own))
            out += [ToolCallDelta(item.ordinal, piece) for piece in item.pieces]
            item.pieces = []

    def _call_of(self, parsed: wire.ItemEvent, out: list[Normalized]) -> Item | None:
        """Return the call of an arguments event; it may have ended. None: they belong to an item emitted when
        complete.
        """
        index = parsed.output_index
        at = self.table.of_delta("call", index, parsed.item_id)
        if at is None:
            known = self.table.by_id.get(parsed.item_id or "", self.table.by_index.get(-1 if index is None else index))
            if known is not None and self.table.items[known].kind == "other":
                return None
            there = None if index is None else self.table.by_index.get(index)
            if there is not None:
                raise Malformed("event", f"output_index {index} is a {self.table.items[there].type}, not a call")
            raise Malformed("event", f"output_index {index} was never announced")
        if self.table.items[at].ended and self.table.items[at].again is not None:
            at = self._begin_repeated(at, index, out)
        return self.table.items[at]

    def _emit_arguments(self, item: Item, fragment: str, out: list[Normalized]) -> None:
        """Emit a fragment of a call's arguments."""
        if fragment:
            item.emitted.add(fragment)
            if item.ordinal >= 0:
                out.append(ToolCallDelta(item.ordinal, fragment))
            else:
                self._hold_for(item, len(fragment) + 64)
                item.pieces.append(fragment)

    def _end_call(self, item: Item, parsed: wire.Item, data: bytes, out: list[Normalized]) -> None:
        if item.ordinal < 0:
            self._begin_call(item, parsed, out)
        if item.ordinal < 0:
            raise Malformed("response.output_item.done", "a call has no name")
        self._emit_arguments(item, item.emitted.rest(arguments_of(parsed)) or "", out)
        if parsed.id:
            out.append(Opaque(item.ordinal, "item_id", parsed.id))
        if more := further_fields(parsed.type, data):
            out.append(Opaque(item.ordinal, "fields", more))
        if parsed.status != "incomplete":
            out.append(ToolCallDone(item.ordinal))
            self.calls += 1

    def _end_image(self, item: Item, parsed: wire.Item, data: bytes, out: list[Normalized]) -> None:
        """Emit the image, or everything known about it if it is missing."""
        if parsed.result:
            out.append(self._image(item, parsed, parsed.result, final=True))
        else:
            self._extra(parsed.type, data.decode(), out, item.ordinal)
        if parsed.id:
            out.append(Opaque(item.ordinal, "item_id", parsed.id))
        out.append(BlockStop(item.ordinal))

    def _preview(self, item: Item, parsed: wire.PartialImage, out: list[Normalized]) -> None:
        out.append(self._image(item, parsed, parsed.partial_image_b64, final=False))

    def _image(self, item: Item, parsed: wire.Item | wire.PartialImage, base64: str, *, final: bool) -> Image:
        return Image(
            item.ordinal,
            media_type(parsed.output_format),
            base64,
            final,
            revised_prompt=(parsed.revised_prompt or "") if isinstance(parsed, wire.Item) else "",
            model=self.image_model,
            size=parsed.size or "",
            quality=parsed.quality or "",
        )

    # ----------------------------------------------------------------------------------------------------------

    def _extra(self, name: str, json: str, out: list[Normalized], block: int | None = None) -> None:
        out.append(Extra(f"openai-responses.{name}", json, block))

    def _hold_for(self, item: Item, size: int) -> None:
        self._hold(size)
        item.held += size

    def _take_ordinal(self) -> int:
        self.next_ordinal += 1
        return self.next_ordinal - 1


def media_type(output_format: str | None) -> str:
    """The media type of a generated image."""
    return "image/svg+xml" if output_format == "svg" else f"image/{output_format or 'png'}"
