"""Prefill mode: the conversation as one text, for vendors that can continue it, either through their completions
endpoint or from a final assistant message (`Quirks.continues`).
"""

from __future__ import annotations

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Generate, Message
from tokenbus.providers.api import Built, Quirks
from tokenbus.providers.openai_chat.request import ChatMessage, built, limits, max_stops, user_content
from tokenbus.providers.request.participants import end_of_turn, provider_stops
from tokenbus.providers.request.transcript import opening_of, system_text, transcribe


def build_prefill(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """Build the HTTP call for the next turn. Raises RequestInvalid, naming the field. Thinking is written into the
    text.
    """
    if not quirks.continues:
        raise RequestInvalid("mode", "this provider cannot continue a text (its quirk `continues` is not set)")
    token = end_of_turn(request, quirks)
    transcript = transcribe(request, history, token)
    system = system_text(request)
    body: dict[str, object] = {"model": request.model, "stream": request.stream}
    path = "/completions"
    if quirks.continues == "completions":
        if transcript.before:
            raise RequestInvalid("messages", "this provider's completions accept only text, not images or documents")
        body["prompt"] = f"{system}\n\n{transcript.text}" if system else transcript.text
        quirks = msgspec.structs.replace(quirks, max_tokens_field="max_tokens")  # this endpoint has no other field
    else:
        path = "/chat/completions"
        messages: list[ChatMessage] = [{"role": quirks.system_role, "content": system}] if system else []
        messages.append({"role": "user", "content": user_content(opening_of(request, transcript), quirks)})
        messages.append({"role": "assistant", "content": transcript.text.rstrip(), **quirks.continued})
        body |= {"messages": messages, **quirks.continuing}
    if request.stream and quirks.stream_usage:
        body["stream_options"] = {"include_usage": True}
    stop = provider_stops(request, token, max_stops(quirks))
    body |= limits(msgspec.structs.replace(request, thinking=None, stop=stop), quirks)
    return built(path, body, request, transcript.notes)
