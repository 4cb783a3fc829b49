"""The mock provider: a local server that serves the provider APIs from scripts, for tests, demo and benchmarks.

Contains the scripts, their wire formats and the demo's conversation.
"""

from tokenbus_services.mock_provider.reply import STAMP, TOKEN, TOOL_RESULT, Picture, Reply, ToolCall
from tokenbus_services.mock_provider.request import ModelRequest
from tokenbus_services.mock_provider.request_log import Exchange, HttpRequest
from tokenbus_services.mock_provider.script import (
    CutOff,
    Delivery,
    ErrorEvent,
    Fixed,
    HangUp,
    Offsets,
    Random,
    Recording,
    Script,
    Stall,
    Status,
    Turn,
    Whole,
    Wire,
    load_scripts,
    recorded,
)
from tokenbus_services.mock_provider.server import MockProvider

__all__ = [
    "STAMP",
    "TOKEN",
    "TOOL_RESULT",
    "CutOff",
    "Delivery",
    "ErrorEvent",
    "Exchange",
    "Fixed",
    "HangUp",
    "HttpRequest",
    "MockProvider",
    "ModelRequest",
    "Offsets",
    "Picture",
    "Random",
    "Recording",
    "Reply",
    "Script",
    "Stall",
    "Status",
    "ToolCall",
    "Turn",
    "Whole",
    "Wire",
    "load_scripts",
    "recorded",
]
