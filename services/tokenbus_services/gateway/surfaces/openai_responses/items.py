"""Output items: how the API represents one block, from its beginning to its end. Pure.

Each item yields the events of its block, without `output_index` and `sequence_number`, and is its own state in the
response's output meanwhile. Ids follow from the run and the block's number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import msgspec

from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, ImagePreview
from tokenbus_services.gateway.surfaces.openai_responses.opaque_items import field_of, of_block, sealed

Json = dict[str, Any]
ItemStatus = Literal["completed", "incomplete"]
FORMATS = ("png", "jpeg", "webp", "gif")


class OutputItem(ABC):
    """One output item. `state` is the item as it is now."""

    prefix: str

    def __init__(self, run: str, start: BlockStarted | Chunk | BlockComplete) -> None:
        self.block = start.block
        self.id = f"{self.prefix}_{run}_{start.block}"
        self.open = True
        self._pieces: list[str] = []
        self.state = self._begun(start)

    @abstractmethod
    def _begun(self, start: BlockStarted | Chunk | BlockComplete) -> Json: ...

    @abstractmethod
    def chunk(self, chunk: Chunk) -> list[Json]:
        """The events of a chunk."""

    def preview(self, preview: ImagePreview) -> list[Json]:
        """The events of a preview."""
        return []

    def complete(self, end: BlockComplete) -> list[Json]:
        """The events of the block's end, but for the item's own `done`."""
        events = self._completed(end)
        self.open = False
        return events

    @property
    def so_far(self) -> Json:
        """The item with the content that it has so far."""
        return self._partial("".join(self._pieces)) if self.open and self._pieces else self.state

    @abstractmethod
    def _completed(self, end: BlockComplete) -> list[Json]: ...

    def _partial(self, content: str) -> Json:
        """The item, still open, with this content."""
        return self.state

    def _event(self, kind: str, **fields: object) -> Json:
        return {"type": f"response.{kind}", "item_id": self.id, **fields}


class Message(OutputItem):
    """A text: a message of one part."""

    prefix = "msg"

    def _begun(self, start: BlockStarted | Chunk | BlockComplete) -> Json:
        self._has_content = False
        return {"id": self.id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}

    def chunk(self, chunk: Chunk) -> list[Json]:
        self._pieces.append(chunk.text)
        delta = self._event("output_text.delta", content_index=0, delta=chunk.text, logprobs=[])
        return [*self._part_begun(), delta]

    def _completed(self, end: BlockComplete) -> list[Json]:
        text = "".join(self._pieces)
        part = _text_part(text)
        self.state = {
            **self.state,
            "status": "incomplete" if end.cut else "completed",
            "content": [part],
            **field_of(of_block(end)),
        }
        return [
            *self._part_begun(),
            self._event("output_text.done", content_index=0, text=text, logprobs=[]),
            self._event("content_part.done", content_index=0, part=part),
        ]

    def _part_begun(self) -> list[Json]:
        if self._has_content:
            return []
        self._has_content = True
        return [self._event("content_part.added", content_index=0, part=_text_part(""))]

    def _partial(self, content: str) -> Json:
        return {**self.state, "content": [_text_part(content)]}


class Reasoning(OutputItem):
    """A thinking: a reasoning item, its text as the summary."""

    prefix = "rs"

    def _begun(self, start: BlockStarted | Chunk | BlockComplete) -> Json:
        return {"id": self.id, "type": "reasoning", "summary": []}

    def chunk(self, chunk: Chunk) -> list[Json]:
        begun: list[Json] = []
        if not self._pieces:
            begun = [self._event("reasoning_summary_part.added", summary_index=0, part=_summary(""))]
        self._pieces.append(chunk.text)
        return [*begun, self._event("reasoning_summary_text.delta", summary_index=0, delta=chunk.text)]

    def _completed(self, end: BlockComplete) -> list[Json]:
        text = "".join(self._pieces)
        if carried := of_block(end):
            self.state = {**self.state, "encrypted_content": sealed(carried)}
        if not self._pieces:
            return []
        self.state = {**self.state, "summary": [_summary(text)]}
        return [
            self._event("reasoning_summary_text.done", summary_index=0, text=text),
            self._event("reasoning_summary_part.done", summary_index=0, part=_summary(text)),
        ]

    def _partial(self, content: str) -> Json:
        return {**self.state, "summary": [_summary(content)]}


class FunctionCall(OutputItem):
    """A tool call."""

    prefix = "fc"
    kind = "function_call"
    field = "arguments"
    empty = "{}"
    """Input of a call without any: clients parse this as JSON."""

    def _begun(self, start: BlockStarted | Chunk | BlockComplete) -> Json:
        return {
            "id": self.id,
            "type": self.kind,
            "call_id": start.tool_id or self.id,
            "name": start.tool_name or "",
            self.field: "",
            "status": "in_progress",
        }

    def chunk(self, chunk: Chunk) -> list[Json]:
        if chunk.tool_call_part != "input":
            return []
        self._pieces.append(chunk.text)
        return [self._event(f"{self.kind}_{self.field}.delta", delta=chunk.text)]

    def _completed(self, end: BlockComplete) -> list[Json]:
        deltas: list[Json] = []
        if not any(self._pieces) and not end.cut and self.empty:
            self._pieces = [self.empty]
            deltas = [self._event(f"{self.kind}_{self.field}.delta", delta=self.empty)]
        text = "".join(self._pieces)
        self.state = {
            **self.state,
            self.field: text,
            "status": "incomplete" if end.cut else "completed",
            **field_of(of_block(end)),
        }
        fields = {"name": self.state["name"]} if self.field == "arguments" else {}
        return [*deltas, self._event(f"{self.kind}_{self.field}.done", **fields, **{self.field: text})]

    def _partial(self, content: str) -> Json:
        return {**self.state, self.field: content}


class CustomCall(FunctionCall):
    """A call whose input is free text."""

    prefix = "ctc"
    kind = "custom_tool_call"
    field = "input"
    empty = ""


class FunctionOutput(OutputItem):
    """The result of a call that the bus ran."""

    prefix = "fco"

    def _begun(self, start: BlockStarted | Chunk | BlockComplete) -> Json:
        return {
            "id": self.id,
            "type": "function_call_output",
            "call_id": start.tool_id or "",
            "output": "",
            "status": "in_progress",
        }

    def chunk(self, chunk: Chunk) -> list[Json]:
        return []

    def _completed(self, end: BlockComplete) -> list[Json]:
        self.state = {**self.state, "output": end.content or "", "status": "incomplete" if end.cut else "completed"}
        return []


class Image(OutputItem):
    """An image that the model makes. Its bytes are in it if the events carry them, else the id of the blob."""

    prefix = "ig"

    def _begun(self, start: BlockStarted | Chunk | BlockComplete) -> Json:
        return {"id": self.id, "type": "image_generation_call", "status": "in_progress", "result": None}

    def chunk(self, chunk: Chunk) -> list[Json]:
        return []

    def begin(self) -> list[Json]:
        """The events that follow the item's beginning."""
        return [self._event("image_generation_call.in_progress"), self._event("image_generation_call.generating")]

    def preview(self, preview: ImagePreview) -> list[Json]:
        if not preview.image.base64:
            return []
        return [
            self._event(
                "image_generation_call.partial_image",
                partial_image_index=preview.index,
                partial_image_b64=preview.image.base64,
            )
        ]

    def _completed(self, end: BlockComplete) -> list[Json]:
        image = end.image
        if image is None or end.cut:
            self.state = {**self.state, "status": "failed"}
            return []
        self.state = {**self.state, "status": "completed", "result": image.base64}
        fields = {"revised_prompt": image.revised_prompt, "size": image.size}
        kind = image.media_type.removeprefix("image/")
        fields["output_format"] = kind if kind in FORMATS else None
        self.state |= {name: value for name, value in fields.items() if value}
        if image.blob_id:
            self.state["tokenbus"] = {"blob_id": image.blob_id, "media_type": image.media_type}
        return [self._event("image_generation_call.completed")]


class ServerItem(OutputItem):
    """An item of the provider's servers: a search, say. It comes when it is whole, as the provider wrote it."""

    prefix = "item"

    def _begun(self, start: BlockStarted | Chunk | BlockComplete) -> Json:
        content = start.content if isinstance(start, BlockComplete) else None
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(content or "", type=dict[str, Any])
        return {"id": self.id, "type": "unknown"}

    def chunk(self, chunk: Chunk) -> list[Json]:
        return []

    def _completed(self, end: BlockComplete) -> list[Json]:
        return []


def item_of(run: str, start: BlockStarted | Chunk | BlockComplete, namespaces: Mapping[str, str]) -> OutputItem:
    """A new item for a block that begins."""
    match start.kind:
        case "text":
            return Message(run, start)
        case "thinking":
            return Reasoning(run, start)
        case "tool_call":
            free = not isinstance(start, Chunk) and start.free_text
            call = CustomCall(run, start) if free else FunctionCall(run, start)
            if space := namespaces.get(start.tool_name or ""):
                call.state |= {"namespace": space, "name": call.state["name"].removeprefix(f"{space}__")}
            return call
        case "tool_result":
            return FunctionOutput(run, start)
        case "image":
            return Image(run, start)
        case "server_tool" | "audio":  # sound has no item in this API, and is not shown
            return ServerItem(run, start)


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _summary(text: str) -> Json:
    return {"type": "summary_text", "text": text}
