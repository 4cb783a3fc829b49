"""The interface of a provider module: a request builder and a decoder, both sans-IO."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from tokenbus.events.frames import ImagesRequested
from tokenbus.events.normalized import Normalized
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.file_api import FileApi
from tokenbus.providers.media import MediaLimits

__all__ = ["ApiName", "Built", "Decoder", "Format", "HttpCall", "Provider", "Quirks"]


class HttpCall(msgspec.Struct, frozen=True, kw_only=True):
    """A provider request that is ready to send except for the API key, which the fetcher adds from its environment."""

    path: str
    """Relative to the provider's base URL."""
    body: bytes
    headers: dict[str, str]
    query: dict[str, str] = {}
    files: tuple[str, ...] = ()
    """Ids of provider files in the body that the fetcher substituted for media. It can send that media another way."""


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A built request, and one sentence for each repair made to the conversation (orphan calls or results)."""

    call: HttpCall
    notes: tuple[str, ...] = ()


Format = Callable[[Generate, list[Message], Quirks], Built]
"""Builds the call for the request's next turn in one mode. Pure. Raises RequestInvalid, naming the field."""


class Decoder(Protocol):
    """Turns the bytes of one attempt into normalized events. Deterministic: chunk boundaries never change the events.

    A decoder is a `msgspec.Struct` whose fields are its whole state, so msgpack can save and restore it. It emits
    nothing after its terminal event. It never raises for bad input; it emits a `Failed` event instead.
    """

    def feed(self, data: bytes) -> list[Normalized]:
        """Return the events that these bytes complete."""
        ...

    def end(self) -> list[Normalized]:
        """Handle the end of the body: return the last events, including the terminal one (`Cut` if the provider sent
        none).
        """
        ...


class Provider(Protocol):
    """Everything tokenbus knows about one provider API. Each provider module exports one as ``provider``.

    `tokenbus.providers.base.ProviderBase` has a sound default for everything an API may lack.
    """

    name: ApiName
    key_header: tuple[str, str]
    """The header that carries the key, and the format of its value, with ``{}`` for the key."""
    default_base_url: str
    default_key_env: str
    urgent: tuple[bytes, ...]
    """Byte patterns that mark block boundaries. A read that contains one is forwarded at once, and so is the next read,
    which may bring the block's first chunk.
    """
    files: FileApi | None
    """The provider's file API; None if it has none or its requests cannot name files."""
    last: tuple[bytes, ...]
    """Prefixes of the event lines after which a stream carries nothing more (see `LastEvent`). For APIs whose streams
    end only with the body, these are the error events.
    """
    image_keys: re.Pattern[bytes] | None
    """In a response, matches from the key of an image string to the start of its base64 data; None: no images."""
    formats: Mapping[Mode, Format]
    """This API's row in the table of APIs and modes. A mode that is missing here is rejected by name."""
    media: MediaLimits
    """Limits on media in its requests. A vendor's own `media` table takes precedence."""
    end_of_turn: str
    """Prefill mode: the token that ends a message, unless the request or the vendor overrides it. Empty: none."""
    takes_path: bool
    """Whether a vendor may replace the API's path with its own `path` setting."""

    def continues(self, request: Generate, quirks: Quirks) -> bool:
        """Whether, in chat mode, this provider and model can continue their own partial answer (`on_failure` continue).

        ``quirks`` are the model's.
        """
        ...

    def images_asked(self, request: Generate) -> ImagesRequested:
        """The request fields that travel with the response bytes because the response does not repeat them (images)."""
        ...

    def build(self, request: Generate, history: list[Message], quirks: Quirks) -> Built:
        """Build the HTTP call for the request's next turn. ``history``: messages appended by the run's earlier turns.

        Raises RequestInvalid, naming the field, for anything this provider does not accept.
        """
        ...

    def decoder(self, *, status: int, headers: Mapping[str, str], stream: bool, quirks: Quirks) -> Decoder:
        """Create a decoder for one response.

        ``status`` >= 300: the body is an error, not an answer. ``stream`` False: the body is one JSON object.
        """
        ...

    def restore(self, state: bytes) -> Decoder:
        """Restore a decoder from the output of `msgspec.msgpack.encode`."""
        ...
