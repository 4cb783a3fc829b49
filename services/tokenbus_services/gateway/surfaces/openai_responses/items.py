"""Output items: how the API represents one block, from its beginning to its end. Pure.

Each item yields the events of its block, without `output_index` and `sequence_number`, and is its own state in the
response's output meanwhile. Ids follow from the run and the block's number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, ImagePreview
from tokenbus_services.gateway.surfaces.hosted import Citation, Step, citations_of, original

_PREFIX = "tbus1."
_ORIGIN = ("api", "provider")


class Carried(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The provider's data of one block, which it wants back.

    A reasoning item has a place for it, `encrypted_content`, which no client reads. Other items carry it in a field of
    ours, `tokenbus`, which clients keep if they send items back as they came.
    """

    signature: str | None = None
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None
    items: list[dict[str, str]] | None = None
    """Another API's items, in whose place this one stands."""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a content part without a signature."""
        return {"opaque": self.opaque, "opaque_blobs": self.opaque_blobs}


def of_block(block: BlockComplete) -> Carried | None:
    """The data of a block; None if its provider wants nothing back."""
    kept = {name for name in block.opaque or {} if name not in _ORIGIN}
    if not (block.signature or kept or block.opaque_blobs):
        return None
    return Carried(signature=block.signature, opaque=block.opaque, opaque_blobs=block.opaque_blobs)


def sealed(carried: Carried) -> str:
    """As the text of `encrypted_content`."""
    return _PREFIX + urlsafe_b64encode(msgspec.json.encode(carried)).decode()


def opened(text: str) -> Carried | None:
    """Read what `sealed` wrote; None if the text is not from here."""
    if not text.startswith(_PREFIX):
        return None
    try:
        return msgspec.json.decode(urlsafe_b64decode(text.removeprefix(_PREFIX)), type=Carried)
    except (Base64Error, ValueError, RecursionError):
        return None


def field_of(carried: Carried | None) -> Json:
    """The field `tokenbus` of an item, if it needs one."""
    return {"tokenbus": msgspec.to_builtins(carried)} if carried else {}


def of_field(value: Json | None) -> Carried:
    """Read the field `tokenbus` of an item. Raises msgspec.ValidationError."""
    return msgspec.convert(value or {}, Carried)


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
        self.state: Json = self._begun(start)

    @abstractmethod
    def _begun(self, start: BlockStarted | Chunk | BlockComplete) -> Json: ...

    @abstractmethod
    def chunk(self, chunk: Chunk) -> list[Json]:
        """The events of a chunk."""

    def preview(self, preview: ImagePreview) -> list[Json]:
        return []

    def complete(self, end: BlockComplete) -> list[Json]:
        """The events of the block's end, but for the item's own `done`."""
        events = self._completed(end)
        self.open = False
        return events

    @property
    def so_far(self) -> Json:
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
        annotations = [each for cited in citations_of(end) if (each := annotation(cited))]
        part = _text_part(text, annotations)
        self.state = {
            **self.state,
            "status": "incomplete" if end.cut else "completed",
            "content": [part],
            **field_of(of_block(end)),
        }
        cited = [
            self._event("output_text.annotation.added", content_index=0, annotation_index=number, annotation=each)
            for number, each in enumerate(annotations)
        ]
        return [
            *self._part_begun(),
            *cited,
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


class HostedItem(OutputItem):
    """What another API's provider did itself, in this API's words; the items themselves are in `tokenbus`. It is done
    once its output is there.
    """

    def __init__(self, run: str, start: BlockComplete, step: Step) -> None:
        self._step = step
        self._originals: list[Json] = []
        self.prefix = _PREFIXES.get(step.tool, "ci")
        super().__init__(run, start)
        self._read(start, step)

    def _begun(self, start: BlockStarted | Chunk | BlockComplete) -> Json:
        step = self._step
        match step.tool:
            case "web_search":
                action: Json = {"type": "search", "query": next(iter(step.queries), ""), "queries": step.queries}
                state: Json = {"type": "web_search_call", "action": action}
            case "web_fetch":
                state = {"type": "web_search_call"}
                state["action"] = {"type": "open_page", "url": step.url}
            case "file_search":
                state = {"type": "file_search_call", "queries": step.queries, "results": None}
            case "mcp":
                state = {"type": "mcp_call", "name": step.name, "server_label": step.server}
                state |= {"arguments": msgspec.json.encode(step.called).decode(), "output": None, "error": None}
            case _:
                state = {"type": "code_interpreter_call", "code": step.code}
                state |= {"container_id": "", "outputs": None}
        return {"id": self.id, **state, "status": "in_progress"}

    def chunk(self, chunk: Chunk) -> list[Json]:
        return []

    def add(self, end: BlockComplete, step: Step) -> None:
        """Add the output, from another block."""
        self._read(end, step)

    @property
    def has_output(self) -> bool:
        return self._step.output is not None

    def _read(self, block: BlockComplete, step: Step) -> None:
        self._originals.append(original(block))
        self.state = {**self.state, "tokenbus": {"items": self._originals}}
        if (output := step.output) is None:
            return
        self._step = msgspec.structs.replace(self._step, output=output)
        match self.state["type"]:
            case "web_search_call" if self._step.tool == "web_search":
                sources = [{"type": "url", "url": each.url} for each in output.found]
                self.state["action"] = {**self.state["action"], "sources": sources}
            case "file_search_call":
                self.state["results"] = [
                    {"file_id": each.file_id, "filename": each.title, "text": each.text} for each in output.found
                ]
            case "mcp_call":
                error = {"type": "mcp_tool_execution_error", "content": output.errors or output.text}
                self.state |= {"error": error} if output.failed else {"output": output.text}
            case "code_interpreter_call":
                self.state["outputs"] = [{"type": "logs", "logs": output.text + output.errors}]
            case _:
                pass

    def _completed(self, end: BlockComplete) -> list[Json]:
        failed = self._step.output and self._step.output.failed and self._step.tool not in ("code", "shell")
        self.state = {**self.state, "status": "failed" if failed else "incomplete" if end.cut else "completed"}
        return []


_PREFIXES = {"web_search": "ws", "web_fetch": "ws", "file_search": "fs", "mcp": "mcp"}


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


class WholeItem(OutputItem):
    """An item that is complete when it begins."""

    prefix = ""

    def __init__(self, block: int, state: Json) -> None:
        self.block = block
        self.id = state["id"]
        self.open = True
        self._pieces = []
        self.state = state

    def _begun(self, start: BlockStarted | Chunk | BlockComplete) -> Json:
        return self.state

    def chunk(self, chunk: Chunk) -> list[Json]:
        return []

    def _completed(self, end: BlockComplete) -> list[Json]:
        return []


def item_of(run: str, start: BlockStarted | Chunk | BlockComplete, namespaces: Mapping[str, str]) -> OutputItem:
    match start.kind:
        case "text" | "audio":  # sound has no item in this API: what it says is a text
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
        case "server_tool":
            return ServerItem(run, start)


def annotation(cited: Citation) -> Json | None:
    """A source of a text: an address, or a file. Of this API in the provider's words, with the fields that some vendors
    leave out and clients need. None: this API has no word for it.
    """
    own = cited.words_of("openai-responses") or {}
    if cited.url and own.get("type", "url_citation") == "url_citation":
        place = {"start_index": cited.start, "end_index": cited.end}
        return {"type": "url_citation", "url": cited.url, "title": cited.title, **place, **own}
    file = {"type": "file_citation", "file_id": cited.file_id, "filename": cited.title, "index": cited.end}
    return own or (file if cited.file_id else None)


def _text_part(text: str, annotations: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": list(annotations), "logprobs": []}


def _summary(text: str) -> Json:
    return {"type": "summary_text", "text": text}
