"""The conversation as one text (prefill mode), for vendors that continue it: by their completions, or by a last message
of the assistant (`Quirks.continues`)."""

from __future__ import annotations

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Generate, Message
from tokenbus.providers.api import Built, Quirks
from tokenbus.providers.openai_chat.request import ChatMessage, built, limits, most_stops, user_content
from tokenbus.providers.request.participants import end_of_turn, provider_stops
from tokenbus.providers.request.transcript import opening_of, system_text, transcribe


def build_prefill(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """The HTTP call for the next turn. Raises RequestInvalid, naming the field. Thinking is written in the text."""
    if not quirks.continues:
        raise RequestInvalid("mode", "this provider continues no text; its quirk `continues` says how one does")
    token = end_of_turn(request, quirks)
    said = transcribe(request, history, token)
    system = system_text(request)
    body: dict[str, object] = {"model": request.model, "stream": request.stream}
    path = "/completions"
    if quirks.continues == "completions":
        if said.before:
            raise RequestInvalid("messages", "this provider's completions take text alone, no images or documents")
        body["prompt"] = f"{system}\n\n{said.text}" if system else said.text
        quirks = msgspec.structs.replace(quirks, max_tokens_field="max_tokens")  # the API has no other
    else:
        path = "/chat/completions"
        messages: list[ChatMessage] = [{"role": quirks.system_role, "content": system}] if system else []
        messages.append({"role": "user", "content": user_content(opening_of(request, said), quirks)})
        messages.append({"role": "assistant", "content": said.text.rstrip(), **quirks.continued})
        body |= {"messages": messages, **quirks.continuing}
    if request.stream and quirks.stream_usage:
        body["stream_options"] = {"include_usage": True}
    stop = provider_stops(request, token, most_stops(quirks))
    body |= limits(msgspec.structs.replace(request, thinking=None, stop=stop), quirks)
    return built(path, body, request, said.notes)
