"""Paths of the provider APIs that answer with no turn of a conversation: embeddings, moderations, counts of tokens.

What they answer depends on the request alone. A script named by the model adds its faults and its delivery, and a
`Wire` with a body replaces the answer. Sources: the API references of OpenAI, Anthropic and Gemini.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, cast

import msgspec

from tokenbus_services.mock_provider.apis import anthropic, gemini, openai_chat
from tokenbus_services.mock_provider.apis.provider_api import CREATED, MockApi
from tokenbus_services.mock_provider.request import HttpError
from tokenbus_services.mock_provider.request_log import HttpRequest

DIMENSIONS = 4
Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class OtherCall(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one call, before its faults."""

    mock_api: MockApi
    body: bytes
    model: str | None = None
    """Its script, if it names one."""
    content_type: str = "application/json"


class _Path(msgspec.Struct, frozen=True):
    mock_api: MockApi
    route: re.Pattern[str]
    answer: Callable[[Json, str], Json]
    """Of the body and its model."""


def answer(http_request: HttpRequest) -> OtherCall | None:
    """The answer of another path; None for a path that is none of them. Raises Rejected."""
    for path in _PATHS:
        if found := path.route.fullmatch(http_request.path):
            break
    else:
        return None
    if http_request.method != "POST":
        raise HttpError(405, f"{http_request.path} takes POST, not {http_request.method}")
    try:
        body = msgspec.json.decode(http_request.body, type=Json)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise HttpError(400, f"the body is not a JSON object: {e}") from None
    model: str | None = found.groupdict().get("model") or body.get("model")
    return OtherCall(mock_api=path.mock_api, body=_encode(path.answer(body, model or "")), model=model)


def _words(value: object) -> int:
    """Tokens of a value: its words."""
    match value:
        case str():
            return len(value.split())
        case dict():
            return sum(map(_words, cast("Json", value).values()))
        case list():
            return sum(map(_words, cast("list[object]", value)))
        case _:
            return 0


def _several(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _vector(value: object) -> list[float]:
    return [byte / 256 for byte in blake2b(_encode(value), digest_size=DIMENSIONS).digest()]


def _embeddings(body: Json, model: str) -> Json:
    given = body.get("input")
    if not given:
        raise HttpError(400, "input: is missing")
    inputs = _several(given)
    data = [{"object": "embedding", "index": i, "embedding": _vector(each)} for i, each in enumerate(inputs)]
    tokens = _words(inputs)
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _moderation(flagged: bool) -> Json:
    return {"flagged": flagged, "categories": {}, "category_scores": {}, "category_applied_input_types": {}}


def _moderations(body: Json, model: str) -> Json:
    found = [_moderation("harm" in str(each)) for each in _several(body.get("input"))]
    return {"id": "modr-1", "model": model or "omni-moderation-latest", "results": found}


def _compact(body: Json, model: str) -> Json:
    given, made = _words(body.get("input")), 2
    item = {"type": "compaction", "id": "cmp_1", "encrypted_content": "short"}
    usage = {"input_tokens": given, "output_tokens": made, "total_tokens": given + made}
    details: Json = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    details["output_tokens_details"] = {"reasoning_tokens": 0}
    head = {"id": "resp_1", "object": "response.compaction", "created_at": CREATED}
    return {**head, "output": [item], "usage": {**usage, **details}}


def _gemini_model(body: Mapping[str, Any], model: str) -> None:
    named = body.get("model", f"models/{model}")
    if named != f"models/{model}":
        raise HttpError(400, f"model: {named!r} is not that of the path")


def _embed_content(body: Json, model: str) -> Json:
    _gemini_model(body, model)
    return {"embedding": {"values": _vector(body.get("content"))}}


def _batch_embed(body: Json, model: str) -> Json:
    requests: list[Json] = body.get("requests", [])
    for request in requests:
        _gemini_model(request, model)
    return {"embeddings": [{"values": _vector(request.get("content"))} for request in requests]}


def _count_gemini(body: Json, model: str) -> Json:
    _gemini_model(body.get("generateContentRequest", {}), model)
    return {"totalTokens": _words(body)}


def _path(mock_api: MockApi, route: str, answer: Callable[[Json, str], Json]) -> _Path:
    return _Path(mock_api, re.compile(route), answer)


_PATHS = (
    _path(openai_chat.mock_api, r"/v1/embeddings", _embeddings),
    _path(openai_chat.mock_api, r"/v1/moderations", _moderations),
    _path(openai_chat.mock_api, r"/v1/responses/compact", _compact),
    _path(
        openai_chat.mock_api,
        r"/v1/responses/input_tokens",
        lambda body, _: {"object": "response.input_tokens", "input_tokens": _words(body.get("input"))},
    ),
    _path(
        anthropic.mock_api, r"/v1/messages/count_tokens", lambda body, _: {"input_tokens": _words(body.get("messages"))}
    ),
    _path(gemini.mock_api, r"/v1beta/models/(?P<model>[^/:]+):embedContent", _embed_content),
    _path(gemini.mock_api, r"/v1beta/models/(?P<model>[^/:]+):batchEmbedContents", _batch_embed),
    _path(gemini.mock_api, r"/v1beta/models/(?P<model>[^/:]+):countTokens", _count_gemini),
)
