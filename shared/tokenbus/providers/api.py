"""The interface of a provider module: a request builder and a decoder, both sans-IO."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import msgspec

from tokenbus.events.frames import ImagesRequested
from tokenbus.events.normalized import Normalized
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.file_api import FileApi
from tokenbus.providers.media import MediaLimits

__all__ = [
    "ApiName",
    "Built",
    "Decoder",
    "Format",
    "HttpCall",
    "JobApi",
    "JobSeen",
    "Provider",
    "Quirks",
    "SteerApi",
    "SteerSeen",
]


class HttpCall(msgspec.Struct, frozen=True, kw_only=True):
    """A provider request that is ready to send except for the API key, which the fetcher adds from its environment."""

    path: str
    """Relative to the provider's base URL."""
    body: bytes
    headers: dict[str, str]
    query: dict[str, str] = {}
    method: Literal["POST", "GET"] = "POST"
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


class JobSeen(msgspec.Struct, frozen=True):
    """What an event of a job's stream, or the whole response, says about the job."""

    id: str = ""
    """Empty: the event does not name it."""
    number: int = -1
    """The event's own; -1: it has none."""
    over: bool = False
    """The job has ended; this is the last part of its answer."""
    failed: bool = False
    """The stream has ended with an error; the job may run."""


class JobApi(Protocol):
    """Jobs in the background: started by a request, they run at the provider until they end or are cancelled, and
    their answer may be read again. Sans-IO; the paths of the calls follow ``path``.
    """

    path: str
    """That of a call that starts one."""
    resumes: bool
    """Whether a stream that was cut can be read on by `resume`; else the job is looked at until it has ended."""

    def wanted(self, request: Generate) -> bool:
        """Whether the request starts a job."""
        ...

    def read(self, data: bytes) -> JobSeen:
        """Read the data of an event, or a whole response. Never raises: what is unreadable says nothing."""
        ...

    def resume(self, job: str, after: int) -> HttpCall:
        """The call whose answer is the stream of the events after number ``after``; -1: all of them."""
        ...

    def look(self, job: str) -> HttpCall:
        """The call whose answer is the whole response as it is now."""
        ...

    def cancel(self, job: str) -> HttpCall:
        """The call that cancels the job."""
        ...

    def last_event(self, response: bytes) -> bytes:
        """The event that would have ended the stream with this response, which is over."""
        ...


class SteerSeen(msgspec.Struct, frozen=True):
    """What a message of a WebSocket says about the response that comes over it."""

    passes: bool = False
    """It is an event of the response's stream."""
    response: str = ""
    """The response's id, in its first event."""
    over: bool = False
    """It is the response's last event."""
    steered: bool = False
    """The response ended early, because of what it was steered with; the next one answers that."""
    refused: bool = False
    """The response goes on without what it was to be steered with."""
    status: int = 0
    """The HTTP status of an error."""


class SteerApi(Protocol):
    """Responses over a WebSocket, which take in further messages while they come. Bodies of calls and events are those
    of HTTP. Sans-IO.
    """

    def begin(self, body: bytes) -> bytes:
        """The message that begins a response. ``body``: of its call."""
        ...

    def steer(self, response: str, body: bytes) -> bytes:
        """The message that steers it. ``body``: of a call with the steering messages alone."""
        ...

    def read(self, message: bytes) -> SteerSeen:
        """Read a message of the provider. Never raises: what is unreadable is an event, which its decoder refuses."""
        ...

    def ended(self, response: str) -> bytes:
        """The event with which a response would end that was steered."""
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
    jobs: JobApi | None
    """The provider's jobs in the background; None if it has none."""
    steering: SteerApi | None
    """How messages steer its answers; None: they cannot."""
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
