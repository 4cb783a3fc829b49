"""What a request may cost at most, as a budget reserves it before the run begins. Pure.

Input counts a token for each byte of text, which no tokenizer exceeds, and a fixed number for each medium. Output
counts `max_tokens`, or what the price says. Attempts that fail cost little, and are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tokenbus.events.requests import DocumentPart, Generate, ImagePart, ToolResultPart
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.callers import ForwardedCall
from tokenbus_services.pricing import BYTES_PER_TOKEN, PriceTable

IMAGE_TOKENS = 5_000
DOCUMENT_TOKENS = 100_000
MESSAGE_TOKENS = 64
"""What a provider adds to each message, and to the request."""


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
    if request.max_tokens is not None:
        return request.max_tokens
    return unbounded + ((request.thinking.budget_tokens or 0) if request.thinking else 0)


def _input_tokens(request: Generate) -> int:
    texts: list[Any] = [request.system, request.tools, request.output_schema, request.extra]
    media = 0
    for message in request.messages:
        for part in _parts(message.content):
            match part:
                case ImagePart():
                    media += IMAGE_TOKENS
                case DocumentPart():
                    media += DOCUMENT_TOKENS
                case _:
                    texts.append(part)
    return len(msgspec.json.encode(texts)) + media + MESSAGE_TOKENS * (1 + len(request.messages))


def _parts(content: Any) -> Iterator[Any]:
    """Texts and parts, those inside tool results too."""
    for part in [content] if isinstance(content, str) else content:
        if isinstance(part, ToolResultPart):
            yield part.tool_name
            yield from _parts(part.content)
        else:
            yield part
