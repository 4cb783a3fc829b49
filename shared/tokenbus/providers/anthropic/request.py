"""Builds a Messages API request: https://docs.anthropic.com/en/api/messages.

Tool results go into user messages, before other content. Adjacent messages of one role are merged. All system text goes
to `system`, except behind a user message for models that take it there.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenbus.errors import RequestInvalid
from tokenbus.events import requests
from tokenbus.events.quirks import begins_with
from tokenbus.providers.api import Built, Quirks
from tokenbus.providers.file_api import FileApi, FileCall, FileToUpload, Kind, ProviderFile, Upload, bounded_life
from tokenbus.providers.request.build import (
    BUDGETS,
    accepted_stops,
    budget_of,
    deep_merged,
    effort_note,
    effort_of,
    fitted_id,
    given,
    json_call,
    names_files,
    nearest_effort,
    needs_tools,
    schema_of,
    with_extra,
    with_own,
)
from tokenbus.providers.request.conversation import Spoken, Takes, conversation, own_extra, raw_json
from tokenbus.providers.request.multipart import File, form
from tokenbus.providers.response.json_decode import check_object, read

API_VERSION = "2023-06-01"
FILES_BETA = "files-api-2025-04-14"
MAX_FILE_BYTES = 500 * 2**20

_HOUR_S = 3_600
_IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif")


class _Metadata(msgspec.Struct):
    id: str
    expires_at: datetime | None = None


_metadata = msgspec.json.Decoder(_Metadata)


class AnthropicFiles:
    """Images and PDFs; text documents are sent inline. https://platform.claude.com/docs/en/build-with-claude/files.

    The beta header goes with uploads and with requests that name a file; the newest SDK no longer sends it but still
    knows it. A file lives until it is deleted or for `expires_in_seconds` (one hour to 90 days): a field of Anthropic's
    Python SDK 2.11 (`FileUploadParams`), not yet of the guide above.
    """

    max_bytes = MAX_FILE_BYTES

    def takes(self, kind: Kind, media_type: str) -> bool:
        return media_type in _IMAGES if kind == "image" else media_type == "application/pdf"

    def upload(self, file: FileToUpload, content: bytes, base_path: str) -> Upload:
        fields = {"expires_in_seconds": bounded_life(file.keep_s, _HOUR_S, 90 * 24 * _HOUR_S)}
        content_type, body = form(fields, [File("file", file.name, file.media_type, content)])
        headers = {"content-type": content_type, "anthropic-version": API_VERSION, "anthropic-beta": FILES_BETA}
        answer = yield FileCall(path=f"{base_path}/v1/files", headers=headers, body=body)
        made = read(_metadata, answer.body, "file")
        return ProviderFile(file_id=made.id, expires_at=made.expires_at.timestamp() if made.expires_at else None)


files: FileApi = AnthropicFiles()


MIN_BUDGET = 1024
BETAS = "anthropic_beta"
"""In `extra`: the names for the header `anthropic-beta`, as Bedrock has them in the body."""
EFFORTS: tuple[requests.Effort, ...] = ("low", "medium", "high", "xhigh", "max")

NO_MESSAGE = "The tool failed without a message."
"""The API rejects an error result without content."""
_TOOL_ID = re.compile(r"[A-Za-z0-9_-]+")
_MAX_TOOL_ID = 128
CONTAINER = "anthropic.container"
"""Name of the item with the container of an earlier answer, which is a field of the request."""
_Beta = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,100}$(?!\n)")]
_arguments = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Container(msgspec.Struct):
    id: str


_id = msgspec.json.Decoder(_Container)

Content = list[dict[str, object] | msgspec.Raw]


def build(request: requests.Generate, history: list[requests.Message], quirks: Quirks) -> Built:
    """Build the HTTP call for the next turn. Raises RequestInvalid, naming the field."""
    takes = Takes(
        api="anthropic",
        thinking=("signature", "redacted"),
        unique_ids=True,
        part_options=frozenset({"title", "citations", "context", "lifetime"}),
    )
    spoken, notes = conversation(request, history, takes)
    system = _text_blocks(request.system) if request.system else []
    turns: list[tuple[str, Content]] = []
    extras: list[dict[str, object]] = []
    takes_system = begins_with(request.model, quirks.models_with_system_messages)
    for i, message in enumerate(spoken):
        content = content_of(message)
        role = "user" if message.role == "tool" else message.role
        if role == "system" and not (takes_system and _may_stay(turns, spoken[i + 1 :])):
            if turns:
                notes += (f"{message.where}: system text was moved to the front, its only place for this model",)
            system += content
        elif content and turns and turns[-1][0] == role:
            turns[-1][1].extend(content)
            extras[-1] = deep_merged(extras[-1], message.extra)
        elif content:
            turns.append((role, content))
            extras.append(message.extra)
    if not turns:
        raise RequestInvalid("messages", "none of them has content that this provider accepts")
    messages = [
        deep_merged({"role": role, "content": content}, extra)
        for (role, content), extra in zip(turns, extras, strict=True)
    ]
    body: dict[str, object] = {"model": request.model, "messages": messages, "stream": request.stream}
    if container := _container(spoken):
        body["container"] = container
    if system:
        body["system"] = system
    body |= limits(request, quirks) | _tools(request)
    budgets = begins_with(request.model, quirks.models_with_budgets)
    notes += effort_note(request.thinking, BUDGETS if budgets else EFFORTS)
    if request.thinking and not request.thinking.wanted and begins_with(request.model, quirks.models_always_thinking):
        notes += ("thinking: this model cannot turn it off; its least effort, 'low', was asked for",)
    if _hides_thinking(request, quirks):
        notes += ("thinking.display: this model sends its thinking without text unless it is `summarized`",)
    if _lacks_its_thinking(turns, body):
        notes += ("thinking was turned off: the calls before the results were made without it or by another provider",)
        body |= limits(msgspec.structs.replace(request, thinking=requests.Thinking(enabled=False)), quirks)
    return built(body, request, history, notes, quirks)


def _container(spoken: list[Spoken]) -> str | None:
    """The id of the container in which the model's code last ran; None: there is none, or its data cannot be read."""
    for message in reversed(spoken):
        for part in message.parts:
            if isinstance(part, requests.ExtraPart) and part.name == CONTAINER:
                with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
                    return _id.decode(part.json).id
    return None


def _may_stay(turns: list[tuple[str, Content]], after: list[Spoken]) -> bool:
    """Whether system text may be a message here: after a user message, and last or followed by the assistant's."""
    following = next((message.role for message in after if message.role != "system"), "assistant")
    return bool(turns) and turns[-1][0] in ("user", "system") and following == "assistant"


def _hides_thinking(request: requests.Generate, quirks: Quirks) -> bool:
    """Whether the model thinks, and shows nothing of it because the request does not ask for that."""
    thinking = request.thinking
    wanted = thinking is not None and thinking.wanted and thinking.display is None
    return wanted and begins_with(request.model, quirks.models_omitting_thinking)


def _lacks_its_thinking(turns: list[tuple[str, Content]], body: dict[str, object]) -> bool:
    """Whether a thinking budget is set but the request ends in results of calls made without thinking.

    The API rejects that: https://platform.claude.com/docs/en/build-with-claude/extended-thinking, "Extended thinking
    with tool use". Models with adaptive thinking accept it.
    """
    thinking = body.get("thinking")
    if not (isinstance(thinking, dict) and "budget_tokens" in thinking) or len(turns) < 2:
        return False
    (_, payload), (_, answer) = turns[-2:]
    return _type(answer[0]) == "tool_result" and _type(payload[0]) not in ("thinking", "redacted_thinking")


def _type(block: dict[str, object] | msgspec.Raw) -> object:
    return block.get("type") if isinstance(block, dict) else None


def built(
    body: dict[str, object],
    request: requests.Generate,
    history: list[requests.Message],
    notes: tuple[str, ...],
    quirks: Quirks,
) -> Built:
    headers = {"anthropic-version": API_VERSION}
    extra = dict(request.extra or {})
    betas = _betas(extra.pop(BETAS, []))
    if names_files(request.messages) or names_files(history):
        betas.append(FILES_BETA)
    if betas and quirks.betas_in_body:
        body = {**body, BETAS: list(dict.fromkeys(betas))}
    elif betas:
        headers["anthropic-beta"] = ",".join(dict.fromkeys(betas))
    call = json_call("/v1/messages", with_extra(body, extra))
    return Built(call=msgspec.structs.replace(call, headers=call.headers | headers), notes=notes)


def _betas(given: object) -> list[str]:
    """The names in the extra field `anthropic_beta`, which the API has in a header. Raises RequestInvalid."""
    try:
        return msgspec.convert(given, list[_Beta])
    except msgspec.ValidationError as e:
        raise RequestInvalid(f"extra.{BETAS}", str(e)) from None


def limits(request: requests.Generate, quirks: Quirks) -> dict[str, object]:
    """Output limit and format, thinking, sampling and stop strings."""
    payload: dict[str, object] = {}
    output: dict[str, object] = {}
    thinking = request.thinking if request.thinking and request.thinking.wanted else None
    always = begins_with(request.model, quirks.models_always_thinking)
    budget = thinking.budget_tokens if thinking and not always else None
    if thinking and begins_with(request.model, quirks.models_with_budgets):
        budget = _within(request.max_tokens, budget_of(thinking)) if budget is None else budget
    payload["max_tokens"] = request.max_tokens or quirks.default_max_tokens + (budget or 0)
    if budget is not None and request.max_tokens is not None and budget >= request.max_tokens:
        raise RequestInvalid("thinking.budget_tokens", "must be less than max_tokens, which includes it")
    if thinking:
        # Models up to 4.5 take a budget; newer ones reject a budget and take an effort.
        mode: dict[str, object] = {"type": "enabled", "budget_tokens": budget} if budget else {"type": "adaptive"}
        payload["thinking"] = mode | ({"display": thinking.display} if thinking.display else {})
        effort = effort_of(thinking) if always else thinking.effort
        if effort and not begins_with(request.model, quirks.models_with_budgets):
            output["effort"] = nearest_effort(effort, EFFORTS)
    elif request.thinking and always:
        output["effort"] = "low"
    elif request.thinking:
        between = begins_with(request.model, quirks.models_thinking_between_tools)
        payload["thinking"] = {"type": "between_tools" if between else "disabled"}
    if request.output_schema:
        output["format"] = {"type": "json_schema", "schema": request.output_schema.schema}
    if output:
        payload["output_config"] = output
    return payload | given(
        {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "metadata": None if request.user_id is None else {"user_id": request.user_id},
            "stop_sequences": accepted_stops(request.stop, quirks.max_stop_strings, blanks=False) or None,
        }
    )


def _within(max_tokens: int | None, budget: int | None) -> int | None:
    """Limit a budget that tokenbus chose: at most half of the output, but not below the API's minimum."""
    return budget if budget is None or max_tokens is None else max(MIN_BUDGET, min(budget, max_tokens // 2))


def _tools(request: requests.Generate) -> dict[str, object]:
    payload: dict[str, Any] = {}
    if request.tools:
        payload["tools"] = [
            with_own(
                {"name": tool.name, "input_schema": schema_of(tool.parameters)}
                | ({"description": tool.description} if tool.description else {})
                | ({"strict": True} if tool.strict else {}),
                tool.extra,
                "anthropic",
            )
            for tool in request.tools
        ]
    choice = request.tool_choice
    if not needs_tools(request):
        return payload
    if choice is not None:
        named = isinstance(choice, requests.ToolChoice)
        payload["tool_choice"] = {"type": "tool", "name": choice.name} if named else {"type": choice}
    if request.parallel_tool_calls is False and choice != "none":
        payload["tool_choice"] = payload.get("tool_choice", {"type": "auto"}) | {"disable_parallel_tool_use": True}
    return payload


def content_of(message: Spoken) -> Content:
    content: Content = []
    for i, part in enumerate(message.parts):
        block = _block(part, f"{message.where}.content[{i}]")
        if block is not None:
            content.append(block)
    return content


def _block(part: requests.ContentPart, where: str) -> dict[str, object] | msgspec.Raw | None:
    """Build one content block; None for a part that this API cannot use (blank text, another provider's thinking)."""
    block = _plain_block(part, where)
    if isinstance(block, dict) and not isinstance(part, requests.ThinkingPart | requests.ExtraPart):
        return with_own(block, part.extra, "anthropic")
    return block


def _plain_block(part: requests.ContentPart, where: str) -> dict[str, object] | msgspec.Raw | None:
    match part:
        case requests.TextPart():
            return _text(part, where)
        case requests.ThinkingPart():
            return _thinking(part)
        case requests.ImagePart():
            return {"type": "image", "source": _source(part.source)} | _cache(part.cache)
        case requests.DocumentPart():
            return _document(part, where)
        case requests.ToolCallPart():
            return _tool_use(part, where)
        case requests.ToolResultPart():
            return _tool_result(part)
        case requests.ExtraPart():
            return None if part.name == CONTAINER else own_extra(part, "anthropic", where)


def _text(part: requests.TextPart, where: str) -> dict[str, object] | None:
    if not part.text.strip():
        return None  # rejected by the API, although its models write such blocks
    payload: dict[str, object] = {"type": "text", "text": part.text}
    if part.opaque and (citations := part.opaque.get("citations")):
        payload["citations"] = raw_json(citations, f"{where}.opaque.citations")
    return payload | _cache(part.cache)


def _text_blocks(text: str | list[requests.TextPart]) -> Content:
    parts = [requests.TextPart(text=text)] if isinstance(text, str) else text
    return [
        with_own(payload, part.extra, "anthropic")
        for i, part in enumerate(parts)
        if (payload := _text(part, f"system[{i}]"))
    ]


def _thinking(part: requests.ThinkingPart) -> dict[str, object] | None:
    opaque = part.opaque or {}
    if redacted := opaque.get("redacted"):
        return {"type": "redacted_thinking", "data": redacted}
    signature = part.signature or opaque.get("signature")
    return {"type": "thinking", "thinking": part.text, "signature": signature} if signature else None


def _tool_use(part: requests.ToolCallPart, where: str) -> dict[str, object]:
    payload: dict[str, object] = {"type": "tool_use", "id": _fitted(part.tool_id), "name": part.tool_name}
    try:
        check_object(part.arguments or "{}")
        payload["input"] = msgspec.Raw(part.arguments or "{}")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        # The API accepts only objects. The model sees what it wrote, next to the error result.
        payload["input"] = {"invalid_arguments": part.arguments}
    if part.opaque and (fields := part.opaque.get("fields")):
        at = f"{where}.opaque.fields"
        raw_json(fields, at)
        try:
            payload = {**_arguments.decode(fields), **payload}
        except msgspec.ValidationError:
            raise RequestInvalid(at, "not a JSON object") from None
    return payload


def _tool_result(part: requests.ToolResultPart) -> dict[str, object]:
    payload: dict[str, object] = {"type": "tool_result", "tool_use_id": _fitted(part.tool_id)}
    if isinstance(part.content, str):
        payload["content"] = part.content
    else:
        blocks = [_block(inner, "") for inner in part.content]
        payload["content"] = [block for block in blocks if block is not None]
    if part.is_error:
        payload["is_error"] = True
        payload["content"] = payload["content"] or NO_MESSAGE
    return payload | _cache(part.cache)


def _document(part: requests.DocumentPart, where: str) -> dict[str, object]:
    source = part.source
    payload: dict[str, object] = {"type": "document", "source": _source(source)}
    if isinstance(source, requests.Base64Source) and source.media_type.startswith("text/"):
        try:
            text = b64decode(source.data, validate=True).decode()
        except (Base64Error, UnicodeDecodeError):
            raise RequestInvalid(f"{where}.source.data", "not base64-encoded UTF-8 text") from None
        payload["source"] = {"type": "text", "media_type": "text/plain", "data": text}
    if part.title:
        payload["title"] = part.title
    if part.citations is not None:
        payload["citations"] = {"enabled": part.citations}
    if part.context:
        payload["context"] = part.context
    return payload | _cache(part.cache)


def _source(source: requests.Source) -> dict[str, object]:
    assert not isinstance(source, requests.BlobSource)  # conversation() rejects these
    if isinstance(source, requests.Base64Source):
        return {"type": "base64", "media_type": source.media_type, "data": source.data}
    if isinstance(source, requests.FileSource):
        return {"type": "file", "file_id": source.file_id}
    return {"type": "url", "url": source.url}


def _cache(mark: requests.Cache) -> dict[str, object]:
    lifetime = {"ttl": mark} if isinstance(mark, str) else {}
    return {"cache_control": {"type": "ephemeral", **lifetime}} if mark else {}


def _fitted(tool_id: str) -> str:
    return fitted_id(tool_id, _TOOL_ID, _MAX_TOOL_ID)
