"""Prefill mode: the conversation as one text, ending in a model turn that the model continues.

Newer models reject a request that ends in their own turn (unless listed in `Quirks.models_continuing`). They get the
whole text as a user message, which ends in the model's name.
"""

from __future__ import annotations

import msgspec

from tokenbus.events.quirks import begins_with
from tokenbus.events.requests import Generate, Message, TextPart
from tokenbus.providers.api import Built, Quirks
from tokenbus.providers.gemini.contents import Contents
from tokenbus.providers.gemini.request import built, generation_of, max_stops
from tokenbus.providers.request.conversation import Spoken
from tokenbus.providers.request.participants import end_of_turn, options_of, provider_stops
from tokenbus.providers.request.transcript import opening_of, system_text, transcribe

END_OF_TURN = "<|eot|>"
"""The token that ends a message."""


def build_prefill(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """Build the HTTP call for the next turn. Raises RequestInvalid, naming the field.

    Thinking is written into the text, so the API's own thinking options are not set.
    """
    token = end_of_turn(request, quirks, END_OF_TURN)
    transcript = transcribe(request, history, token)
    continues = begins_with(request.model, quirks.models_continuing)
    contents = Contents(sign_calls=False)
    if continues or transcript.before or options_of(request).first_user_message is not None:
        contents.add(opening_of(request, transcript))
    contents.add(Spoken("assistant" if continues else "user", [TextPart(text=transcript.text)], "messages"))
    body: dict[str, object] = {"contents": contents.turns}
    if system := system_text(request):
        body["systemInstruction"] = {"parts": [{"text": system}]}
    stop = provider_stops(request, token, max_stops(quirks))
    adapted = msgspec.structs.replace(request, thinking=None, stop=stop)
    if generation := generation_of(adapted, quirks):
        body["generationConfig"] = generation
    return built(body, request, transcript.notes)
