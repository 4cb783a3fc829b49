"""tokenbus: a message bus for language-model output."""

from tokenbus.client.client import Client
from tokenbus.client.coalesced import coalesced
from tokenbus.client.cursor import Cursor
from tokenbus.client.ordered import OrderedSubscription
from tokenbus.client.response import Response, ResponseBuilder
from tokenbus.client.run import Run
from tokenbus.client.sentences import Sentence, SentenceSubscription
from tokenbus.client.shared import SharedSubscription
from tokenbus.errors import TokenbusError
from tokenbus.events.decisions import Decided
from tokenbus.events.public import (
    BlockComplete,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    ImagePreview,
    Incomplete,
    PublicEvent,
    Restarted,
    Retrying,
    RunFailedEvent,
    Started,
    TerminalEvent,
    ToolProgress,
    UnknownEvent,
    UsageReported,
)
from tokenbus.events.requests import Generate, Message, Tool
from tokenbus.shaping.sentences import SentenceRules
from tokenbus.storage import restore_from_storage, sanitize_for_storage

__version__ = "0.1.0.dev0"

__all__ = [
    "BlockComplete",
    "BlockStarted",
    "Cancelled",
    "Chunk",
    "Client",
    "Completed",
    "Cursor",
    "Decided",
    "Generate",
    "ImagePreview",
    "Incomplete",
    "Message",
    "OrderedSubscription",
    "PublicEvent",
    "Response",
    "ResponseBuilder",
    "Restarted",
    "Retrying",
    "Run",
    "RunFailedEvent",
    "Sentence",
    "SentenceRules",
    "SentenceSubscription",
    "SharedSubscription",
    "Started",
    "TerminalEvent",
    "TokenbusError",
    "Tool",
    "ToolProgress",
    "UnknownEvent",
    "UsageReported",
    "__version__",
    "coalesced",
    "restore_from_storage",
    "sanitize_for_storage",
]
