"""Build an Images request: https://developers.openai.com/api/reference/resources/images/methods/generate.

The API takes one prompt and no conversation. Images to work from go to it as a form, which is not built here: the
Responses API takes them in its messages.
"""

from __future__ import annotations

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Generate, ImageOptions, Message, TextPart
from tokenbus.providers.api import Built, HttpCall, Quirks
from tokenbus.providers.building import with_extra
from tokenbus.providers.images import image_fields, image_options, prompt_of

_UNKNOWN = ("system", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "stop", "thinking", "output_schema")
"""Fields of a request that this API has no place for."""


def build(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """The HTTP call. Raises RequestInvalid, naming the field."""
    for name in _UNKNOWN:
        if getattr(request, name) not in (None, []):
            raise RequestInvalid(name, "the Images API takes a prompt and `images`, and nothing like this")
    body: dict[str, object] = {"model": request.model, "prompt": _prompt(request), "stream": request.stream}
    asked = image_options(request, "size", "quality", "format", "background", "count", "previews") or ImageOptions()
    body |= image_fields(asked)
    if asked.count > 1:
        body["n"] = asked.count
    encoded = msgspec.json.encode(with_extra(body, request.extra))
    headers = {"content-type": "application/json"}
    return Built(call=HttpCall(path="/images/generations", body=encoded, headers=headers))


def _prompt(request: Generate) -> str:
    """The text of the one message. Raises RequestInvalid."""
    [message, *more] = request.messages
    if more or message.role != "user":
        raise RequestInvalid("messages", "the Images API takes one message of the user, which is the prompt")
    for i, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if not isinstance(part, TextPart):
            raise RequestInvalid(f"messages[0].content[{i}]", "the Images API takes text; the Responses API takes more")
    if not (prompt := prompt_of(request)):
        raise RequestInvalid("messages[0].content", "the prompt is empty")
    return prompt
