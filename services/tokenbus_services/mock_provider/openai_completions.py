"""OpenAI's Completions API, which continues a text; still offered by vLLM and others.

Source: "Completions" of the OpenAI API reference; `stop_reason` is vLLM's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider import openai_chat
from tokenbus_services.mock_provider.openai_chat import FINISH_REASONS, Request, data_event, usage_object
from tokenbus_services.mock_provider.provider_api import CREATED
from tokenbus_services.mock_provider.reply import Reply
from tokenbus_services.mock_provider.request import Asked, RequestOptions, Said, read_as

_encode = msgspec.json.Encoder().encode


class _Request(Request, kw_only=True):
    prompt: str


class Completions:
    """The Completions API."""

    name: ApiName = "openai-chat"
    route = re.compile(r"/v1/completions")

    def hear(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> RequestOptions:
        request = read_as(body, _Request)
        return RequestOptions(
            model=request.model,
            stream=bool(request.stream),
            history="prompt",
            said=[(Said(by="model", text=request.prompt),)],
            stops=request.stops,
            written=True,
        )

    def error(self, status: int, message: str) -> bytes:
        return openai_chat.dialect.error(status, message)

    def error_event(self, status: int, message: str) -> bytes:
        return openai_chat.dialect.error_event(status, message)

    def stream(self, reply: Reply, asked: Asked) -> bytes:
        events = [data_event(_answer(asked, piece)) for piece in reply.pieces(reply.text)]
        events.append(data_event(_answer(asked, "", reply)))
        if read_as(asked.body, _Request).with_usage:
            events.append(data_event({**_head(asked), "choices": [], "usage": usage_object(reply)}))
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def body(self, reply: Reply, asked: Asked) -> bytes:
        return _encode({**_answer(asked, reply.text, reply), "usage": usage_object(reply)})


dialect = Completions()


def _answer(asked: Asked, text: str, ended: Reply | None = None) -> dict[str, object]:
    """The text or a piece of it; ``ended``: include the finish reason."""
    choice: dict[str, object] = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    if ended:
        choice["finish_reason"] = FINISH_REASONS[ended.ending]
        choice["stop_reason"] = ended.stop_string or None
    return {**_head(asked), "choices": [choice]}


def _head(asked: Asked) -> dict[str, object]:
    return {"id": f"cmpl-{asked.key[:28]}", "object": "text_completion", "created": CREATED, "model": asked.model}
