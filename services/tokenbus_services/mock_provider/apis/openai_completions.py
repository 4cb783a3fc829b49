"""OpenAI's Completions API, which continues a text; still offered by vLLM and others.

Source: "Completions" of the OpenAI API reference; `stop_reason` is vLLM's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider.apis import openai_chat
from tokenbus_services.mock_provider.apis.openai_chat import FINISH_REASONS, Request, data_event, usage_object
from tokenbus_services.mock_provider.apis.provider_api import CREATED
from tokenbus_services.mock_provider.reply import Reply
from tokenbus_services.mock_provider.request import HistoryItem, ModelRequest, ParsedBody, decode_as

_encode = msgspec.json.Encoder().encode


class _Request(Request, kw_only=True):
    prompt: str


class MockCompletions:
    name: ApiName = "openai-chat"
    route = re.compile(r"/v1/completions")

    def parse(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ParsedBody:
        request = decode_as(body, _Request)
        return ParsedBody(
            model=request.model,
            stream=bool(request.stream),
            history_field="prompt",
            messages=[(HistoryItem(role="model", text=request.prompt),)],
            stop_strings=request.stops,
            is_transcript=True,
        )

    def error(self, status: int, message: str) -> bytes:
        return openai_chat.mock_api.error(status, message)

    def error_event(self, status: int, message: str) -> bytes:
        return openai_chat.mock_api.error_event(status, message)

    def stream(self, reply: Reply, request: ModelRequest) -> bytes:
        events = [data_event(_answer(request, piece)) for piece in reply.text_deltas(reply.text)]
        events.append(data_event(_answer(request, "", reply)))
        if decode_as(request.body, _Request).with_usage:
            events.append(data_event({**_head(request), "choices": [], "usage": usage_object(reply)}))
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def body(self, reply: Reply, request: ModelRequest) -> bytes:
        return _encode({**_answer(request, reply.text, reply), "usage": usage_object(reply)})


mock_api = MockCompletions()


def _answer(request: ModelRequest, text: str, ended: Reply | None = None) -> dict[str, object]:
    """The text or a piece of it; ``ended``: include the finish reason."""
    choice: dict[str, object] = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    if ended:
        choice["finish_reason"] = FINISH_REASONS[ended.finish_reason]
        choice["stop_reason"] = ended.stop_string or None
    return {**_head(request), "choices": [choice]}


def _head(request: ModelRequest) -> dict[str, object]:
    return {"id": f"cmpl-{request.key[:28]}", "object": "text_completion", "created": CREATED, "model": request.model}
