"""The input of a response as a list of items, as `GET /v1/responses/{id}/input_items` has it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenbus.events import requests
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.fields import is_whole
from tokenbus_services.gateway.surfaces.openai_responses.items import Carried, field_of, sealed

MAX_ITEMS, DEFAULT_ITEMS = 100, 20

Json = dict[str, Any]


def listed(items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """One page of the items. Raises Refusal."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "must be 'asc' or 'desc'")
    limit = query.get("limit", str(DEFAULT_ITEMS))
    if not (is_whole(limit) and 1 <= int(limit) <= MAX_ITEMS):
        raise invalid("limit", f"must be a whole number from 1 to {MAX_ITEMS}")
    if "include" in query or "include[]" in query:
        raise unsupported("include", "'include' is not supported by this gateway")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after := query.get("after"):
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise invalid("after", "no item of this response has this id")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }


def items_of(run: str, messages: Sequence[requests.Message]) -> list[Json]:
    items: list[Json] = []
    for message in messages:
        content = [requests.TextPart(text=message.content)] if isinstance(message.content, str) else message.content
        items += _items(message.role, content)
    return [{"id": f"{_PREFIX.get(item['type'], 'msg')}_{run}_in{n}", **item} for n, item in enumerate(items)]


_PREFIX = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _items(role: str, parts: Sequence[requests.ContentPart]) -> list[Json]:
    items: list[Json] = []
    for part in parts:
        match part:
            case requests.ThinkingPart():
                items.append(_reasoning(part))
            case requests.ToolCallPart():
                call = {"call_id": part.tool_id, "name": part.tool_name, "arguments": part.arguments}
                items.append({"type": "function_call", **call, "status": "completed", **field_of(_carried(part))})
            case requests.ToolResultPart():
                output = part.content if isinstance(part.content, str) else [_content(p, role) for p in part.content]
                item = {"call_id": part.tool_id, "output": output, "status": "completed"}
                items.append({"type": "function_call_output", **item})
            case requests.TextPart() | requests.ImagePart() | requests.DocumentPart():
                last: Json = items[-1] if items else {}
                if last.get("type") != "message":
                    last = {"type": "message", "role": role, "status": "completed", "content": []}
                    items.append(last)
                cast("list[Json]", last["content"]).append(_content(part, role))
            case _:  # an item of the provider's own, which no client sent here
                pass
    return items


def _reasoning(part: requests.ThinkingPart) -> Json:
    carried = _carried(part)
    return {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": part.text}] if part.text else [],
        **({"encrypted_content": sealed(carried)} if carried else {}),
    }


def _carried(part: requests.ThinkingPart | requests.ToolCallPart) -> Carried | None:
    signature = part.signature if isinstance(part, requests.ThinkingPart) else None
    if not (signature or part.opaque or part.opaque_blobs):
        return None
    return Carried(signature=signature, opaque=part.opaque, opaque_blobs=part.opaque_blobs)


def _content(part: requests.TextPart | requests.ImagePart | requests.DocumentPart, role: str) -> Json:
    match part:
        case requests.TextPart() if role == "assistant":
            return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
        case requests.TextPart():
            return {"type": "input_text", "text": part.text}
        case requests.ImagePart():
            return {"type": "input_image", "detail": "auto", **_source(part.source, "image_url", "image_url")}
        case requests.DocumentPart():
            named = {"filename": part.title} if part.title else {}
            return {"type": "input_file", **named, **_source(part.source, "file_url", "file_data")}


def _source(source: requests.Source, url_field: str, data_field: str) -> Json:
    match source:
        case requests.UrlSource():
            return {url_field: source.url}
        case requests.Base64Source():
            return {data_field: f"data:{source.media_type};base64,{source.data}"}
        case requests.FileSource():
            return {"file_id": source.file_id}
        case _:  # a blob, of a request that came over the bus
            return {"tokenbus": {"blob_id": source.blob_id, "media_type": source.media_type}}
