"""The mock provider: a local server that serves the provider APIs from scripts, for tests, demo and benchmarks.

Contains the scripts, their wire formats and the demo's conversation.
"""

from tokenbus_services.mock_provider.files import load_scripts, recorded
from tokenbus_services.mock_provider.reply import STAMP, TOKEN, TOOL_RESULT, Picture, Reply, ToolCall
from tokenbus_services.mock_provider.request import Asked
from tokenbus_services.mock_provider.request_log import Exchange, Received
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
)
from tokenbus_services.mock_provider.server import ReplayServer

__all__ = [
    "STAMP",
    "TOKEN",
    "TOOL_RESULT",
    "Asked",
    "CutOff",
    "Delivery",
    "ErrorEvent",
    "Exchange",
    "Fixed",
    "HangUp",
    "Offsets",
    "Picture",
    "Random",
    "Received",
    "Recording",
    "ReplayServer",
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
