"""Turns the parts of messages and reasoning into blocks: what deltas, ends of parts and final forms bring of them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus.events import normalized as n
from tokenbus.providers.openai_responses import wire
from tokenbus.providers.openai_responses.items import StreamedItem, StreamedPart, further_fields, is_raw, texts_of
from tokenbus.providers.response.decoder import ResponseDecoder
from tokenbus.providers.response.json_decode import text_of
from tokenbus.providers.response.repeats import not_emitted
from tokenbus.providers.response.unknown_fields import has_value

_RAW_REASONING = '{"type":"reasoning_text"}'


class ContentDecoder(ResponseDecoder, kw_only=True):
    """Emits the content of a message or reasoning item. The subclass knows which item an event belongs to."""

    refused: bool = False

    def _emit_text(self, item: StreamedItem, key: str, kind: n.OpenKind, text: str, out: list[n.Normalized]) -> None:
        """Emit a piece of a part. If both summary and raw reasoning exist, the second is held back: often the texts are
        equal.
        """
        if text and self._is_beside(item, key):
            self._hold_for(item, len(text) + 64)
            item.beside.setdefault(key, []).append(text)
        elif text:
            part = self._part(item, key, kind, out)
            part.emitted.add(text)
            out.append(n.TextDelta(part.ordinal, text) if kind == "text" else n.ThinkingDelta(part.ordinal, text))

    def _refuse(self, item: StreamedItem, key: str, text: str, out: list[n.Normalized]) -> None:
        if text:
            self.refused = True
            part = self._part(item, key, "text", out)
            part.emitted.add(text)
            out.append(n.RefusalDelta(part.ordinal, text))

    def _end_part(
        self,
        item: StreamedItem,
        key: str,
        kind: n.OpenKind,
        whole: str,
        out: list[n.Normalized],
        *,
        event: str,
        refusal: bool = False,
    ) -> None:
        """Process the end of a part with its full text. Deltas already brought it; if they lack the end, the item's end
        adds it. ``event``: the type of the event, because the number of a part may be another in each.
        """
        self.refused = self.refused or refusal
        if self._is_beside(item, key):
            if key not in item.beside:
                self._emit_text(item, key, kind, whole, out)
            return
        part = item.part_ended(event, key, whole)
        if part is None and refusal:
            self._refuse(item, key, whole, out)
        elif part is None:
            self._emit_text(item, key, kind, whole, out)
        if part := part or item.open_part(key):
            part.ended_as[event] = key

    def _is_beside(self, item: StreamedItem, key: str) -> bool:
        return item.kind == "reasoning" and bool(item.parts) and is_raw(item.parts[0].key) != is_raw(key)

    def _cite(self, item: StreamedItem, key: str, citation: msgspec.Raw, out: list[n.Normalized]) -> None:
        """Emit a citation at once, and keep it to send back with its block."""
        json = text_of(citation)
        self._hold_for(item, len(json) + 64)
        part = self._part(item, key, "text", out)
        part.citations.append(json)
        self._extra("annotation", json, out, part.ordinal)

    def _end_content(
        self, item: StreamedItem, parsed: wire.Item, data: bytes, further: Mapping[str, str], out: list[n.Normalized]
    ) -> None:
        self._emit_remaining(item, parsed, out)
        self._emit_alternate(item, out)
        if item.kind == "reasoning" and parsed.encrypted_content:
            out.append(n.Opaque(item.ordinal, "encrypted", parsed.encrypted_content))
        self._send_back(item, parsed, further_fields(parsed.type, data), out)
        self._beside(further, self._present_block(item), out)
        self._close_parts(item, out)

    def _present_block(self, item: StreamedItem) -> int | None:
        if item.open:
            return item.parts[next(reversed(item.open.values()))].ordinal
        return item.ordinal if item.ordinal >= 0 else None

    def _logprobs(self, item: StreamedItem, logprobs: msgspec.Raw, out: list[n.Normalized]) -> None:
        item.has_logprobs = True
        self._extra("logprobs", text_of(logprobs), out, self._present_block(item))

    def _emit_remaining(self, item: StreamedItem, parsed: wire.Item, out: list[n.Normalized]) -> None:
        """Emit the parts of an item's final form that are still missing."""
        texts = texts_of(parsed)
        self.refused = self.refused or any(part.refusal for *_, part in texts)
        if item.kind == "reasoning" and item.has_content:
            texts = [text for text in texts if is_raw(text[0]) == is_raw(item.parts[0].key)]
        rests = item.remaining_of([(key, text) for key, _, text, _ in texts])
        for (key, kind, whole, part), rest in zip(texts, rests, strict=True):
            open_part = item.open_part(key) or (item.open_part(next(reversed(item.open))) if item.open else None)
            at = open_part.key if open_part and rest != whole else key
            if rest and part.refusal:
                self._refuse(item, at, rest, out)
            elif rest:
                self._emit_text(item, at, kind, rest, out)
            known = item.open_part(at)
            if known and not item.has_logprobs and has_value(part.logprobs):
                self._extra("logprobs", text_of(part.logprobs), out, known.ordinal)
            for citation in part.annotations or () if known and not (known.citations or item.ended) else ():
                self._cite(item, at, citation, out)

    def _emit_alternate(self, item: StreamedItem, out: list[n.Normalized]) -> None:
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
                out.append(n.ThinkingDelta(part.ordinal, text))

    def _send_back(self, item: StreamedItem, parsed: wire.Item, more: str, out: list[n.Normalized]) -> None:
        """Emit the data to send back with an item's open blocks, before they end."""
        empty = item.kind == "reasoning" and not item.parts
        for block in [item.ordinal] if empty else [item.parts[at].ordinal for at in item.open.values()]:
            if parsed.id:
                out.append(n.Opaque(block, "item_id", parsed.id))
            if more:
                out.append(n.Opaque(block, "fields", more))

    def _emit_late(self, item: StreamedItem, parsed: wire.Item, data: bytes, out: list[n.Normalized]) -> None:
        """Process a repetition of an ended item. Missing content becomes a new block."""
        if item.kind in ("message", "reasoning"):
            self._emit_remaining(item, parsed, out)
            if item.open:
                self._send_back(item, parsed, further_fields(parsed.type, data), out)
                self._close_parts(item, out)
            self._hold(-item.held)
            item.held = 0

    def _part(self, item: StreamedItem, key: str, kind: n.OpenKind, out: list[n.Normalized]) -> StreamedPart:
        """Return the block of a part, opening it if needed. The first part of a reasoning item uses the item's own
        block.
        """
        part = item.open_part(key)
        if part is not None:
            return part
        if item.kind == "reasoning" and not item.parts and not item.ended:
            part = StreamedPart(item.ordinal, key)
        else:
            part = StreamedPart(self._take_ordinal(), key)
            out.append(n.BlockStart(part.ordinal, kind, phase=item.phase))
        if is_raw(key):
            out.append(n.Opaque(part.ordinal, "fields", _RAW_REASONING))
        self._hold_for(item, 64)
        item.open[key] = len(item.parts)
        item.parts.append(part)
        return part

    def _close_parts(self, item: StreamedItem, out: list[n.Normalized]) -> None:
        """End the blocks of a message or reasoning item, including an empty reasoning block."""
        if item.kind == "reasoning" and not item.parts:
            out.append(n.BlockStop(item.ordinal))
        for at in item.open.values():
            part = item.parts[at]
            if part.citations:
                out.append(n.Opaque(part.ordinal, "citations", f"[{','.join(part.citations)}]"))
                part.citations = []
            out.append(n.BlockStop(part.ordinal))
        item.open = {}

    def _extra(self, name: str, json: str, out: list[n.Normalized], block: int | None = None) -> None:
        out.append(n.Extra(f"openai-responses.{name}", json, block))

    def _hold_for(self, item: StreamedItem, size: int) -> None:
        self._hold(size)
        item.held += size
