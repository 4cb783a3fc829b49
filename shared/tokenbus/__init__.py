"""tokenbus: a message bus for language-model output.

The public API is what these modules list in `__all__`: `tokenbus` (client, requests, events), `tokenbus.errors`,
`tokenbus.policy`, `tokenbus.shaping`, `tokenbus.sync`, `tokenbus.tools`, `tokenbus.providers` (to add an API),
`tokenbus.faststream` and `tokenbus.testing`. Any other module may move or change without notice.
"""

import importlib
from typing import TYPE_CHECKING

from tokenbus.blobs import BlobLoader, BlobRef, BlobStreams, blob_id_of
from tokenbus.errors import TokenbusError
from tokenbus.events.decisions import Decided
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import (
    Answering,
    AudioRef,
    BlockComplete,
    BlockProgress,
    BlockStarted,
    Cancelled,
    ChildEnded,
    ChildStarted,
    Chunk,
    Completed,
    ImagePreview,
    ImageRef,
    Incomplete,
    ProviderModel,
    PublicEvent,
    Restarted,
    Resumed,
    Retrying,
    RunFailedEvent,
    Started,
    TerminalEvent,
    Timing,
    ToolProgress,
    UnknownEvent,
    UsageReported,
    Waiting,
)
from tokenbus.events.requests import (
    Answer,
    Append,
    Approval,
    Base64Source,
    BlobSource,
    Configure,
    Delete,
    DocumentPart,
    ExtraPart,
    Fallback,
    FileSource,
    Generate,
    GrammarFormat,
    HistoryBound,
    ImageOptions,
    ImagePart,
    Interrupt,
    Message,
    OutputSchema,
    PrefillOptions,
    Rewrite,
    SessionMessage,
    TextFormat,
    TextPart,
    Thinking,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolChoice,
    ToolResult,
    ToolResultPart,
    UrlSource,
    Withdraw,
)
from tokenbus.events.run_info import RunInfo
from tokenbus.events.run_result import RunResult
from tokenbus.events.sessions import (
    Appended,
    Configured,
    Deleted,
    Delivered,
    Fate,
    Returned,
    RunEnded,
    SessionInfo,
    SessionTopicEvent,
    UnknownSessionEvent,
)
from tokenbus.events.usage import Usage
from tokenbus.events.waits import Condition, Excluded, WaitFate, WaitInfo
from tokenbus.prefill_names import unnamed_where
from tokenbus.storage import restore_from_storage, sanitize_for_storage

if TYPE_CHECKING:
    from tokenbus.client.blobs import Blobs
    from tokenbus.client.client import Client, Run
    from tokenbus.client.display_pace import coalesced
    from tokenbus.client.publishing import AnyRun
    from tokenbus.client.response import Response, ResponseBuilder
    from tokenbus.client.sessions.reader import SessionCursor, SessionStep
    from tokenbus.client.sessions.session import Receipt, Session
    from tokenbus.client.subscriptions.cursor import Cursor
    from tokenbus.client.subscriptions.group import SharedSubscription
    from tokenbus.client.subscriptions.ordered import OrderedSubscription
    from tokenbus.client.subscriptions.sentences import Sentence, SentenceSubscription
    from tokenbus.client.tree_reader import TreeCursor, TreeStep
    from tokenbus.shaping.sentences import SentenceRules

__version__ = "0.1.0.dev0"

_LATER = {
    "Blobs": "tokenbus.client.blobs",
    "Client": "tokenbus.client.client",
    "Cursor": "tokenbus.client.subscriptions.cursor",
    "OrderedSubscription": "tokenbus.client.subscriptions.ordered",
    "Receipt": "tokenbus.client.sessions.session",
    "Response": "tokenbus.client.response",
    "ResponseBuilder": "tokenbus.client.response",
    "AnyRun": "tokenbus.client.publishing",
    "Run": "tokenbus.client.client",
    "Sentence": "tokenbus.client.subscriptions.sentences",
    "SentenceRules": "tokenbus.shaping.sentences",
    "SentenceSubscription": "tokenbus.client.subscriptions.sentences",
    "Session": "tokenbus.client.sessions.session",
    "SessionCursor": "tokenbus.client.sessions.reader",
    "SessionStep": "tokenbus.client.sessions.reader",
    "SharedSubscription": "tokenbus.client.subscriptions.group",
    "TreeCursor": "tokenbus.client.tree_reader",
    "TreeStep": "tokenbus.client.tree_reader",
    "coalesced": "tokenbus.client.display_pace",
}
"""Names that are imported when they are first used: most workers have no client, and it is a third of the library."""

__all__ = [
    "Answer",
    "Answering",
    "AnyRun",
    "Append",
    "Appended",
    "Approval",
    "AudioRef",
    "Base64Source",
    "BlobLoader",
    "BlobRef",
    "BlobSource",
    "BlobStreams",
    "Blobs",
    "BlockComplete",
    "BlockProgress",
    "BlockStarted",
    "Cancelled",
    "ChildEnded",
    "ChildStarted",
    "Chunk",
    "Client",
    "Completed",
    "Condition",
    "Configure",
    "Configured",
    "Cursor",
    "Decided",
    "Delete",
    "Deleted",
    "Delivered",
    "DocumentPart",
    "ErrorInfo",
    "Excluded",
    "ExtraPart",
    "Fallback",
    "Fate",
    "FileSource",
    "Generate",
    "GrammarFormat",
    "HistoryBound",
    "ImageOptions",
    "ImagePart",
    "ImagePreview",
    "ImageRef",
    "Incomplete",
    "Interrupt",
    "Message",
    "OrderedSubscription",
    "OutputSchema",
    "PrefillOptions",
    "ProviderModel",
    "PublicEvent",
    "Receipt",
    "Response",
    "ResponseBuilder",
    "Restarted",
    "Resumed",
    "Retrying",
    "Returned",
    "Rewrite",
    "Run",
    "RunEnded",
    "RunFailedEvent",
    "RunInfo",
    "RunResult",
    "Sentence",
    "SentenceRules",
    "SentenceSubscription",
    "Session",
    "SessionCursor",
    "SessionInfo",
    "SessionMessage",
    "SessionStep",
    "SessionTopicEvent",
    "SharedSubscription",
    "Started",
    "TerminalEvent",
    "TextFormat",
    "TextPart",
    "Thinking",
    "ThinkingPart",
    "Timing",
    "TokenbusError",
    "Tool",
    "ToolCallPart",
    "ToolChoice",
    "ToolProgress",
    "ToolResult",
    "ToolResultPart",
    "TreeCursor",
    "TreeStep",
    "UnknownEvent",
    "UnknownSessionEvent",
    "UrlSource",
    "Usage",
    "UsageReported",
    "WaitFate",
    "WaitInfo",
    "Waiting",
    "Withdraw",
    "__version__",
    "blob_id_of",
    "coalesced",
    "restore_from_storage",
    "sanitize_for_storage",
    "unnamed_where",
]


if not TYPE_CHECKING:  # a type checker that saw it would accept any name, and a misspelt import with it

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
