"""What a provider API is where it does not say otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tokenbus.events.frames import ImagesAsked
from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.api import Built, Format, Quirks
from tokenbus.providers.file_api import FileApi
from tokenbus.providers.media import MediaLimits
from tokenbus.providers.request.build import formatted
from tokenbus.providers.request.images import images_asked


class ProviderBase:
    """A `Provider` but for ``name``, the addresses, ``decoder`` and ``restore``: the key goes as a bearer's, there is
    one mode for each of ``formats``, and no images, no files, no going on from a partial answer."""

    key_header: tuple[str, str] = ("authorization", "Bearer {}")
    urgent: tuple[bytes, ...] = (b'"error"',)
    files: FileApi | None = None
    last: tuple[bytes, ...] = ()
    image_keys: re.Pattern[bytes] | None = None
    formats: Mapping[Mode, Format] = {}
    media: MediaLimits = MediaLimits()
    end_of_turn: str = ""
    takes_path: bool = True
    makes_images: bool = False
    """Whether models of this API make images."""

    def build(self, request: Generate, history: list[Message], quirks: Quirks) -> Built:
        """See `Provider.build`."""
        return formatted(self.formats, request, history, quirks, makes_images=self.makes_images)

    def continues(self, request: Generate, quirks: Quirks) -> bool:
        """See `Provider.continues`."""
        return False

    def images_asked(self, request: Generate) -> ImagesAsked:
        """See `Provider.images_asked`."""
        return images_asked(request)
