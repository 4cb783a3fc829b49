"""The demo's conversation: thinking, a short text, a tool call, and an answer that uses the tool's result.

One script serves every API. `answer` is used by `tokenbus up --mock`: it plays this
conversation if the request has the tool and asks about the weather. It calls any other tool that the text names, and
otherwise returns a text.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec

from tokenbus_services.mock_provider.demo.own_tools import named_call
from tokenbus_services.mock_provider.reply import Reply
from tokenbus_services.mock_provider.request import ModelRequest
from tokenbus_services.mock_provider.script import Delivery, Script, Turn
from tokenbus_services.weather import WEATHER_TOOL

DEMO_MODEL = "demo"
"""The model to ask for: the script's name."""
PACE = 40.0
"""Reads per second, at a person's reading speed."""
STORY_PACE = 8.0
"""Slow enough to type meanwhile, and to interrupt."""
_QUOTED_CHARACTERS = 200
_WEATHER_WORDS = ("umbrella", "weather", "rain")
_WEATHER = '"wind_kmh"', '"dry_from"'
"""What the weather tool's result has."""
_STORY = (
    "A letter was to go from one end of a valley to the other. The old postman carried it himself: over the bridge, "
    "up the hill, and down on the far side. When he slipped and lost it in the river, nobody knew how far he had come, "
    "and so it was written again from the beginning.\n\n"
    "His daughter did otherwise. She put a box at the bridge, one on the hill and one behind it. A letter lay in each "
    "until the next box had it, and each had a number that followed the one before. She slipped as often as her father "
    "did, but whoever took over looked into the last box, and went on from there. No letter came twice, and none was "
    "lost.\n\n"
    "In the end the people of the valley forgot that the way was long. Only the children knew the numbers, and counted "
    "them when they heard her whistle."
)
DEMO_PROMPT = "Do I need an umbrella in Zürich this afternoon?"


def demo_scripts() -> list[Script]:
    conversation = resources.files(__name__).joinpath("umbrella.json").read_bytes()
    return [msgspec.json.decode(conversation, type=Script)]


def answer(request: ModelRequest) -> Turn:
    """The mock provider's answer for any model: deterministic, no key needed."""
    tools, asked = msgspec.json.encode(request.body.get("tools")), request.user_text.lower()
    if f'"{WEATHER_TOOL}"'.encode() in tools and any(word in asked for word in _WEATHER_WORDS):
        turns = _conversation().turns
        return turns[-1] if request.tool_results else turns[0]
    if len(request.tool_results) == 1 and all(word in request.tool_results[0] for word in _WEATHER):
        return _meanwhile(_conversation().turns[-1], request.user_text)
    if request.tool_results:
        return Turn(
            says=Reply(text=f"The tool returned: {' '.join(request.tool_results)}"), delivery=Delivery(pace=PACE)
        )
    if call := named_call(request.user_text, request.body.get("tools")):
        return Turn(says=Reply(text=f"I call {call.name}.", tool_calls=(call,)), delivery=Delivery(pace=PACE))
    if "story" in asked:
        return Turn(says=Reply(text=_STORY), delivery=Delivery(pace=STORY_PACE))
    quoted = request.user_text[:_QUOTED_CHARACTERS]
    text = f"This is the mock provider: no key is needed, and no model was asked. You wrote: “{quoted}”."
    return Turn(says=Reply(text=text), delivery=Delivery(pace=PACE))


def _meanwhile(turn: Turn, steer: str) -> Turn:
    """The turn as an answer that a message steered after the call of the weather tool."""
    assert isinstance(turn.says, Reply)
    text = f"You wrote meanwhile: “{steer[:_QUOTED_CHARACTERS]}”. {turn.says.text}"
    return msgspec.structs.replace(turn, says=msgspec.structs.replace(turn.says, text=text))


@cache
def _conversation() -> Script:
    return demo_scripts()[0]
