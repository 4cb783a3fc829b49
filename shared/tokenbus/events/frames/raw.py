"""What fetchers write to `raw`: the provider's bytes as they were read, and what happened to the call."""

from __future__ import annotations

import msgspec

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.quirks import ApiName, Quirks


class ImagesRequested(msgspec.Struct, frozen=True, array_like=True):
    """Image options of the request that the response does not repeat, and how to deliver the images."""

    inline: bool = False
    """Deliver as base64 instead of in blobs."""
    prompt: str = ""
    model: str = ""
    size: str = ""
    quality: str = ""
    moved: str = ""
    """The secret in the placeholders of offloaded images (`tokenbus.core.image_placeholder`); empty if none was
    offloaded.
    """


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """The provider answered: how to read what follows. The first item of an attempt that got an answer."""

    api: ApiName
    status: int
    headers: dict[str, str]
    """Lower-case names; only headers that a decoder may need, never a secret."""
    stream: bool
    quirks: Quirks
    """The quirks at the time of the call, so that a replay decodes the same way."""
    images: ImagesRequested = ImagesRequested()
    provider: str = ""
    """The provider's name in the settings."""
    called_ms: int = 0
    """Unix time when the provider was called."""
    traceparent: str = ""
    """The publisher's trace context; empty: it gave none."""


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data"):
    """Body bytes as read."""

    data: bytes


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The call is over. ``error``: a local failure (timeout, network, missing key); None: the body ended."""

    error: ErrorInfo | None = None
    called_ms: int = 0
    """Unix time when the provider was called; 0: it was not."""


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """The attempt was abandoned: its worker died, or the run was cancelled or ended."""

    reason: str


class Noted(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    """A repair made while building the request; published with the run's end as provider_extra."""

    text: str


RawItem = Opened | Data | Ended | Lost | Noted

ANY_FRAME = -1
"""Frame number of an end that was not written by the attempt's fetcher, whose count is unknown."""


class RawFrame(msgspec.Struct, frozen=True, array_like=True):
    """One flush of one attempt. ``n`` counts the attempt's frames from 0; a gap means a loss."""

    turn: int
    attempt: int
    n: int
    at_ms: int
    """Unix time of the flush."""
    items: list[RawItem]
