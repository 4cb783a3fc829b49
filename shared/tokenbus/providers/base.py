"""Defaults for provider APIs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from tokenbus.events.frames import ImagesRequested
from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.api import Built, Decoder, Format, HttpCall, JobApi, Quirks, SteerApi
from tokenbus.providers.file_api import FileApi
from tokenbus.providers.media import MediaLimits
from tokenbus.providers.request.build import formatted
from tokenbus.providers.request.images import images_asked
from tokenbus.providers.request.options import RequestOption
from tokenbus.providers.response.decoder import ResponseDecoder
from tokenbus.providers.response.inline_thinking import InlineThinking
from tokenbus.providers.response.sse import MAX_EVENT_BYTES, SseDecoder


class ProviderBase:
    """A `Provider` without ``name``, addresses and ``decodes``.

    Defaults: a bearer token; the modes in ``formats``; no images, no files, no continuation of partial answers.
    """

    decodes: type[ResponseDecoder]
    """Created for each response; the fields are the whole state, from which another worker continues."""
    event_bytes: int = MAX_EVENT_BYTES
    """The largest event that a response may have."""
    key_header: tuple[str, str] = ("authorization", "Bearer {}")
    urgent: tuple[bytes, ...] = (b'"error"',)
    files: FileApi | None = None
    jobs: JobApi | None = None
    steering: SteerApi | None = None
    last: tuple[bytes, ...] = ()
    image_keys: re.Pattern[bytes] | None = None
    formats: Mapping[Mode, Format] = {}
    media: MediaLimits = MediaLimits()
    end_of_turn: str = ""
    takes_path: bool = True
    models_path: str = "/models"
    """Relative to the base URL: the list of models, a GET that needs a valid key and costs nothing. Empty: none. A
    plug-in's provider need not have it.
    """
    models_headers: Mapping[str, str] = {}
    """What that GET needs besides the key."""
    makes_images: bool = False
    """Whether models of this API can generate images."""
    takes_max_tokens: bool = True
    """Whether a request may bound its output."""
    input_has_cached: bool = True
    """Whether the reported input includes what was read from the provider's cache and written to it."""
    output_has_reasoning: bool = True
    """Whether the reported output includes reasoning."""
    options: frozenset[RequestOption] = frozenset()
    """The optional request fields that this API has; a request with another one is rejected by name."""

    def build(self, request: Generate, history: list[Message], quirks: Quirks) -> Built:
        """See `Provider.build`."""
        return formatted(self.formats, request, history, quirks, makes_images=self.makes_images, options=self.options)

    def continues(self, request: Generate, quirks: Quirks) -> bool:
        """See `Provider.continues`."""
        return False

    def images_asked(self, request: Generate) -> ImagesRequested:
        """See `Provider.images_asked`."""
        return images_asked(request)

    def decoder(self, *, status: int, headers: Mapping[str, str], stream: bool, quirks: Quirks) -> Decoder:
        """See `Provider.decoder`."""
        sse = SseDecoder(limit=self.event_bytes)
        return self.decodes.of(status, headers, sse=sse, inline=InlineThinking.of(quirks))

    def restore(self, state: bytes) -> Decoder:
        """See `Provider.restore`."""
        return msgspec.msgpack.decode(state, type=self.decodes)


class JobBase:
    """A `JobApi` without ``path``, ``resumes``, ``read``, ``resume`` and ``last_event``.

    A job is started by the field `background` of a request, looked at by `GET /ID` and cancelled by `POST /ID/cancel`.
    """

    def wanted(self, request: Generate) -> bool:
        """See `JobApi.wanted`."""
        return bool((request.extra or {}).get("background"))

    def look(self, job: str, **query: str) -> HttpCall:
        """See `JobApi.look`."""
        return HttpCall(path=f"/{quote(job, safe='')}", body=b"", headers={}, method="GET", query=query)

    def cancel(self, job: str) -> HttpCall:
        """See `JobApi.cancel`."""
        return HttpCall(path=f"/{quote(job, safe='')}/cancel", body=b"", headers={})
