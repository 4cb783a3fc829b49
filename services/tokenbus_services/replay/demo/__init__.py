"""The demo's conversation: thinking, a word to the user, a tool call, and an answer that uses the tool's result.

One script serves every API that the replay provider can compose; the tool that it calls lives beside it.
"""

from __future__ import annotations

from importlib import resources

import msgspec

from tokenbus_services.replay.script import Script

DEMO_MODEL = "demo"
"""The model to ask for: the script's name."""
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


def weather(city: str) -> dict[str, object]:
    """The demo's tool. It knows one kind of weather, that of the conversation."""
    return {"city": city, "sky": "light rain", "celsius": 14, "wind_kmh": 11, "dry_from": "18:00"}
