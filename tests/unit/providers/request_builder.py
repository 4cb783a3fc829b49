"""Builds the requests of one provider from a few fields, and reads their bodies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import Quirks
from tokenbus.events.requests import Generate, Message, Tool
from tokenbus.providers.api import Built, Provider

HI = Message(role="user", content="Hi")
WEATHER = Tool(name="weather", description="The weather.", parameters={"type": "object", "properties": {"city": {}}})


class RequestBuilder:
    """Requests to one provider. ``model``: that of a request which names none."""

    def __init__(self, provider: Provider, *, model: str) -> None:
        self._provider = provider
        self._model = model

    def build(self, request: Generate, history: list[Message] | None = None, **quirks: Any) -> Built:
        return self._provider.build(request, history or [], Quirks(**quirks))

    def body(
        self,
        *messages: Message,
        history: list[Message] | None = None,
        quirks: dict[str, Any] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """The body for these messages (else one) and fields."""
        request = Generate(provider="p", **{"model": self._model, "messages": list(messages) or [HI], **fields})
        return msgspec.json.decode(self.build(request, history, **(quirks or {})).call.body)

    def refused(self, *messages: Message, **fields: Any) -> str:
        with pytest.raises(RequestInvalid) as error:
            self.body(*messages, **fields)
        return error.value.where
