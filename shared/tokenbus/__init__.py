"""tokenbus: a message bus for language-model output."""

from tokenbus.client.client import Client
from tokenbus.client.cursor import Cursor
from tokenbus.client.ordered import OrderedSubscription
from tokenbus.client.result import Result
from tokenbus.client.run import Run
from tokenbus.client.shared import SharedSubscription
from tokenbus.errors import TokenbusError
from tokenbus.events.public import (
    BlockComplete,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    Incomplete,
    PublicEvent,
    Restarted,
    Retrying,
    RunFailedEvent,
    Started,
    TerminalEvent,
    UsageReported,
)
from tokenbus.events.requests import Generate, Message, Tool

__version__ = "0.1.0.dev0"

__all__ = [
    "BlockComplete",
    "BlockStarted",
    "Cancelled",
    "Chunk",
    "Client",
    "Completed",
    "Cursor",
    "Generate",
    "Incomplete",
    "Message",
    "OrderedSubscription",
    "PublicEvent",
    "Restarted",
    "Result",
    "Retrying",
    "Run",
    "RunFailedEvent",
    "SharedSubscription",
    "Started",
    "TerminalEvent",
    "TokenbusError",
    "Tool",
    "UsageReported",
    "__version__",
]
