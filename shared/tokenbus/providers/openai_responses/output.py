"""The items of a response's output, as blocks: from their announcement over their parts to their end."""

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
from tokenbus.providers.response.repeats import untold

_RAW_REASONING = '{"type":"reasoning_text"}'


class OutputDecoder(ResponseDecoder, kw_only=True):
    """What becomes of items. Which event says what of them is not told here."""

    custom_tools: list[str] | None = None
    """Names of the request's custom tools; None where the response does not repeat them."""
    table: ItemTable = msgspec.field(default_factory=ItemTable)
    next_ordinal: int = 0
    calls: int = 0
    """Tool calls completed."""
    refused: bool = False
    image_model: str = ""
    """The model behind the image tool, where the response repeats it."""

    def _announce(self, index: int | None, data: bytes, out: list[Normalized]) -> None:
        """An item begins. Said twice, it is nothing new; after its end, only what follows tells whether it is."""
        said = wire.read_item(data)
        kind, ids = kind_of(said, self.custom_tools), ids_of(said)
        at = self.table.find(sort_of(kind, said.type), index, ids, said.call_id)
        if at is not None:
            item = self.table.items[at]
            known = item.has(ids, said.call_id)
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
            raise Malformed("response.output_item.added", f"output_index {index} is open already")
        self._begin_item(index, said, kind, out)

    def _begin_item(self, index: int | None, said: wire.Item, kind: ItemKind, out: list[Normalized]) -> int:
        at = self._open(index, Item(said.type, kind, call_id=said.call_id or ""), ids_of(said), out)
        if kind == "call":
            self._begin_call(self.table.items[at], said, out)
        return at

    def _open(self, index: int | None, item: Item, ids: list[str], out: list[Normalized]) -> int:
        at = self.table.add(item, index, ids)
        if item.kind in ("reasoning", "image", "other"):
            item.ordinal = self._take_ordinal()
        if item.kind in ("reasoning", "image"):
            out.append(BlockStart(item.ordinal, "image" if item.kind == "image" else "thinking"))
        return at

    def _begin_again(self, at: int, index: int | None, out: list[Normalized]) -> int:
        """What was announced after the end of an item with the same id is another."""
        data, self.table.items[at].again = self.table.items[at].again, None
        assert data is not None
        self._hold(-len(data))
        said = wire.read_item(data)
        return self._begin_item(index, said, self.table.items[at].kind, out)

    def _end_item(self, index: int | None, data: bytes, out: list[Normalized]) -> None:
        """An item as it is at its end; one that was never announced comes whole."""
        said = wire.read_item(data)
        kind = kind_of(said, self.custom_tools)
        there = None if index is None else self.table.by_index.get(index)
        if there is not None and there in self.table.open and (item := self.table.items[there]).kind != kind:
            unknown = self.table.find(sort_of(kind, said.type), None, ids_of(said), said.call_id) is None
            if unknown and not (item.ids and ids_of(said)):
                problem = f"output_index {index} is a {item.type}, not a {said.type}"
                raise Malformed("response.output_item.done", problem)
        self._conclude(self.table.of_item(kind, index, said), index, said, data, out)

    def _conclude(self, at: int | None, index: int | None, said: wire.Item, data: bytes, out: list[Normalized]) -> None:
        """What an item at its end says, of which it is known (``at``) what was told."""
        if at is not None and (item := self.table.items[at]).ended:
            if item.again is None or item.is_again(said):
                self._say_late(item, said, data, out)
                return
            at = self._begin_again(at, index, out)
        if at is None:
            at = self._begin_item(index, said, kind_of(said, self.custom_tools), out)
        item = self.table.items[at]
        match item.kind:
            case "message" | "reasoning":
                self._end_content(item, said, data, out)
            case "call":
                self._end_call(item, said, data, out)
            case "image":
                self._end_image(item, said, data, out)
            case "other":
                out.append(Extra(f"openai-responses.{said.type}", data.decode(), ordinal=item.ordinal))
        self.table.end(at)
        self._hold(256 + 64 * len(item.parts) - item.held)

    def _complete(self, output: list[msgspec.Raw], out: list[Normalized]) -> None:
        """The response at its end says all of its items again; what of them was not told is told now."""
        items = [(bytes(data), wire.read_item(bytes(data))) for data in output]
        kinds: list[ItemKind] = [kind_of(said, self.custom_tools) for _, said in items]
        found = self.table.of_whole(kinds, [said for _, said in items])
        for (data, said), at in zip(items, found, strict=True):
            self._conclude(at, None, said, data, out)
        self._give_up_items(out)

    def _give_up_items(self, out: list[Normalized]) -> None:
        """The response ended before these items: text and thinking are what they are, a call was not completed."""
        for at in self.table.open:
            item = self.table.items[at]
            self._say_beside(item, out)
            self._close_parts(item, out)
            if item.kind == "image":
                out.append(BlockStop(item.ordinal))

    # --- messages and reasoning -------------------------------------------------------------------------------

    def _content_item(self, said: wire.OfItem, kind: OpenKind, out: list[Normalized]) -> Item:
        """The open item that a delta belongs to; one that was never announced is what the delta says that it is."""
        wanted: ItemKind = "message" if kind == "text" else "reasoning"
        index = said.output_index
        at = self.table.of_delta(wanted, index, said.item_id)
        if at is not None and self.table.items[at].ended and self.table.items[at].again is not None:
            at = self._begin_again(at, index, out)
        if at is None:
            there = None if index is None else self.table.by_index.get(index)
            if there is not None and there in self.table.open:
                raise Malformed("event", f"output_index {index} is a {self.table.items[there].type}, not a {wanted}")
            at = self._open(index, Item(wanted, wanted), [said.item_id] if said.item_id else [], out)
        if self.table.items[at].ended:
            raise Malformed("event", f"the {wanted} at output_index {index} has ended")
        return self.table.items[at]

    def _say(self, item: Item, key: str, kind: OpenKind, text: str, out: list[Normalized]) -> None:
        """A piece of a part. A summary beside the model's own words waits for its end: often it is the same text."""
        if text and self._is_beside(item, key):
            self._hold_for(item, len(text) + 64)
            item.beside.setdefault(key, []).append(text)
        elif text:
            part = self._part(item, key, kind, out)
            part.told.add(text)
            out.append(TextDelta(part.ordinal, text) if kind == "text" else ThinkingDelta(part.ordinal, text))

    def _refuse(self, item: Item, key: str, text: str, out: list[Normalized]) -> None:
        if text:
            self.refused = True
            part = self._part(item, key, "text", out)
            part.told.add(text)
            out.append(RefusalDelta(part.ordinal, text))

    def _end_part(
        self, item: Item, key: str, kind: OpenKind, whole: str, out: list[Normalized], *, refusal: bool = False
    ) -> None:
        """A part with its whole text: nothing new where deltas brought it. Should they lack its end, the item tells."""
        self.refused = self.refused or refusal
        if self._is_beside(item, key):
            if key not in item.beside:
                self._say(item, key, kind, whole, out)
            return
        part = item.part_ended(key, whole)
        if part is None and refusal:
            self._refuse(item, key, whole, out)
        elif part is None:
            self._say(item, key, kind, whole, out)
        if part := part or item.open_part(key):
            part.ended_as = key

    def _is_beside(self, item: Item, key: str) -> bool:
        return item.kind == "reasoning" and bool(item.parts) and is_raw(item.parts[0].key) != is_raw(key)

    def _say_beside(self, item: Item, out: list[Normalized]) -> None:
        """The summary, or the model's own words, that came second: where it is no other text it was told."""
        whole = [(key, "".join(pieces)) for key, pieces in item.beside.items()]
        told = [part.told for part in item.parts]
        item.beside = {}
        if untold(told, [text for _, text in whole]) == [""] * len(whole):
            return
        for key, text in whole:
            if not any(one.rest(text) == "" for one in told):
                part = self._part(item, key, "thinking", out)
                part.told.add(text)
                out.append(ThinkingDelta(part.ordinal, text))

    def _cite(self, item: Item, key: str, citation: msgspec.Raw, out: list[Normalized]) -> None:
        """A citation is shown at once; it goes back with its block."""
        json = text_of(citation)
        self._hold_for(item, len(json) + 64)
        part = self._part(item, key, "text", out)
        part.citations.append(json)
        part.cited = True
        self._extra("annotation", json, out, part.ordinal)

    def _part(self, item: Item, key: str, kind: OpenKind, out: list[Normalized]) -> Part:
        """The open block of a part. The first part of a reasoning takes the block that began with its item."""
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
        """End the blocks of a message or a reasoning, an empty reasoning too."""
        if item.kind == "reasoning" and not item.parts:
            out.append(BlockStop(item.ordinal))
        for at in item.open.values():
            part = item.parts[at]
            if part.citations:
                out.append(Opaque(part.ordinal, "citations", f"[{','.join(part.citations)}]"))
                part.citations = []
            out.append(BlockStop(part.ordinal))
        item.open = {}

    def _end_content(self, item: Item, said: wire.Item, data: bytes, out: list[Normalized]) -> None:
        self._say_left(item, said, out)
        self._say_beside(item, out)
        if item.kind == "reasoning" and said.encrypted_content:
            out.append(Opaque(item.ordinal, "encrypted", said.encrypted_content))
        self._send_back(item, said, further_fields(said.type, data), out)
        self._close_parts(item, out)

    def _send_back(self, item: Item, said: wire.Item, more: str, out: list[Normalized]) -> None:
        """What must go back with the open blocks of an item, told before they end."""
        empty = item.kind == "reasoning" and not item.parts
        for block in [item.ordinal] if empty else [item.parts[at].ordinal for at in item.open.values()]:
            if said.id:
                out.append(Opaque(block, "item_id", said.id))
            if more:
                out.append(Opaque(block, "fields", more))

    def _say_left(self, item: Item, said: wire.Item, out: list[Normalized]) -> None:
        """What the item at its end says beside what was told of it."""
        texts = texts_of(said)
        self.refused = self.refused or any(part.refusal for *_, part in texts)
        if item.kind == "reasoning" and item.says:
            texts = [text for text in texts if is_raw(text[0]) == is_raw(item.parts[0].key)]
        rests = item.left_of([(key, text) for key, _, text, _ in texts])
        for (key, kind, whole, part), rest in zip(texts, rests, strict=True):
            if not rest:
                continue
            open_part = item.open_part(key) or (item.open_part(next(reversed(item.open))) if item.open else None)
            at = open_part.key if open_part and rest != whole else key
            if part.refusal:
                self._refuse(item, at, rest, out)
            else:
                self._say(item, at, kind, rest, out)
            for citation in part.annotations or () if rest == whole else ():
                self._cite(item, at, citation, out)

    def _say_late(self, item: Item, said: wire.Item, data: bytes, out: list[Normalized]) -> None:
        """An item that has ended is told again: what of it was not told is a block of its own."""
        if item.kind in ("message", "reasoning"):
            self._say_left(item, said, out)
            if item.open:
                self._send_back(item, said, further_fields(said.type, data), out)
                self._close_parts(item, out)
            self._hold(-item.held)
            item.held = 0

    # --- tool calls and images --------------------------------------------------------------------------------

    def _begin_call(self, item: Item, said: wire.Item, out: list[Normalized]) -> None:
        """The call begins, once its name is known."""
        if said.name:
            item.ordinal, item.name = self._take_ordinal(), said.name
            own = said.call_id or said.id
            out.append(ToolCallStart(item.ordinal, own or f"call_{item.ordinal}", said.name, derived=not own))
            out += [ToolCallDelta(item.ordinal, piece) for piece in item.pieces]
            item.pieces = []

    def _call_of(self, said: wire.OfItem, out: list[Normalized]) -> Item | None:
        """The call that arguments belong to, which may have ended; None: they are of an item told when complete."""
        index = said.output_index
        at = self.table.of_delta("call", index, said.item_id)
        if at is None:
            known = self.table.by_id.get(said.item_id or "", self.table.by_index.get(-1 if index is None else index))
            if known is not None and self.table.items[known].kind == "other":
                return None
            there = None if index is None else self.table.by_index.get(index)
            if there is not None:
                raise Malformed("event", f"output_index {index} is a {self.table.items[there].type}, not a call")
            raise Malformed("event", f"output_index {index} was never announced")
        if self.table.items[at].ended and self.table.items[at].again is not None:
            at = self._begin_again(at, index, out)
        return self.table.items[at]

    def _argue(self, item: Item, fragment: str, out: list[Normalized]) -> None:
        """A fragment of a call's arguments."""
        if fragment:
            item.told.add(fragment)
            if item.ordinal >= 0:
                out.append(ToolCallDelta(item.ordinal, fragment))
            else:
                self._hold_for(item, len(fragment) + 64)
                item.pieces.append(fragment)

    def _end_call(self, item: Item, said: wire.Item, data: bytes, out: list[Normalized]) -> None:
        if item.ordinal < 0:
            self._begin_call(item, said, out)
        if item.ordinal < 0:
            raise Malformed("response.output_item.done", "a call without a name")
        self._argue(item, item.told.rest(arguments_of(said)) or "", out)
        if said.id:
            out.append(Opaque(item.ordinal, "item_id", said.id))
        if more := further_fields(said.type, data):
            out.append(Opaque(item.ordinal, "fields", more))
        if said.status != "incomplete":
            out.append(ToolCallDone(item.ordinal))
            self.calls += 1

    def _end_image(self, item: Item, said: wire.Item, data: bytes, out: list[Normalized]) -> None:
        """The image; or where there is none, all that is known of it."""
        if said.result:
            out.append(self._image(item, said, said.result, final=True))
        else:
            self._extra(said.type, data.decode(), out, item.ordinal)
        if said.id:
            out.append(Opaque(item.ordinal, "item_id", said.id))
        out.append(BlockStop(item.ordinal))

    def _preview(self, item: Item, said: wire.PartialImage, out: list[Normalized]) -> None:
        out.append(self._image(item, said, said.partial_image_b64, final=False))

    def _image(self, item: Item, said: wire.Item | wire.PartialImage, base64: str, *, final: bool) -> Image:
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

    def _hold_for(self, item: Item, size: int) -> None:
        self._hold(size)
        item.held += size

    def _take_ordinal(self) -> int:
        self.next_ordinal += 1
        return self.next_ordinal - 1


def media_type(output_format: str | None) -> str:
    """The media type of a generated image."""
    return "image/svg+xml" if output_format == "svg" else f"image/{output_format or 'png'}"
