"""What a request may cost at most, as a budget reserves it before the run begins. Pure.

Input counts a token for each byte of text, which no tokenizer exceeds, and a fixed number for each medium. Output
counts `max_tokens`, or what the price says, and the images that the model may make. Attempts that fail cost little, and
are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tokenbus.events.requests import Base64Source, DocumentPart, FileSource, Generate, ImagePart, ToolResultPart
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.callers import ForwardedCall
from tokenbus_services.pricing import BYTES_PER_TOKEN, PriceTable

IMAGE_TOKENS = 5_000
DOCUMENT_TOKENS = 100_000
"""Of a document that is no text."""
MADE_IMAGE_TOKENS = 10_000
"""More than any model needs for an image that it makes."""
MESSAGE_TOKENS = 64
"""What a provider adds to each message, and to the request."""


_ELSEWHERE = FileSource(file_id="")


def most_cost_nano(request: Generate, prices: PriceTable, *, bus_runs_tools: bool) -> int:
    """The cost of the request's calls at its dearest provider, in billionths of the currency; 0 without prices.

    ``bus_runs_tools``: results of tools lead to further calls, up to `max_tool_depth`.
    """
    given = _input_tokens(request)
    calls = 1 + request.max_tool_depth if bus_runs_tools else 1
    choices = [(request.provider, request.model), *((one.provider, one.model) for one in request.fallback or ())]
    costs = [0.0]
    for provider, model in choices:
        name = prices.name_for([f"{provider}/{model}"])
        *inputs, output = prices.nano_per_token(name)
        costs.append(given * max(inputs) + _output_tokens(request, prices.max_output(name)) * output)
    return calls * round(max(costs))


def most_cost_of_call(call: ForwardedCall, prices: PriceTable) -> int:
    """The cost of a request that is no run, in billionths of the currency; 0 without a price."""
    name = prices.name_for([f"{call.provider}/{call.model}"])
    *inputs, output = prices.nano_per_token(name)
    written = prices.max_output(name) if call.has_output else 0
    return round(call.input_tokens * max(inputs) + written * output)


def estimated_use(call: ForwardedCall, prices: PriceTable) -> Usage:
    """What a call counts as whose answer says nothing of it, or was cut."""
    if not call.is_metered:
        return Usage()
    written = prices.max_output(prices.name_for([f"{call.provider}/{call.model}"])) if call.has_output else 0
    return Usage(input=-(-call.input_tokens // BYTES_PER_TOKEN), output=written)


def _output_tokens(request: Generate, unbounded: int) -> int:
    images = request.images.count * MADE_IMAGE_TOKENS if request.images else 0
    if request.max_tokens is not None:
        return request.max_tokens + images
    return max(images, unbounded) + ((request.thinking.budget_tokens or 0) if request.thinking else 0)


def _input_tokens(request: Generate) -> int:
    extras = (request.extra, *(each.extra for each in request.fallback or ()))
    texts: list[Any] = [request.system, request.tools, request.output_schema, request.prefill]
    texts.append(max(extras, key=_size))
    media = 0
    for message in request.messages:
        texts += (message.participant, message.extra)
        for part in _parts(message.content):
            if isinstance(part, ImagePart | DocumentPart):
                media += _medium_tokens(part)
                texts.append(msgspec.structs.replace(part, source=_ELSEWHERE))
            else:
                texts.append(part)
    return _size(texts) + media + MESSAGE_TOKENS * (1 + len(request.messages))


def _medium_tokens(part: ImagePart | DocumentPart) -> int:
    if isinstance(part, ImagePart):
        return IMAGE_TOKENS
    source = part.source
    if isinstance(source, Base64Source) and source.media_type.startswith("text/"):
        return max(DOCUMENT_TOKENS, len(source.data) // 4 * 3)
    return DOCUMENT_TOKENS


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))


def _parts(content: Any) -> Iterator[Any]:
    """Texts and parts, those inside tool results too."""
    for part in [content] if isinstance(content, str) else content:
        if isinstance(part, ToolResultPart):
            yield from (part.tool_name, part.extra)
            yield from _parts(part.content)
        else:
            yield part
