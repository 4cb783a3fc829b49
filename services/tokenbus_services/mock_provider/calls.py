"""Paths of the provider APIs that answer with no turn of a conversation: embeddings, speech, counts, batches.

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
from tokenbus_services.mock_provider.request import MULTIPART, HttpError, read_form
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
    answer: Callable[[Json, str], Json | bytes]
    """Of the body and its model, or of an empty body and the id in the path. Bytes: no JSON."""
    method: str = "POST"
    has_body: bool = True
    content_type: str = "application/json"


def answer(http_request: HttpRequest) -> OtherCall | None:
    """The answer of another path; None if the path is unknown. Raises Rejected."""
    matches = [(path, found) for path in _PATHS if (found := path.route.fullmatch(http_request.path))]
    if not matches:
        return None
    match = next((match for match in matches if match[0].method == http_request.method), None)
    if match is None:
        raise HttpError(405, f"{http_request.path} does not take {http_request.method}")
    path, found = match
    if not path.has_body:
        said = path.answer({}, found.groupdict().get("id", ""))
        return _call(path, said, None)
    body = _body(http_request)
    model: str | None = found.groupdict().get("model") or body.get("model")
    model = model and model.removeprefix("models/")
    return _call(path, path.answer(body, model or ""), model)


def _call(path: _Path, said: Json | bytes, model: str | None) -> OtherCall:
    body = said if isinstance(said, bytes) else _encode(said)
    return OtherCall(mock_api=path.mock_api, body=body, model=model, content_type=path.content_type)


def _body(http_request: HttpRequest) -> Json:
    content_type = http_request.headers.get("content-type", "")
    if content_type.startswith(MULTIPART):
        return read_form(content_type, http_request.body)
    try:
        return msgspec.json.decode(http_request.body, type=Json)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise HttpError(400, f"the body is not a JSON object: {e}") from None


def _words(value: object) -> int:
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


def _speech(body: Json, model: str) -> bytes:
    """A sound: bytes that are no text."""
    return bytes(range(256)) * len(body.get("input", ""))


def _transcription(body: Json, model: str) -> Json:
    sound: Any = body.get("file")
    if not isinstance(sound, dict):
        raise HttpError(400, "file: is missing")
    tokens = {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9}
    return {"text": blake2b(cast("Json", sound)["data"]).hexdigest(), "usage": {"type": "tokens", **tokens}}


def _batch(one: str, file: str) -> Json:
    head = {"id": one, "object": "batch", "endpoint": "/v1/embeddings", "completion_window": "24h"}
    files = {"input_file_id": file, "output_file_id": f"file-of-{one}"}
    return {**head, **files, "status": "completed", "created_at": CREATED}


def _new_batch(body: Json, model: str) -> Json:
    return _batch(f"batch_{_digest(body)}", body.get("input_file_id", ""))


def _message_batch(one: str) -> Json:
    at = "2026-01-01T00:00:00Z"
    counts = {"processing": 0, "succeeded": 1, "errored": 0, "canceled": 0, "expired": 0}
    head = {"id": one, "type": "message_batch", "processing_status": "ended", "request_counts": counts}
    url = f"https://api.anthropic.com/v1/messages/batches/{one}/results"
    times = {"created_at": at, "ended_at": at, "expires_at": at, "archived_at": None, "cancel_initiated_at": None}
    return {**head, **times, "results_url": url}


def _results(body: Json, one: str) -> bytes:
    return _encode({"custom_id": one, "result": {"type": "canceled"}}) + b"\n"


def _upload(one: str, status: str = "pending") -> Json:
    head = {"id": one, "object": "upload", "status": status, "created_at": CREATED, "expires_at": CREATED + 3600}
    return {**head, "bytes": 3, "filename": "a.jsonl", "purpose": "batch", "file": None}


def _completed(body: Json, one: str) -> Json:
    file = {"id": f"file-of-{one}", "object": "file", "bytes": 3, "created_at": CREATED, "filename": "a.jsonl"}
    return {**_upload(one, "completed"), "file": {**file, "purpose": "batch", "status": "processed"}}


def _part(body: Json, one: str) -> Json:
    sound: Any = body.get("data")
    digest = blake2b(cast("Json", sound)["data"], digest_size=8).hexdigest()
    return {"id": f"part_{digest}", "object": "upload.part", "created_at": CREATED, "upload_id": one}


def _store(body: Json, one: str) -> Json:
    """A store, a file in one, files that are added, or a list, as the client takes it."""
    head = {"id": one, "object": "vector_store", "created_at": CREATED, "status": "completed", "usage_bytes": 0}
    return {**head, "data": [], "has_more": False, "deleted": True}


def _cache(one: str, model: str = "models/text") -> Json:
    at = "2026-01-01T00:00:00Z"
    head = {"name": f"cachedContents/{one}", "model": model, "createTime": at, "updateTime": at, "expireTime": at}
    return {**head, "usageMetadata": {"totalTokenCount": 9}}


def _gemini_batch(one: str, model: str = "text") -> Json:
    output = {"responsesFile": f"files/out-{one}"}
    metadata = {
        "model": f"models/{model}",
        "state": "BATCH_STATE_SUCCEEDED",
        "output": output,
    }
    return {"name": f"batches/{one}", "metadata": metadata, "done": True}


def _new_gemini_batch(body: Json, model: str) -> Json:
    requests = body["batch"].get("inputConfig", {}).get("requests", {}).get("requests", [])
    for request in requests:
        _gemini_model(request["request"], model)
    return _gemini_batch(_digest(body), model)


def _path(mock_api: MockApi, route: str, answer: Callable[[Json, str], Json | bytes], **more: Any) -> _Path:
    return _Path(mock_api, re.compile(route), answer, **more)


def _digest(body: Json) -> str:
    return blake2b(_encode(body), digest_size=8).hexdigest()


_READS: Json = {"has_body": False, "method": "GET"}
_ACTS: Json = {"has_body": False}
_METHODS = ("GET", "POST", "PATCH", "DELETE")
_ONE_UPLOAD = r"/v1/uploads/(?P<id>[^/]+)"
_STORES = r"/v1/vector_stores"
_IN_STORES = _STORES + r"/(?:[^/]+/file(?:s|_batches)/)?(?P<id>[^/]+)(?:/(?:files|file_batches|search|content|cancel))?"
_CACHES = r"/v1beta/cachedContents"
_ONE_GEMINI_BATCH = r"/v1beta/batches/(?P<id>[^/:]+)"
_ONE_BATCH = r"/v1/messages/batches/(?P<id>[^/]+)"


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
    _path(openai_chat.mock_api, r"/v1/audio/speech", _speech, content_type="audio/mpeg"),
    _path(openai_chat.mock_api, r"/v1/audio/(?:transcriptions|translations)", _transcription),
    _path(openai_chat.mock_api, r"/v1/batches", _new_batch),
    _path(openai_chat.mock_api, r"/v1/batches/(?P<id>[^/]+)", lambda _, one: _batch(one, "file-in"), **_READS),
    _path(anthropic.mock_api, r"/v1/messages/batches", lambda body, model: _message_batch("msgbatch_1")),
    _path(anthropic.mock_api, _ONE_BATCH, lambda _, one: _message_batch(one), **_READS),
    _path(anthropic.mock_api, _ONE_BATCH + "/results", _results, **{**_READS, "content_type": "application/x-jsonl"}),
    _path(openai_chat.mock_api, r"/v1/models", lambda body, one: {"object": "list", "data": []}, **_READS),
    _path(gemini.mock_api, r"/v1beta/models/(?P<model>[^/:]+):embedContent", _embed_content),
    _path(gemini.mock_api, r"/v1beta/models/(?P<model>[^/:]+):batchEmbedContents", _batch_embed),
    _path(gemini.mock_api, r"/v1beta/models/(?P<model>[^/:]+):countTokens", _count_gemini),
    _path(gemini.mock_api, r"/v1beta/models/(?P<model>[^/:]+):batchGenerateContent", _new_gemini_batch),
    _path(gemini.mock_api, r"/v1beta/models/(?P<model>[^/:]+):asyncBatchEmbedContent", _new_gemini_batch),
    _path(gemini.mock_api, _ONE_GEMINI_BATCH, lambda _, one: _gemini_batch(one), **_READS),
    _path(gemini.mock_api, _ONE_GEMINI_BATCH, lambda _, one: {}, method="DELETE", has_body=False),
    _path(gemini.mock_api, _ONE_GEMINI_BATCH + ":cancel", lambda _, one: {}, **_ACTS),
    _path(gemini.mock_api, r"/v1beta/batches", lambda _, one: {"operations": []}, **_READS),
    _path(gemini.mock_api, _CACHES, lambda body, _: _cache(_digest(body), body["model"])),
    _path(gemini.mock_api, _CACHES, lambda _, one: {"cachedContents": []}, **_READS),
    *(
        _path(gemini.mock_api, _CACHES + r"/(?P<id>[^/]+)", lambda _, one: _cache(one), method=each, has_body=False)
        for each in _METHODS
    ),
    _path(openai_chat.mock_api, r"/v1/uploads", lambda body, _: _upload(f"upload_{_digest(body)}")),
    _path(openai_chat.mock_api, _ONE_UPLOAD + "/parts", _part),
    _path(openai_chat.mock_api, _ONE_UPLOAD + "/complete", lambda _, one: _completed({}, one), **_ACTS),
    _path(openai_chat.mock_api, _ONE_UPLOAD + "/cancel", lambda _, one: _upload(one, "cancelled"), **_ACTS),
    _path(openai_chat.mock_api, _STORES, lambda body, _: _store(body, f"vs_{_digest(body)}")),
    _path(openai_chat.mock_api, _STORES, _store, **_READS),
    *(_path(openai_chat.mock_api, _IN_STORES, _store, method=each, has_body=False) for each in _METHODS),
)
