"""Provider APIs, one package each: build the request and decode the response stream. No IO here.

Shared parts live in `request` (conversation, participants, images, multipart) and `response` (SSE framing, decoder
lifecycle, error mapping). The services make the HTTP calls.

A package that adds another API imports the names below; see docs/guides/providers.md.
"""

from tokenbus.errors import Malformed, RequestInvalid
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.normalized import (
    ApprovalAsked,
    Audio,
    BlockStart,
    BlockStop,
    Cut,
    Done,
    Extra,
    Failed,
    Image,
    ItemProgress,
    ItemStart,
    Normalized,
    Opaque,
    RefusalDelta,
    Start,
    Terminal,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStart,
    TranscriptDelta,
    UsageSeen,
)
from tokenbus.events.quirks import ThinkingTags
from tokenbus.events.requests import Generate, Message, Mode, TextPart, ThinkingPart, ToolCallPart, ToolResultPart
from tokenbus.events.usage import Usage
from tokenbus.providers.api import (
    Built,
    Decoder,
    Format,
    HttpCall,
    JobApi,
    JobSeen,
    Provider,
    Quirks,
    SteerApi,
    SteerSeen,
)
from tokenbus.providers.auth import Auth, CallToSign, Token, TokenAuth
from tokenbus.providers.base import ProviderBase
from tokenbus.providers.file_api import FileAnswer, FileApi, FileCall, FileToUpload, ProviderFile
from tokenbus.providers.media import MediaLimits
from tokenbus.providers.request.build import accepted_stops, needs_tools, schema_of, with_extra
from tokenbus.providers.request.conversation import Spoken, Takes, conversation
from tokenbus.providers.response.decoder import ResponseDecoder, finish_of
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.sse import SseEvent

__all__ = [
    "ApprovalAsked",
    "Audio",
    "Auth",
    "BlockStart",
    "BlockStop",
    "Built",
    "CallToSign",
    "Cut",
    "Decoder",
    "Done",
    "ErrorInfo",
    "Extra",
    "Failed",
    "FileAnswer",
    "FileApi",
    "FileCall",
    "FileToUpload",
    "Format",
    "Generate",
    "HttpCall",
    "Image",
    "ItemProgress",
    "ItemStart",
    "JobApi",
    "JobSeen",
    "Malformed",
    "MediaLimits",
    "Message",
    "Mode",
    "Normalized",
    "Opaque",
    "Provider",
    "ProviderBase",
    "ProviderFile",
    "Quirks",
    "RefusalDelta",
    "RequestInvalid",
    "ResponseDecoder",
    "Spoken",
    "SseEvent",
    "Start",
    "SteerApi",
    "SteerSeen",
    "Takes",
    "Terminal",
    "TextDelta",
    "TextPart",
    "ThinkingDelta",
    "ThinkingPart",
    "ThinkingTags",
    "Token",
    "TokenAuth",
    "ToolCallDelta",
    "ToolCallDone",
    "ToolCallPart",
    "ToolCallStart",
    "ToolResultPart",
    "TranscriptDelta",
    "Usage",
    "UsageSeen",
    "accepted_stops",
    "conversation",
    "finish_of",
    "needs_tools",
    "provider_failure",
    "schema_of",
    "with_extra",
]
