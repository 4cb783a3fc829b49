"""Builds a Responses request: https://platform.openai.com/docs/api-reference/responses/create.

Responses are not stored, except jobs in the background, so reasoning is returned and sent back encrypted. Models that
do not reason reject the option to include it; `Quirks` lists them. The API has no field for participant names, for a
thinking budget (it becomes an effort), or for a failed tool (the model reads it from the result).
"""

from __future__ import annotations

import msgspec

from tokenbus.events.quirks import begins_with
from tokenbus.events.requests import Generate, Message, TextPart, Tool
from tokenbus.providers.api import Built, HttpCall, Quirks
from tokenbus.providers.openai_responses.input import Input, text_part
from tokenbus.providers.openai_responses.jobs import jobs
from tokenbus.providers.request.build import (
    accepted_stops,
    chosen_tool,
    effort_of,
    named_schema,
    schema_of,
    with_extra,
    with_own,
)
from tokenbus.providers.request.conversation import Takes, conversation
from tokenbus.providers.request.images import MASK, image_fields, image_options, image_reference

ENCRYPTED_REASONING = "reasoning.encrypted_content"


def build(request: Generate, history: list[Message], quirks: Quirks) -> Built:
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
    elif system := _instructions(request.system):
        body["instructions"] = system
    known = 0
    for message in spoken:
        payload.add(message)
        if in_conversation and message.role == "assistant" and message.where.startswith("history"):
            known = len(payload.items)
    body["input"] = payload.items[known:]
    body |= _limits(request, quirks) | _tools(request)
    encoded = msgspec.json.encode(with_extra(body, request.extra, lists=("tools", "include")))
    headers = {"content-type": "application/json"}
    return Built(call=HttpCall(path="/responses", body=encoded, headers=headers), notes=notes)


def _instructions(system: str | list[TextPart] | None) -> str:
    if isinstance(system, list):
        return "\n\n".join(part.text for part in system if part.text)
    return system or ""


def _limits(request: Generate, quirks: Quirks) -> dict[str, object]:
    """Output limit and format, reasoning and sampling. The API itself has no stop strings."""
    payload: dict[str, object] = {}
    if request.max_tokens is not None:
        payload["max_output_tokens"] = request.max_tokens
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
    if request.temperature is not None:
        payload["temperature"] = request.temperature
    if request.top_p is not None:
        payload["top_p"] = request.top_p
    if request.user_id is not None:
        payload["safety_identifier"] = request.user_id
    if stop := accepted_stops(request.stop, quirks.max_stop_strings or 0):
        payload["stop"] = stop
    return payload


def _tools(request: Generate) -> dict[str, object]:
    payload: dict[str, object] = {}
    tools = [_tool(tool) for tool in request.tools]
    if images := image_options(request, "size", "quality", "format", "background", "model", "previews", "mask"):
        mask = {"input_image_mask": image_reference(MASK, images.mask)} if images.mask else {}
        tools.append({"type": "image_generation"} | image_fields(images) | mask)
    if tools:
        payload["tools"] = tools
    return payload | chosen_tool(request, lambda kind, name: {"type": kind, "name": name})


def _tool(tool: Tool) -> dict[str, object]:
    described: dict[str, object] = {"description": tool.description} if tool.description else {}
    if tool.format:
        custom = {"type": "custom", "name": tool.name, "format": msgspec.to_builtins(tool.format)}
        return with_own(custom | described, tool.extra, "openai-responses")
    # Strict mode is the API's default and supports only a subset of JSON Schema.
    payload: dict[str, object] = {"type": "function", "name": tool.name, "parameters": schema_of(tool.parameters)}
    return with_own(payload | {"strict": bool(tool.strict)} | described, tool.extra, "openai-responses")
