"""Follows output items from their announcement to their end: which item an event belongs to, calls, and images."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus.errors import Malformed
from tokenbus.events import normalized as n
from tokenbus.providers.openai_responses import wire
from tokenbus.providers.openai_responses.content import ContentDecoder
from tokenbus.providers.openai_responses.items import (
    ItemKind,
    ItemTable,
    StreamedItem,
    arguments_of,
    further_fields,
    ids_of,
    is_next,
    kind_of,
    phase_of,
    sort_of,
    text_in,
    tool_of,
)
from tokenbus.providers.response.json_decode import read
from tokenbus.providers.response.repeats import EmittedText
from tokenbus.providers.response.unknown_fields import named

APPROVAL = "mcp_approval_request"
"""A hosted call that somebody must allow; the run waits for that."""
ACTIONS = ("computer_call", "local_shell_call", "shell_call", "apply_patch_call")
"""Hosted calls that the client answers: it does what the call says, and sends the result."""


class OutputDecoder(ContentDecoder, kw_only=True):
    """Defines what happens to items. The subclass maps API events to these operations."""

    custom_tools: list[str] | None = None
    """Names of the request's custom tools; None if the response does not repeat them."""
    table: ItemTable = msgspec.field(default_factory=ItemTable)
    calls: int = 0
    """Number of completed tool calls."""
    asked: int = 0
    """Number of hosted calls that somebody must allow."""
    waiting: list[str] = msgspec.field(default_factory=list[str])
    """Types of the items for which the client has to act."""
    image_model: str = ""
    """The model behind the image tool, if the response repeats it."""

    def _announce(self, index: int | None, data: bytes, out: list[n.Normalized]) -> None:
        """Start an item. Ignore repetitions; after the item's end, later events decide whether it is a new one."""
        parsed, _ = wire.read_item(data)
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

    def _begin_item(self, index: int | None, parsed: wire.Item, kind: ItemKind, out: list[n.Normalized]) -> int:
        at = self._open(index, StreamedItem(parsed.type, kind, call_id=parsed.call_id or ""), ids_of(parsed), out)
        item = self.table.items[at]
        item.phase = phase_of(parsed)
        if kind == "call":
            self._begin_call(item, parsed, out)
        elif kind == "other":
            own = parsed.call_id or parsed.id or ""
            out.append(n.ItemStart(item.ordinal, f"openai-responses.{parsed.type}", tool_of(parsed), own))
        return at

    def _open(self, index: int | None, item: StreamedItem, ids: list[str], out: list[n.Normalized]) -> int:
        at = self.table.add(item, index, ids)
        if item.kind in ("reasoning", "image", "other"):
            item.ordinal = self._take_ordinal()
        if item.kind in ("reasoning", "image"):
            out.append(n.BlockStart(item.ordinal, "image" if item.kind == "image" else "thinking"))
        return at

    def _begin_repeated(self, at: int, index: int | None, out: list[n.Normalized]) -> int:
        """Start the new item that was announced after the end of another with the same id."""
        data, self.table.items[at].again = self.table.items[at].again, None
        assert data is not None
        self._hold(-len(data))
        parsed, _ = wire.read_item(data)
        return self._begin_item(index, parsed, self.table.items[at].kind, out)

    def _end_item(self, index: int | None, data: bytes, out: list[n.Normalized]) -> None:
        """End an item, given in its final form. One that was never announced is emitted whole."""
        parsed, unknown = wire.read_item(data)
        kind = kind_of(parsed, self.custom_tools)
        there = None if index is None else self.table.by_index.get(index)
        if there is not None and there in self.table.open and (item := self.table.items[there]).kind != kind:
            is_new = self.table.find(sort_of(kind, parsed.type), None, ids_of(parsed), parsed.call_id) is None
            if is_new and not (item.ids and ids_of(parsed)):
                problem = f"output_index {index} is a {item.type}, not a {parsed.type}"
                raise Malformed("response.output_item.done", problem)
        further = named("openai-responses", unknown, parsed.type) if unknown else {}
        self._conclude(self.table.of_item(kind, index, parsed), index, parsed, data, out, further=further)

    def _conclude(
        self,
        at: int | None,
        index: int | None,
        parsed: wire.Item,
        data: bytes,
        out: list[n.Normalized],
        *,
        further: Mapping[str, str],
    ) -> None:
        """Process an item's final form. ``at``: the known item that it belongs to, if any. ``further``: its fields
        without a meaning here.
        """
        if at is not None and (item := self.table.items[at]).ended:
            if item.again is None or item.is_repeat(parsed):
                self._emit_late(item, parsed, data, out)
                return
            at = self._begin_repeated(at, index, out)
        if at is None:
            at = self._begin_item(index, parsed, kind_of(parsed, self.custom_tools), out)
        item = self.table.items[at]
        item.phase = item.phase or phase_of(parsed)
        match item.kind:
            case "message" | "reasoning":
                self._end_content(item, parsed, data, further, out)
            case "call":
                self._end_call(item, parsed, data, further, out)
            case "image":
                self._end_image(item, parsed, data, further, out)
            case "other":
                out.append(n.ToolCallDelta(item.ordinal, item.rest_of(data)))
                if parsed.type == APPROVAL and parsed.id:
                    out.append(_approval(item.ordinal, parsed, data))
                    self.asked += 1
                out.append(n.BlockStop(item.ordinal))
                if parsed.type in ACTIONS:
                    self.waiting.append(parsed.type)
                elif parsed.type == "shell_call_output" and "shell_call" in self.waiting:
                    self.waiting.remove("shell_call")  # it ran at the provider
        self.table.end(at)
        self._hold(256 + 64 * len(item.parts) - item.held)

    def _complete(self, output: list[msgspec.Raw], out: list[n.Normalized]) -> None:
        """Process the final response, which repeats all items. Emit what is still missing."""
        items = [(bytes(data), *wire.read_item(bytes(data))) for data in output]
        kinds: list[ItemKind] = [kind_of(parsed, self.custom_tools) for _, parsed, _ in items]
        found = self.table.of_whole(kinds, [parsed for _, parsed, _ in items])
        for (data, parsed, unknown), at in zip(items, found, strict=True):
            further = named("openai-responses", unknown, parsed.type) if unknown else {}
            self._conclude(at, None, parsed, data, out, further=further)
        self._close_open_items(out)

    def _close_open_items(self, out: list[n.Normalized]) -> None:
        """Handle items without an end: keep text and thinking as they are; calls stay incomplete."""
        for at in self.table.open:
            item = self.table.items[at]
            self._emit_alternate(item, out)
            self._close_parts(item, out)
            if item.kind == "image":
                out.append(n.BlockStop(item.ordinal))

    # --- messages and reasoning -------------------------------------------------------------------------------

    def _content_item(self, parsed: wire.ItemEvent, kind: n.OpenKind, out: list[n.Normalized]) -> StreamedItem:
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
            at = self._open(index, StreamedItem(wanted, wanted), [parsed.item_id] if parsed.item_id else [], out)
        if self.table.items[at].ended:
            raise Malformed("event", f"the {wanted} at output_index {index} has ended")
        return self.table.items[at]

    # --- tool calls and images --------------------------------------------------------------------------------

    def _begin_call(self, item: StreamedItem, parsed: wire.Item, out: list[n.Normalized]) -> None:
        """Start the call, if its name is known."""
        if parsed.name:
            item.ordinal, item.name = self._take_ordinal(), parsed.name
            own = parsed.call_id or parsed.id
            free = item.type == "custom_tool_call"
            tool_id = own or f"call_{item.ordinal}"
            out.append(n.ToolCallStart(item.ordinal, tool_id, parsed.name, derived=not own, free_text=free))
            out += [n.ToolCallDelta(item.ordinal, piece) for piece in item.pieces]
            item.pieces = []

    def _call_of(self, parsed: wire.ItemEvent, out: list[n.Normalized]) -> StreamedItem | None:
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

    def _emit_input(self, item: StreamedItem, field: str, piece: str, out: list[n.Normalized]) -> None:
        """Emit a piece of a text field of an item that the provider runs. Its JSON begins with the first such field. In
        a list of texts, the next one may follow.
        """
        opening: str | None = "" if item.field == field else None
        if not item.field:
            names = field.split(".")
            if not any(name.isdigit() and int(name) for name in names):  # a list begins with its first
                opening = "".join("[" if name.isdigit() else f'{{"{name}":' for name in names) + '"'
        elif is_next(item.field, field):
            opening, item.emitted = '","', EmittedText()
        if piece and opening is not None:
            item.field = field
            item.emitted.add(piece)
            out.append(n.ToolCallDelta(item.ordinal, opening + msgspec.json.encode(piece).decode()[1:-1]))

    def _emit_arguments(self, item: StreamedItem, fragment: str, out: list[n.Normalized]) -> None:
        if fragment:
            item.emitted.add(fragment)
            if item.ordinal >= 0:
                out.append(n.ToolCallDelta(item.ordinal, fragment))
            else:
                self._hold_for(item, len(fragment) + 64)
                item.pieces.append(fragment)

    def _end_call(
        self, item: StreamedItem, parsed: wire.Item, data: bytes, further: Mapping[str, str], out: list[n.Normalized]
    ) -> None:
        if item.ordinal < 0:
            self._begin_call(item, parsed, out)
        if item.ordinal < 0:
            raise Malformed("response.output_item.done", "a call has no name")
        self._emit_arguments(item, item.emitted.rest(arguments_of(parsed)) or "", out)
        if parsed.id:
            out.append(n.Opaque(item.ordinal, "item_id", parsed.id))
        if more := further_fields(parsed.type, data):
            out.append(n.Opaque(item.ordinal, "fields", more))
        self._beside(further, item.ordinal, out)
        if parsed.status != "incomplete":
            out.append(n.ToolCallDone(item.ordinal))
            self.calls += 1

    def _end_image(
        self, item: StreamedItem, parsed: wire.Item, data: bytes, further: Mapping[str, str], out: list[n.Normalized]
    ) -> None:
        """Emit the image, or everything known about it if it is missing."""
        if parsed.result:
            out.append(self._image(item, parsed, parsed.result, final=True))
            self._beside(further, item.ordinal, out)
        else:
            self._extra(parsed.type, data.decode(), out, item.ordinal)
        if parsed.id:
            out.append(n.Opaque(item.ordinal, "item_id", parsed.id))
        out.append(n.BlockStop(item.ordinal))

    def _preview(self, item: StreamedItem, parsed: wire.PartialImage, out: list[n.Normalized]) -> None:
        out.append(self._image(item, parsed, parsed.partial_image_b64, final=False))

    def _image(self, item: StreamedItem, parsed: wire.Item | wire.PartialImage, base64: str, *, final: bool) -> n.Image:
        return n.Image(
            item.ordinal,
            media_type(parsed.output_format),
            base64,
            final,
            revised_prompt=(parsed.revised_prompt or "") if isinstance(parsed, wire.Item) else "",
            model=self.image_model,
            size=parsed.size or "",
            quality=parsed.quality or "",
        )


def _approval(ordinal: int, parsed: wire.Item, data: bytes) -> n.ApprovalAsked:
    """What a provider asks of the client, and the items that answer it."""
    fields = read(wire.fields, data, "item")
    label, arguments = (text_in(fields[name]) if name in fields else "" for name in ("server_label", "arguments"))
    answer = {"type": "mcp_approval_response", "approval_request_id": parsed.id}
    allow, deny = (msgspec.json.encode({**answer, "approve": approve}).decode() for approve in (True, False))
    return n.ApprovalAsked(
        ordinal,
        tool_id=parsed.id or "",
        name=parsed.name or "",
        arguments=arguments,
        server=label,
        item="openai-responses.mcp_approval_response",
        allow=allow,
        deny=deny,
    )


def media_type(output_format: str | None) -> str:
    """The media type of a generated image."""
    return "image/svg+xml" if output_format == "svg" else f"image/{output_format or 'png'}"
