"""Defaults for provider APIs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tokenbus.events.frames import ImagesRequested
from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.api import Built, Format, JobApi, Quirks
from tokenbus.providers.file_api import FileApi
from tokenbus.providers.media import MediaLimits
from tokenbus.providers.request.build import formatted
from tokenbus.providers.request.images import images_asked
from tokenbus.providers.request.options import RequestOption


class ProviderBase:
    """A `Provider` without ``name``, addresses, ``decoder`` and ``restore``.

    Defaults: a bearer token; the modes in ``formats``; no images, no files, no continuation of partial answers.
    """

    key_header: tuple[str, str] = ("authorization", "Bearer {}")
    urgent: tuple[bytes, ...] = (b'"error"',)
    files: FileApi | None = None
    jobs: JobApi | None = None
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
