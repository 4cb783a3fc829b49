"""The items of a response's output, as blocks: from their announcement over their parts to their end."""

from __future__ import annotations

import msgspec

from tokenbus.errors import Malformed, TooLarge
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
from tokenbus.providers.decoding import MAX_OPEN_BLOCKS, ResponseDecoder
from tokenbus.providers.json_reading import text_of
from tokenbus.providers.openai_responses import wire
from tokenbus.providers.openai_responses.items import (
    OpenItem,
    Part,
    arguments_of,
    further_fields,
    is_raw,
    kind_of,
    texts_of,
)

_RAW_REASONING = '{"type":"reasoning_text"}'


class OutputDecoder(ResponseDecoder, kw_only=True):
    """What becomes of items. Which event says what of them is not told here."""

    custom_tools: list[str] | None = None
    """Names of the request's custom tools; None where the response does not repeat them."""
    items: dict[int, OpenItem] = msgspec.field(default_factory=dict[int, OpenItem])
    """Items that have not ended, by `output_index`."""
    ended_items: set[int] = msgspec.field(default_factory=set[int])
    next_ordinal: int = 0
    calls: int = 0
    """Tool calls completed."""
    refused: bool = False
    image_model: str = ""
    """The model behind the image tool, where the response repeats it."""

    def _announce(self, index: int, data: bytes, out: list[Normalized]) -> OpenItem:
        """An item begins. Said twice, it is nothing new."""
        said = wire.read_item(data)
        kind = kind_of(said, self.custom_tools)
        if item := self.items.get(index):
            if item.kind != kind:
                raise Malformed("response.output_item.added", f"output_index {index} is open already")
            return item
        self.ended_items.discard(index)
        item = self._open(index, OpenItem(said.type, kind), out)
        if kind == "call":
            self._begin_call(item, said, out)
        return item

    def _open(self, index: int, item: OpenItem, out: list[Normalized]) -> OpenItem:
        if len(self.items) >= MAX_OPEN_BLOCKS:
            raise TooLarge("open blocks", len(self.items) + 1, MAX_OPEN_BLOCKS)
        self.items[index] = item
        if item.kind in ("reasoning", "image", "other"):
            item.ordinal = self._take_ordinal()
        if item.kind in ("reasoning", "image"):
            out.append(BlockStart(item.ordinal, "image" if item.kind == "image" else "thinking"))
        return item

    def _end_item(self, index: int, data: bytes, out: list[Normalized]) -> None:
        """An item as it is at its end; one that was never announced comes whole."""
        if index in self.ended_items:
            return
        item = self.items.get(index) or self._announce(index, data, out)
        said = wire.read_item(data)
        if kind_of(said, self.custom_tools) != item.kind:
            raise Malformed("response.output_item.done", f"output_index {index} is a {item.type}, not a {said.type}")
        match item.kind:
            case "message" | "reasoning":
                self._end_content(item, said, data, out)
            case "call":
                self._end_call(item, said, data, out)
            case "image":
                self._end_image(item, said, data, out)
            case "other":
                out.append(Extra(f"openai-responses.{said.type}", data.decode(), ordinal=item.ordinal))
        del self.items[index]
        self._hold(64 - item.held)
        self.ended_items.add(index)

    def _give_up_items(self, out: list[Normalized]) -> None:
        """The response ended before these items: text and thinking are what they are, a call was not completed."""
        for item in self.items.values():
            self._close_parts(item, out)
            if item.kind == "image":
                out.append(BlockStop(item.ordinal))

    # --- messages and reasoning -------------------------------------------------------------------------------

    def _content_item(self, index: int, kind: OpenKind, out: list[Normalized]) -> OpenItem:
        """The open item that a delta belongs to; one that was never announced is what the delta says that it is."""
        wanted = "message" if kind == "text" else "reasoning"
        item = self.items.get(index)
        if item is None:
            if index in self.ended_items:
                raise Malformed("event", f"output_index {index} has ended")
            item = self._open(index, OpenItem(wanted, wanted), out)
        if item.kind != wanted:
            raise Malformed("event", f"output_index {index} is a {item.type}, not a {wanted}")
        return item

    def _say(self, item: OpenItem, key: str, kind: OpenKind, text: str, out: list[Normalized]) -> None:
        if text:
            ordinal = self._part(item, key, kind, out).ordinal
            out.append(TextDelta(ordinal, text) if kind == "text" else ThinkingDelta(ordinal, text))

    def _refuse(self, item: OpenItem, key: str, text: str, out: list[Normalized]) -> None:
        if text:
            self.refused = True
            out.append(RefusalDelta(self._part(item, key, "text", out).ordinal, text))

    def _cite(self, item: OpenItem, key: str, citation: msgspec.Raw, out: list[Normalized]) -> None:
        """A citation is shown at once; it goes back with its block."""
        json = text_of(citation)
        self._hold_for(item, len(json) + 64)
        part = self._part(item, key, "text", out)
        part.citations.append(json)
        self._extra("annotation", json, out, part.ordinal)

    def _part(self, item: OpenItem, key: str, kind: OpenKind, out: list[Normalized]) -> Part:
        """The open block of a part. The first part of a reasoning takes the block that began with its item."""
        part = item.parts.get(key)
        if part is not None:
            return part
        if item.kind == "reasoning" and not item.seen:
            part = Part(item.ordinal)
        else:
            part = Part(self._take_ordinal())
            out.append(BlockStart(part.ordinal, kind))
        if is_raw(key):
            out.append(Opaque(part.ordinal, "fields", _RAW_REASONING))
        self._hold_for(item, 64)
        item.parts[key] = part
        item.seen.append(key)
        item.blocks.append(part.ordinal)
        return part

    def _close_part(self, item: OpenItem, key: str, out: list[Normalized]) -> None:
        if part := item.parts.pop(key, None):
            if part.citations:
                out.append(Opaque(part.ordinal, "citations", f"[{','.join(part.citations)}]"))
            out.append(BlockStop(part.ordinal))

    def _close_parts(self, item: OpenItem, out: list[Normalized]) -> None:
        """End what is open of a message or a reasoning, an empty reasoning too."""
        if item.kind == "reasoning" and not item.seen:
            item.blocks.append(item.ordinal)
            out.append(BlockStop(item.ordinal))
        for key in list(item.parts):
            self._close_part(item, key, out)

    def _end_content(self, item: OpenItem, said: wire.Item, data: bytes, out: list[Normalized]) -> None:
        if item.kind == "message" or not item.seen:
            for key, kind, part in texts_of(said):
                if key not in item.seen:
                    self._refuse(item, key, part.refusal or "", out)
                    self._say(item, key, kind, part.text or "", out)
                    for citation in part.annotations or ():
                        self._cite(item, key, citation, out)
        self._close_parts(item, out)
        if item.kind == "reasoning" and said.encrypted_content:
            out.append(Opaque(item.ordinal, "encrypted", said.encrypted_content))
        more = further_fields(said.type, data)
        for block in item.blocks:
            if said.id:
                out.append(Opaque(block, "item_id", said.id))
            if more:
                out.append(Opaque(block, "fields", more))

    # --- tool calls and images --------------------------------------------------------------------------------

    def _begin_call(self, item: OpenItem, said: wire.Item, out: list[Normalized]) -> None:
        """The call begins, once its name is known."""
        if said.name:
            item.ordinal = self._take_ordinal()
            own = said.call_id or said.id
            out.append(ToolCallStart(item.ordinal, own or f"call_{item.ordinal}", said.name, derived=not own))
            out += [ToolCallDelta(item.ordinal, piece) for piece in item.pieces]
            item.pieces = []

    def _argue(self, index: int, fragment: str, out: list[Normalized]) -> None:
        """A fragment of a call's arguments."""
        item = self.items.get(index)
        if item is None:
            raise Malformed("event", f"output_index {index} was never announced, or has ended")
        if item.kind == "other":
            return
        if item.kind != "call":
            raise Malformed("event", f"output_index {index} is a {item.type}, not a call")
        if fragment:
            item.streamed = True
            if item.ordinal >= 0:
                out.append(ToolCallDelta(item.ordinal, fragment))
            else:
                self._hold_for(item, len(fragment) + 64)
                item.pieces.append(fragment)

    def _end_call(self, item: OpenItem, said: wire.Item, data: bytes, out: list[Normalized]) -> None:
        if item.ordinal < 0:
            self._begin_call(item, said, out)
        if item.ordinal < 0:
            raise Malformed("response.output_item.done", "a call without a name")
        whole = said.input if said.type == "custom_tool_call" else arguments_of(said.arguments)
        if whole and not item.streamed:
            out.append(ToolCallDelta(item.ordinal, whole))
        if said.id:
            out.append(Opaque(item.ordinal, "item_id", said.id))
        if more := further_fields(said.type, data):
            out.append(Opaque(item.ordinal, "fields", more))
        if said.status != "incomplete":
            out.append(ToolCallDone(item.ordinal))
            self.calls += 1

    def _end_image(self, item: OpenItem, said: wire.Item, data: bytes, out: list[Normalized]) -> None:
        """The image; or where there is none, all that is known of it."""
        if said.result:
            out.append(self._image(item, said, said.result, final=True))
        else:
            self._extra(said.type, data.decode(), out, item.ordinal)
        if said.id:
            out.append(Opaque(item.ordinal, "item_id", said.id))
        out.append(BlockStop(item.ordinal))

    def _preview(self, item: OpenItem, said: wire.PartialImage, out: list[Normalized]) -> None:
        out.append(self._image(item, said, said.partial_image_b64, final=False))

    def _image(self, item: OpenItem, said: wire.Item | wire.PartialImage, base64: str, *, final: bool) -> Image:
        return Image(
            item.ordinal,
            media_type(said.output_format),
            base64,
            final,
            revised_prompt=(said.revised_prompt or "") if isinstance(said, wire.Item) else "",
            model=self.image_model,
            size=said.size or "",
            quality=said.quality or "",
        )

    # ----------------------------------------------------------------------------------------------------------

    def _extra(self, name: str, json: str, out: list[Normalized], block: int | None = None) -> None:
        out.append(Extra(f"openai-responses.{name}", json, block))

    def _hold_for(self, item: OpenItem, size: int) -> None:
        self._hold(size)
        item.held += size

    def _take_ordinal(self) -> int:
        self.next_ordinal += 1
        return self.next_ordinal - 1


def media_type(output_format: str | None) -> str:
    """The media type of a generated image."""
    return "image/svg+xml" if output_format == "svg" else f"image/{output_format or 'png'}"
