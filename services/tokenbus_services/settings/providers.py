"""Providers, and what media they take."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus.errors import SettingsError
from tokenbus.events.model_names import model_key
from tokenbus.events.quirks import BUILT_IN
from tokenbus.providers import registry
from tokenbus.providers.api import ApiName, Quirks
from tokenbus_services.settings.types import Bytes, Count, HeaderName, HeaderValue, HttpUrl, ImportPath, Seconds, Table

MediaTypes = tuple[Annotated[str, Meta(pattern=r"^(\*|[a-z]+/(\*|[a-z0-9.+-]+))$(?!\n)")], ...]
"""Media types, as `image/png`, `image/*` or `*`."""


class MediaSettings(Table, frozen=True, kw_only=True):
    """What media one request may hold; checked before the call. What is left out is as the API documents it."""

    image_types: MediaTypes | None = None
    document_types: MediaTypes | None = None
    image_bytes: Bytes | None = None
    """Of one image, before base64."""
    document_bytes: Bytes | None = None
    """Of one document, before base64."""
    pdf_bytes: Bytes | None = None
    """Of one PDF, where that is less."""
    images: Count | None = None
    """How many images, those by url too."""
    request_bytes: Bytes | None = None
    """Of the whole body."""


class UploadSettings(Table, frozen=True, kw_only=True):
    """With this table, even an empty one, blobs that are sent again and again go to the provider's own file store once,
    and requests name them there. See docs/guides/media.md."""

    min_bytes: Bytes = 256 * 2**10
    """Smaller ones are sent with each request."""
    keep_s: Annotated[float, Meta(ge=3_600, le=30 * 86_400)] = 86_400.0
    """So long a file is named; the provider deletes it a while after, where its API lets that be said."""


class QuirkSettings(Quirks, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quirks as the file has them: an unknown one is an error too."""


class ProviderSettings(Table, frozen=True, kw_only=True):
    """One configured provider: what a request's `provider` names. What is left out is as its API has it."""

    api: ApiName
    """One of tokenbus's own, or of a package that adds it."""
    base_url: HttpUrl | None = None
    path: str | None = None
    """In place of the API's own, beneath `base_url`; `{model}` in it stands for the request's model, `{path}` for the
    API's own path. Not for `gemini`, whose path says whether the answer streams."""
    query: dict[str, str] = {}
    """Parameters of each call's URL. Not for secrets."""
    api_key_env: str | None = None
    """Environment variable that holds the key; empty text: the provider needs none. With `_FILE` behind its name, the
    path of a file that does."""
    api_key_file: str | None = None
    """File that holds the key, read again when it changes; in place of `api_key_env`."""
    auth: ImportPath | None = None
    """In place of a key: what makes a `tokenbus.providers.auth.Auth`, for tokens that expire and for signatures."""
    auth_options: dict[str, object] = {}
    """What it is called with. Not for secrets."""
    key_header: HeaderName | None = None
    """Header that carries the key."""
    key_format: Annotated[str, Meta(pattern=r"^[ -z|~]*\{\}[ -z|~]*$(?!\n)")] | None = None
    """What that header holds, with `{}` for the key. None: with `key_header` the key alone, else as the API has it."""
    headers: dict[HeaderName, HeaderValue] = {}
    """Sent with each call. Not for secrets."""
    model_aliases: dict[str, str] = {}
    """Other names that the provider has for a model, and the one that limits, routes and quirks know. A request for the
    first becomes one for the second."""
    connect_timeout_s: Seconds = 10.0
    first_event_timeout_s: Seconds = 120.0
    idle_timeout_s: Seconds = 60.0
    """Longest silence inside a stream."""
    media: MediaSettings = MediaSettings()
    uploads: UploadSettings | None = None
    """None: no file of this provider's is ever made."""
    quirks: QuirkSettings = QuirkSettings()

    def true_model(self, model: str) -> str:
        """The name under which this deployment knows the model that a request asks for."""
        aliases = {model_key(alias): name for alias, name in self.model_aliases.items()}
        return aliases.get(model_key(model), model.strip())

    def __post_init__(self) -> None:
        try:
            api = registry.get(self.api)
        except SettingsError as e:
            raise ValueError(f"api: {e.problem}") from e
        if self.path is not None and not api.takes_path:
            raise ValueError(f"{self.api} takes no path: it says whether the answer streams; base_url may have one")
        if self.uploads is not None and api.files is None:
            raise ValueError(f"{self.api} has no requests that could name an uploaded file")


DEFAULT_PROVIDERS = {api: ProviderSettings(api=api) for api in BUILT_IN}
"""There without any file, each under the name of its API."""
