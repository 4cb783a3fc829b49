"""The conversation as one text (prefill mode), which ends in a turn of the model that it goes on with.

Newer models refuse a request that ends in a turn of their own (`Quirks.models_continuing`). They get the whole text as
the user's: it ends in the model's name, and they go on from there.
"""

from __future__ import annotations

import msgspec

from tokenbus.events.model_names import begins_with
from tokenbus.events.requests import Generate, Message, TextPart
from tokenbus.providers.api import Built, Quirks
from tokenbus.providers.gemini.contents import Contents
from tokenbus.providers.gemini.request import built, generation_of, most_stops
from tokenbus.providers.request.conversation import Spoken
from tokenbus.providers.request.participants import end_of_turn, options_of, provider_stops
from tokenbus.providers.request.transcript import opening_of, system_text, transcribe

END_OF_TURN = "<|eot|>"
"""The token that ends a message."""


def build_prefill(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """The HTTP call for the next turn. Raises RequestInvalid, naming the field.

    Thinking is written in the text, so the API's own is left alone.
    """
    token = end_of_turn(request, quirks, END_OF_TURN)
    said = transcribe(request, history, token)
    continues = begins_with(request.model, quirks.models_continuing)
    contents = Contents(sign_calls=False)
    if continues or said.before or options_of(request).first_user_message is not None:
        contents.add(opening_of(request, said))
    contents.add(Spoken("assistant" if continues else "user", [TextPart(text=said.text)], "messages"))
    body: dict[str, object] = {"contents": contents.said}
    if system := system_text(request):
        body["systemInstruction"] = {"parts": [{"text": system}]}
    stop = provider_stops(request, token, most_stops(quirks))
    asked = msgspec.structs.replace(request, thinking=None, stop=stop)
    if generation := generation_of(asked, quirks):
        body["generationConfig"] = generation
    return built(body, request, said.notes)
