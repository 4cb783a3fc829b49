"""The demo's conversation: thinking, a short text, a tool call, and an answer that uses the tool's result.

One script serves every API; its tool is defined here too. `answer` is used by `tokenbus up --mock`: it plays this
conversation if the request has the tool, otherwise it returns a text.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec

from tokenbus_services.mock_provider.reply import Reply
from tokenbus_services.mock_provider.request import ModelRequest
from tokenbus_services.mock_provider.script import Delivery, Script, Turn

DEMO_MODEL = "demo"
"""The model to ask for: the script's name."""
WEATHER_TOOL = "weather"
PACE = 40.0
"""Reads per second, at a person's reading speed."""
_QUOTED_CHARACTERS = 200
DEMO_PROMPT = "Do I need an umbrella in Zürich this afternoon?"

WEATHER_DESCRIPTION = "The weather in a city, now and over the next hours."
WEATHER_PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of the city, as people there write it."}},
    "required": ["city"],
    "additionalProperties": False,
}


def demo_scripts() -> list[Script]:
    """The scripts that the demo is served from."""
    conversation = resources.files(__name__).joinpath("umbrella.json").read_bytes()
    return [msgspec.json.decode(conversation, type=Script)]


def answer(request: ModelRequest) -> Turn:
    """The mock provider's answer for any model: deterministic, no key needed."""
    tools = msgspec.json.encode(request.body.get("tools"))
    if f'"{WEATHER_TOOL}"'.encode() in tools:
        turns = _conversation().turns
        return turns[-1] if request.tool_results else turns[0]
    quoted = request.user_text[:_QUOTED_CHARACTERS]
    text = f"This is the mock provider: no key is needed, and no model was asked. You wrote: “{quoted}”."
    return Turn(says=Reply(text=text), delivery=Delivery(pace=PACE))


@cache
def _conversation() -> Script:
    return demo_scripts()[0]


def weather(city: str) -> dict[str, object]:
    """The demo's tool, with fixed weather."""
    return {"city": city, "sky": "light rain", "celsius": 14, "wind_kmh": 11, "dry_from": "18:00"}
