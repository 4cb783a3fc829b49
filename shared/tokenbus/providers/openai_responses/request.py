"""Builds a Responses request: https://platform.openai.com/docs/api-reference/responses/create.

Responses are not stored, except jobs in the background, so reasoning is returned and sent back encrypted. Models that
do not reason reject the option to include it; `Quirks` lists them. The API has no field for participant names, for a
thinking budget (it becomes an effort), or for a failed tool (the model reads it from the result).
"""

from __future__ import annotations

import re
from typing import cast

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events import requests
from tokenbus.events.quirks import begins_with
from tokenbus.providers.api import Built, HttpCall, JobApi, JobSeen, Quirks
from tokenbus.providers.base import JobBase
from tokenbus.providers.openai_responses.wire import fields
from tokenbus.providers.request.build import (
    accepted_stops,
    chosen_tool,
    data_url,
    deep_merged,
    effort_of,
    fitted_id,
    given,
    json_call,
    named_schema,
    schema_of,
    system_texts,
    with_extra,
    with_own,
)
from tokenbus.providers.request.conversation import Spoken, Takes, conversation, own_extra, raw_json
from tokenbus.providers.request.images import MASK, image_fields, image_options, image_reference

RUNNING = ("queued", "in_progress")
ENDED = ("completed", "incomplete", "failed", "cancelled", "expired")


class _Response(msgspec.Struct):
    id: str = ""
    status: str = ""


class _Event(_Response):
    """An event of the stream, or a response, which has no type."""

    type: str = ""
    sequence_number: int = -1
    response: _Response | None = None


_event = msgspec.json.Decoder(_Event)


class ResponseJobs(JobBase):
    """Responses in the background: https://developers.openai.com/api/docs/guides/background.

    A stream goes on after an event's number, but only one that was started with `stream`.
    """

    path = "/responses"
    resumes = True

    def read(self, data: bytes) -> JobSeen:
        """See `JobApi.read`. The event's name tells the end, because some servers leave the status as it was."""
        try:
            event = _event.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return JobSeen()
        if not event.type:
            return JobSeen(event.id, over=bool(event.id) and event.status in ENDED)
        over = event.type.removeprefix("response.") in ENDED
        named = event.response.id if event.response else ""
        return JobSeen(named, event.sequence_number, over, failed=event.type == "error")

    def resume(self, job: str, after: int) -> HttpCall:
        query = {"stream": "true"} | ({"starting_after": str(after)} if after >= 0 else {})
        return self.look(job, **query)

    def last_event(self, response: bytes) -> bytes:
        status = _event.decode(response).status
        kind = f"response.{'failed' if status == 'expired' else status}".encode()
        return b'event: %b\ndata: {"type":"%b","response":%b}\n\n' % (
            kind,
            kind,
            msgspec.json.format(response, indent=-1),
        )


jobs: JobApi = ResponseJobs()


ENCRYPTED_REASONING = "reasoning.encrypted_content"


def build(request: requests.Generate, history: list[requests.Message], quirks: Quirks) -> Built:
    """Build the HTTP call for the next turn. Raises RequestInvalid, naming the field."""
    extra = request.extra or {}
    # The provider keeps the items of a conversation, and adds those of each answer: nothing is sent twice.
    in_conversation = bool(extra.get("conversation"))
    # A job in the background can be read again only if it is stored.
    keeps = in_conversation or jobs.wanted(request)
    stored = bool(extra.get("store")) or keeps
    takes = Takes(
        api="openai-responses",
        thinking=("encrypted", "item_id") if stored else ("encrypted",),
        plain_thinking=bool(quirks.reasoning_back),
        model_images=True,
        unique_ids=True,
        free_text_calls=True,
        part_options=frozenset({"title", "detail"}),
    )
    spoken, notes = conversation(request, history, takes)
    body: dict[str, object] = {"model": request.model, "stream": request.stream, "store": keeps}
    if not (stored or begins_with(request.model, quirks.models_without_reasoning)):
        body["include"] = [ENCRYPTED_REASONING]
    payload = Input(quirks, stored)
    if isinstance(request.system, list) and quirks.cache_marks and any(part.cache for part in request.system):
        payload.items.append({"role": "system", "content": [text_part(part, quirks) for part in request.system]})
    elif texts := system_texts(request.system):
        body["instructions"] = "\n\n".join(texts)
    known = 0
    for message in spoken:
        payload.add(message)
        if in_conversation and message.role == "assistant" and message.where.startswith("history"):
            known = len(payload.items)
    body["input"] = payload.items[known:]
    body |= _limits(request, quirks) | _tools(request)
    body = with_extra(body, request.extra, lists=("tools", "include"))
    return Built(call=json_call("/responses", body), notes=notes)


def _limits(request: requests.Generate, quirks: Quirks) -> dict[str, object]:
    """Output limit and format, reasoning and sampling. The API itself has no stop strings."""
    payload = given({"max_output_tokens": request.max_tokens})
    thinking = request.thinking
    if thinking and not thinking.wanted:
        payload["reasoning"] = {"effort": "none"}
    elif thinking:
        shown = {} if thinking.display == "omitted" else {"summary": "auto"}
        payload["reasoning"] = shown | ({"effort": effort} if (effort := effort_of(thinking)) else {})
    if request.output_schema:
        payload["text"] = {"format": {"type": "json_schema", **named_schema(request.output_schema)}}
    elif request.json_object:
        payload["text"] = {"format": {"type": "json_object"}}
    return payload | given(
        {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "safety_identifier": request.user_id,
            "stop": accepted_stops(request.stop, quirks.max_stop_strings or 0) or None,
        }
    )


def _tools(request: requests.Generate) -> dict[str, object]:
    payload: dict[str, object] = {}
    tools = [_tool(tool) for tool in request.tools]
    if images := image_options(request, "size", "quality", "format", "background", "model", "previews", "mask"):
        mask = {"input_image_mask": image_reference(MASK, images.mask)} if images.mask else {}
        tools.append({"type": "image_generation"} | image_fields(images) | mask)
    if tools:
        payload["tools"] = tools
    return payload | chosen_tool(request, lambda kind, name: {"type": kind, "name": name})


def _tool(tool: requests.Tool) -> dict[str, object]:
    described: dict[str, object] = {"description": tool.description} if tool.description else {}
    if tool.format:
        custom = {"type": "custom", "name": tool.name, "format": msgspec.to_builtins(tool.format)}
        return with_own(custom | described, tool.extra, "openai-responses")
    # Strict mode is the API's default and supports only a subset of JSON Schema.
    payload: dict[str, object] = {"type": "function", "name": tool.name, "parameters": schema_of(tool.parameters)}
    return with_own(payload | {"strict": bool(tool.strict)} | described, tool.extra, "openai-responses")


_TOOL_ID = re.compile(r"[^\s]+")
_MAX_TOOL_ID = 64
_ITEM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OF_ITEM = frozenset({"id", "type", "role", "content"})

Json = dict[str, object]


class Input:
    """Collects the input items."""

    def __init__(self, quirks: Quirks, stored: bool) -> None:
        self.items: list[Json | msgspec.Raw] = []
        self._quirks = quirks
        self._stored = stored
        """The provider stores responses, so reasoning is sent back by id only."""
        self._custom_calls: set[str] = set()
        """Custom-tool calls of the latest message."""

    def add(self, message: Spoken) -> None:
        """Append a message. Raises RequestInvalid."""
        first = len(self.items)
        self._add(message)
        if message.extra:
            of_message = (n for n in range(first, len(self.items)) if "role" in self._fields_of(n))
            for n in of_message:
                self.items[n] = deep_merged(self._fields_of(n), message.extra)

    def _fields_of(self, n: int) -> Json:
        item = self.items[n]
        return item if isinstance(item, dict) else {}

    def _add(self, message: Spoken) -> None:
        match message.role:
            case "system":
                texts = [part.text for part in message.parts if isinstance(part, requests.TextPart)]
                self.items.append({"role": "system", "content": "\n\n".join(texts)})
            case "user":
                self._user(message)
            case "assistant":
                self._assistant(message)
            case "tool":
                self.items += [
                    self._result(part) for part in message.parts if isinstance(part, requests.ToolResultPart)
                ]

    def _user(self, message: Spoken) -> None:
        """Add one user message. Provider-specific items go next to it."""
        parts: list[Json] = []
        for i, part in enumerate(message.parts):
            match part:
                case requests.TextPart():
                    parts.append(text_part(part, self._quirks))
                case requests.ImagePart():
                    parts.append(_image(part, self._quirks))
                case requests.DocumentPart():
                    parts.append(_document(part, self._quirks))
                case requests.ExtraPart():
                    if (raw := own_extra(part, "openai-responses", f"{message.where}.content[{i}]")) is not None:
                        self.items.append(raw)
                case _:
                    pass  # conversation() allows no other part in a user message
        if parts:
            only_text = parts[0]["text"] if len(parts) == 1 and parts[0].keys() == {"type", "text"} else None
            self.items.append({"role": "user", "content": only_text or parts})

    def _assistant(self, message: Spoken) -> None:
        self._custom_calls = set()
        first = len(self.items)
        for i, part in enumerate(message.parts):
            where = f"{message.where}.content[{i}]"
            match part:
                case requests.TextPart():
                    self._text(part, where, first)
                case requests.ThinkingPart():
                    self._thinking(part, where, first)
                case requests.ImagePart():
                    self._made(part)
                case requests.ToolCallPart():
                    self._call(part, where)
                case requests.ExtraPart():
                    if (raw := own_extra(part, "openai-responses", where)) is not None:
                        self.items.append(raw)
                case _:
                    pass  # conversation() allows no other part in an assistant message

    def _text(self, part: requests.TextPart, where: str, first: int) -> None:
        """Add model text. Consecutive texts of the same item, or without an item, form one message."""
        opaque = part.opaque or {}
        before = self._last(first, "message")
        item_id = _item_id(opaque, "msg")
        more = _further(opaque, where)
        if before is not None and before.get("id") == item_id and (item_id or before.get("phase") == more.get("phase")):
            if item_id:
                cast("list[Json]", before["content"]).append(_output_text(part.text, opaque, where))
            else:
                before["content"] = f"{before['content']}{part.text}"
            return
        payload: Json = {"type": "message", "role": "assistant"}
        if item_id:
            payload |= {"id": item_id, "status": "completed", "content": [_output_text(part.text, opaque, where)]}
        else:
            payload["content"] = part.text
        self.items.append({**more, **payload})

    def _thinking(self, part: requests.ThinkingPart, where: str, first: int) -> None:
        """Add reasoning if the API can use it: encrypted, stored, or as plain text for vendors that want it.

        Parts with the same item id are merged into one item again.
        """
        opaque = part.opaque or {}
        item_id = _item_id(opaque, "rs")
        encrypted = opaque.get("encrypted")
        payload = self._last(first, "reasoning")
        if payload is None or not item_id or payload.get("id") != item_id:
            if not (encrypted or (self._stored and item_id) or self._quirks.reasoning_back):
                return
            fresh: Json = {"type": "reasoning", "summary": list[Json]()}
            payload = fresh | {"id": item_id} if item_id else fresh
            self.items.append(payload)
        if encrypted:
            payload["encrypted_content"] = encrypted
        if part.text and (_fields(opaque, where) or not (encrypted or item_id)):
            content = cast("list[Json]", payload.setdefault("content", list[Json]()))
            content.append({"type": "reasoning_text", "text": part.text})
        elif part.text:
            cast("list[Json]", payload["summary"]).append({"type": "summary_text", "text": part.text})

    def _made(self, part: requests.ImagePart) -> None:
        """Add a model-generated image: as its own item, or as a user image if another provider's model made it."""
        item_id = _item_id(part.opaque or {}, "ig")
        if item_id and isinstance(part.source, requests.Base64Source):
            payload: Json = {"type": "image_generation_call", "id": item_id, "status": "completed"}
            self.items.append(payload | {"result": part.source.data})
        else:
            self.items.append({"role": "user", "content": [_image(part, self._quirks)]})

    def _call(self, part: requests.ToolCallPart, where: str) -> None:
        opaque = part.opaque or {}
        more = _further(opaque, where)
        payload: Json = {"call_id": _fitted(part.tool_id), "name": part.tool_name}
        if part.free_text:
            self._custom_calls.add(part.tool_id)
            payload |= {"type": "custom_tool_call", "input": part.arguments}
        else:
            payload |= {"type": "function_call", "arguments": part.arguments or "{}"}
        if item_id := _item_id(opaque, "ctc" if part.free_text else "fc"):
            payload["id"] = item_id
        self.items.append(with_own({**more, **payload}, part.extra, "openai-responses"))

    def _result(self, part: requests.ToolResultPart) -> Json:
        kind = "custom_tool_call_output" if part.tool_id in self._custom_calls else "function_call_output"
        payload: Json = {"type": kind, "call_id": _fitted(part.tool_id)}
        if isinstance(part.content, str):
            payload["output"] = part.content
        else:
            payload["output"] = [
                _image(inner, self._quirks) if isinstance(inner, requests.ImagePart) else text_part(inner, self._quirks)
                for inner in part.content
            ]
        return with_own(payload, part.extra, "openai-responses")

    def _last(self, first: int, kind: str) -> Json | None:
        """The last item, if it belongs to this message and has this type."""
        last = self.items[-1] if len(self.items) > first else None
        return last if isinstance(last, dict) and last.get("type") == kind else None


def text_part(part: requests.TextPart, quirks: Quirks) -> Json:
    """Input text: anything not written by the model."""
    payload: Json = {"type": "input_text", "text": part.text}
    return with_own(payload | _cache(part.cache, quirks), part.extra, "openai-responses")


def _output_text(text: str, opaque: dict[str, str], where: str) -> Json:
    citations = opaque.get("citations") or "[]"
    annotations = raw_json(citations, f"{where}.opaque.citations")
    return {"type": "output_text", "text": text, "annotations": annotations}


def _image(part: requests.ImagePart, quirks: Quirks) -> Json:
    assert not isinstance(part.source, requests.BlobSource)  # conversation() rejects these
    if isinstance(part.source, requests.FileSource):
        source: Json = {"file_id": part.source.file_id}
    else:
        source = {"image_url": data_url(part.source)}
    payload: Json = {"type": "input_image", "detail": part.detail or "auto", **source}
    return with_own(payload | _cache(part.cache, quirks), part.extra, "openai-responses")


def _document(part: requests.DocumentPart, quirks: Quirks) -> Json:
    source = part.source
    assert not isinstance(source, requests.BlobSource)
    payload: Json = {"type": "input_file"}
    if isinstance(source, requests.UrlSource):
        payload["file_url"] = source.url
    elif isinstance(source, requests.FileSource):
        payload["file_id"] = source.file_id
    else:
        payload |= {"filename": part.title or "document", "file_data": data_url(source)}
    return with_own(payload | _cache(part.cache, quirks), part.extra, "openai-responses")


def _cache(mark: requests.Cache, quirks: Quirks) -> Json:
    return {"prompt_cache_breakpoint": {"mode": "explicit"}} if mark and quirks.cache_marks else {}


def _fields(opaque: dict[str, str], where: str) -> Json:
    """Additional fields of an item. Raises RequestInvalid."""
    given = opaque.get("fields")
    if not given:
        return {}
    try:
        return dict(fields.decode(given))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise RequestInvalid(f"{where}.opaque.fields", "not a JSON object") from None


def _further(opaque: dict[str, str], where: str) -> Json:
    """Additional fields of an item, but those that make it what it is: clients send these data back. Raises
    RequestInvalid.
    """
    return {name: value for name, value in _fields(opaque, where).items() if name not in _OF_ITEM}


def _item_id(opaque: dict[str, str], kind: str) -> str | None:
    """The provider's id of the item, if the API accepts it. Other ids come from vendors that change them."""
    given = opaque.get("item_id", "")
    return given if given.startswith(f"{kind}_") and _ITEM_ID.fullmatch(given) else None


def _fitted(tool_id: str) -> str:
    return fitted_id(tool_id, _TOOL_ID, _MAX_TOOL_ID)
