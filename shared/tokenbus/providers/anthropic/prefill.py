"""Prefill mode: a Messages request that ends in an assistant message for the model to continue."""

from __future__ import annotations

import msgspec

from tokenbus.events.requests import Generate, Message
from tokenbus.providers.anthropic.request import built, content_of, limits
from tokenbus.providers.api import Built, Quirks
from tokenbus.providers.request.participants import end_of_turn, provider_stops
from tokenbus.providers.request.transcript import opening_of, system_text, transcribe


def build_prefill(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """Build the HTTP call for the next turn. Raises RequestInvalid, naming the field.

    Thinking is written into the text, so the API's own thinking options are not set. Trailing whitespace is removed
    because the API rejects it.
    """
    token = end_of_turn(request, quirks)
    transcript = transcribe(request, history, token)
    messages: list[dict[str, object]] = [{"role": "user", "content": content_of(opening_of(request, transcript))}]
    messages.append({"role": "assistant", "content": transcript.text.rstrip()})
    body: dict[str, object] = {"model": request.model, "messages": messages, "stream": request.stream}
    if system := system_text(request):
        body["system"] = system
    stop = provider_stops(request, token, quirks.max_stop_strings, blanks=False)
    body |= limits(msgspec.structs.replace(request, thinking=None, stop=stop), quirks)
    return built(body, request, history, transcript.notes, quirks)
