"""What every provider module offers: a request builder and a decoder, both sans-IO."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from tokenbus.events.frames import ImagesAsked
from tokenbus.events.normalized import Normalized
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.file_api import FileApi
from tokenbus.providers.media import MediaLimits

__all__ = ["ApiName", "Built", "Decoder", "Format", "HttpCall", "Provider", "Quirks"]


class HttpCall(msgspec.Struct, frozen=True, kw_only=True):
    """A provider request ready to send, but for the key, which the fetcher adds from its environment."""

    path: str
    """Relative to the provider's base URL."""
    body: bytes
    headers: dict[str, str]
    query: dict[str, str] = {}
    files: tuple[str, ...] = ()
    """Ids of files in the body that the fetcher put there in place of media: it can send those in another way."""


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A built request, with what had to be mended on the way (orphan calls or results), each in a sentence."""

    call: HttpCall
    notes: tuple[str, ...] = ()


Format = Callable[[Generate, list[Message], Quirks], Built]
"""Builds the call for the request's next turn in one mode. Pure. Raises RequestInvalid, naming the field."""


class Decoder(Protocol):
    """Bytes of one attempt in, normalised events out. Deterministic; the same events however the bytes are cut.

    A decoder is a `msgspec.Struct` whose fields are its whole state, so that msgpack can keep and restore it.
    After its terminal event it gives nothing more. It never raises for bad input: that is a `Failed` event.
    """

    def feed(self, data: bytes) -> list[Normalized]:
        """The events that these bytes complete."""
        ...

    def end(self) -> list[Normalized]:
        """The body ended: the last events, the terminal one (`Cut` where the provider's never came) included."""
        ...


class Provider(Protocol):
    """One provider API, as its module gives it (a module-level object named ``provider``): all that tokenbus knows of
    it. `tokenbus.providers.base.ProviderBase` has a sound default for whatever an API does not have."""

    name: ApiName
    key_header: tuple[str, str]
    """Header that carries the key, and the format of its value with ``{}`` for the key."""
    default_base_url: str
    default_key_env: str
    urgent: tuple[bytes, ...]
    """Byte marks of a block's boundaries: a read that holds one is forwarded at once, and so is the one after it, which
    may bring the block's first chunk."""
    files: FileApi | None
    """Its file API; None where it has none, or its requests can name no file."""
    last: tuple[bytes, ...]
    """How the lines of events begin after which a stream says nothing more (see `LastEvent`); an API whose streams end
    with their bodies alone has its errors here."""
    image_keys: re.Pattern[bytes] | None
    """Matches in an answer from the key of an image's string to where its base64 begins; None: it has none."""
    formats: Mapping[Mode, Format]
    """This API's row of the matrix of APIs and modes; a mode that is not in it is refused by name."""
    media: MediaLimits
    """What media its requests may hold; a vendor's own table `media` goes before it."""
    end_of_turn: str
    """Prefill mode: the token that ends a message, unless request or vendor say otherwise; empty: none."""
    takes_path: bool
    """Whether a vendor's `path` may stand in place of the API's own."""

    def continues(self, request: Generate, quirks: Quirks) -> bool:
        """Whether, in chat mode, provider and model can go on from a partial answer of their own (`on_failure`
        continue). ``quirks`` are those of the model."""
        ...

    def images_asked(self, request: Generate) -> ImagesAsked:
        """What of the request goes with the answer's bytes, for the images in it: an answer does not repeat it."""
        ...

    def build(self, request: Generate, history: list[Message], quirks: Quirks) -> Built:
        """The HTTP call for the request's next turn; ``history`` is what the run's earlier turns appended.

        Raises RequestInvalid, naming the field, for what this provider cannot take.
        """
        ...

    def decoder(self, *, status: int, headers: Mapping[str, str], stream: bool, quirks: Quirks) -> Decoder:
        """A fresh decoder for one response.

        ``status`` >= 300: the body is no answer but an error. ``stream`` False: the body is one JSON object.
        """
        ...

    def restore(self, state: bytes) -> Decoder:
        """The decoder whose state `msgspec.msgpack.encode` gave."""
        ...
