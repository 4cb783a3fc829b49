"""A Messages request whose last message is the assistant's, which the model goes on with (prefill mode)."""

from __future__ import annotations

import msgspec

from tokenbus.events.requests import Generate, Message
from tokenbus.providers.anthropic.request import built, content_of, limits
from tokenbus.providers.api import Built, Quirks
from tokenbus.providers.request.participants import end_of_turn, provider_stops
from tokenbus.providers.request.transcript import opening_of, system_text, transcribe


def build_prefill(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """The HTTP call for the next turn. Raises RequestInvalid, naming the field.

    Thinking is written in the text, so the API's own is left alone. A text that ends in blank space is refused.
    """
    token = end_of_turn(request, quirks)
    said = transcribe(request, history, token)
    messages: list[dict[str, object]] = [{"role": "user", "content": content_of(opening_of(request, said))}]
    messages.append({"role": "assistant", "content": said.text.rstrip()})
    body: dict[str, object] = {"model": request.model, "messages": messages, "stream": request.stream}
    if system := system_text(request):
        body["system"] = system
    stop = provider_stops(request, token, quirks.max_stop_strings, blanks=False)
    body |= limits(msgspec.structs.replace(request, thinking=None, stop=stop), quirks)
    return built(body, request, history, said.notes)
