"""Chat Completions as one body. Pure."""

from __future__ import annotations

import msgspec

from tokenbus.client.response import ResponseBuilder
from tokenbus.events.public import Cancelled, Completed, Incomplete, PublicEvent, RunEnd, RunFailedEvent
from tokenbus_services.gateway.problem import of_end
from tokenbus_services.gateway.surfaces.contract import Answer, GatewayNote, WholeAnswer
from tokenbus_services.gateway.surfaces.openai_chat.answer_fields import echo_of, finish_of, usage_object
from tokenbus_services.gateway.surfaces.openai_chat.errors import refusal


class WholeChat(WholeAnswer):
    """Collects one run."""

    def __init__(self, note: GatewayNote, run: str) -> None:
        self._note = note
        self._run = run
        self._echo = echo_of(note)
        self._builder = ResponseBuilder()

    def feed(self, event: PublicEvent) -> Answer | None:
        self._builder.add(event)
        if isinstance(event, Incomplete | RunFailedEvent | Cancelled):
            return refusal(of_end(event))
        if not isinstance(event, Completed):
            return None
        return Answer(status=200, body=msgspec.json.encode(self._completion(event)))

    def _completion(self, end: RunEnd) -> dict[str, object]:
        response = self._builder.response
        calls = [] if self._echo.bus_tools else [call for call in response.tool_calls if not call.cut]
        message: dict[str, object] = {"role": "assistant", "content": response.text, "refusal": None}
        if self._echo.reasoning and response.thinking:
            message["reasoning_content"] = response.thinking
        if calls:
            message["content"] = response.text or None
            message["tool_calls"] = [
                {
                    "id": call.tool_id or f"call_{call.block}",
                    "type": "function",
                    "function": {"name": call.tool_name or "", "arguments": call.arguments or "{}"},
                }
                for call in calls
            ]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_of(end.finish, calls=bool(calls)),
        }
        return {
            "id": f"chatcmpl-{self._run}",
            "object": "chat.completion",
            "created": self._note.created,
            "model": self._note.model,
            "choices": [choice],
            "usage": usage_object(end.usage),
        }
