"""The demo's tool. It stands alone, because a process of tools would load the mock provider's server with it."""

from __future__ import annotations

WEATHER_TOOL = "weather"
WEATHER_CALL = f"{__name__}:{WEATHER_TOOL}"
WEATHER_DESCRIPTION = "The weather in a city, now and over the next hours."
WEATHER_PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of the city, as people there write it."}},
    "required": ["city"],
    "additionalProperties": False,
}


def weather(city: str) -> dict[str, object]:
    """Fixed weather, in any city."""
    return {"city": city, "sky": "light rain", "celsius": 14, "wind_kmh": 11, "dry_from": "18:00"}
