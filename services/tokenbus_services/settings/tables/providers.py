"""Providers, and their media limits."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus.core.nearest_name import nearest
from tokenbus.errors import SettingsError
from tokenbus.events.quirks import BUILT_IN, model_key
from tokenbus.events.requests import DurabilityLevel
from tokenbus.providers import plugins, registry
from tokenbus.providers.api import ApiName, Quirks
from tokenbus_services.settings.types import Bytes, Count, HeaderName, HeaderValue, HttpUrl, ImportPath, Seconds, Table

MediaType = Annotated[
    str,
    Meta(
        pattern=r"^(\*|[a-z]+/(\*|[a-z0-9.+-]+))$(?!\n)",
        description="a media type as `image/png`, `image/*` or `*`",
    ),
]
KeyFormat = Annotated[str, Meta(pattern=r"^[ -z|~]*\{\}[ -z|~]*$(?!\n)", description="text with `{}` for the key")]
MediaTypes = tuple[MediaType, ...]
"""Media types, as `image/png`, `image/*` or `*`."""


class MediaSettings(Table, frozen=True, kw_only=True):
    """Media limits of one request, checked before the call. Anything left out is as the API documents it."""

    image_types: MediaTypes | None = None
    document_types: MediaTypes | None = None
    image_bytes: Bytes | None = None
    """Maximum size of one image, before base64."""
    document_bytes: Bytes | None = None
    """Maximum size of one document, before base64."""
    pdf_bytes: Bytes | None = None
    """Maximum size of one PDF, if smaller."""
    images: Count | None = None
    """Maximum number of images, including those given by URL."""
    request_bytes: Bytes | None = None
    """Maximum size of the whole body."""


class UploadSettings(Table, frozen=True, kw_only=True):
    """If this table exists, even empty, blobs used repeatedly are uploaded once to the provider's file store, and
    requests refer to them there. See docs/guides/media.md.
    """

    min_bytes: Bytes = 256 * 2**10
    """Smaller media are sent with each request."""
    keep_s: Annotated[float, Meta(ge=3_600, le=30 * 86_400)] = 86_400.0
    """How long a file is used; if its API supports expiry, the provider deletes it some time later."""


class QuirkSettings(Quirks, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quirks as written in the file: an unknown one is an error."""


class ProviderSettings(Table, frozen=True, kw_only=True):
    """One configured provider, as named by a request's `provider`. Anything left out is as in its API."""

    api: ApiName
    """A built-in API, or one added by a package."""
    base_url: HttpUrl | None = None
    path: str | None = None
    """Replaces the API's own path, below `base_url`; `{model}` stands for the request's model, `{path}` for the API's
    own path. Not for `gemini`, whose path decides whether the response streams.
    """
    path_whole: str | None = None
    """The same for requests that are not streamed; None: `path`."""
    body: dict[str, object] = {}
    """Fields set in the JSON of each request's body. Not for secrets."""
    body_without: tuple[str, ...] = ()
    """Fields left out of the JSON of each request's body."""
    query: dict[str, str] = {}
    """URL parameters of each call. Not for secrets."""
    api_key_env: str | None = None
    """Environment variable with the key; empty: the provider needs none. With `_FILE` appended to its name: the path of
    a file with the key.
    """
    api_key_file: str | None = None
    """File with the key, reread when it changes; replaces `api_key_env`."""
    auth: ImportPath | None = None
    """Replaces a key: a factory of a `tokenbus.providers.auth.Auth`, for expiring tokens and request signatures."""
    auth_options: dict[str, object] = {}
    """Arguments of the factory. Not for secrets."""
    key_header: HeaderName | None = None
    """Header that carries the key."""
    key_format: KeyFormat | None = None
    """Value of that header, with `{}` for the key. None: with `key_header` only the key, otherwise the API's format."""
    headers: dict[HeaderName, HeaderValue] = {}
    """Sent with each call. Not for secrets."""
    model_aliases: dict[str, str] = {}
    """Maps a provider's alias of a model to the name used by limits, routes and quirks. Requests for the alias are
    rewritten to that name.
    """
    connect_timeout_s: Seconds = 10.0
    first_event_timeout_s: Seconds = 120.0
    idle_timeout_s: Seconds = 60.0
    """Maximum silence within a stream."""
    progress_timeout_s: Seconds = 600.0
    """Maximum time within a stream that brings only pings and comments."""
    call_timeout_s: Seconds = 3600.0
    """Maximum duration of one call."""
    job_timeout_s: Seconds = 86400.0
    """Maximum duration of a job in the background, which may take many calls."""
    steering: bool = False
    """Sessions call it over a WebSocket, so that it takes a message with `now` into its present answer."""
    durability: DurabilityLevel | None = None
    """Of its runs, from their acceptance on; None: that of `[durability]`."""
    media: MediaSettings = MediaSettings()
    uploads: UploadSettings | None = None
    """None: no files are uploaded to this provider."""
    quirks: QuirkSettings = QuirkSettings()

    def true_model(self, model: str) -> str:
        """Resolve a requested model to the name by which this deployment knows it."""
        aliases = {model_key(alias): name for alias, name in self.model_aliases.items()}
        return aliases.get(model_key(model), model.strip())

    def __post_init__(self) -> None:
        try:
            api = registry.get(self.api)
        except SettingsError as e:
            close = None if self.api in plugins.names() else nearest(self.api, plugins.names())
            raise ValueError(f"api: {e.problem}" + (f"; did you mean {close!r}?" if close else "")) from e
        if not (self.path is self.path_whole is None or api.takes_path):
            raise ValueError(f"{self.api} supports no custom path, because its path selects streaming; use base_url")
        if self.steering and api.steering is None:
            raise ValueError(f"steering: answers of {self.api} take in no messages")
        if self.uploads is not None and api.files is None:
            raise ValueError(f"requests of {self.api} cannot refer to uploaded files")


DEFAULT_PROVIDERS = {api: ProviderSettings(api=api) for api in BUILT_IN}
"""Available without a settings file, each under the name of its API."""


# Fallback providers.


class FallbackChoice(Table, frozen=True, kw_only=True):
    """A provider and model to try."""

    provider: str
    """A name from `[providers.NAME]`."""
    model: str
    extra: dict[str, object] | None = None
    """The `extra` of its requests; a request's own `extra` goes only to the request's provider."""


class FallbackRoute(Table, frozen=True, kw_only=True):
    """Fallbacks to try if a turn fails before any of its visible text was emitted. The first route that matches a
    request applies. Criteria left out match every request.
    """

    fallback: Annotated[tuple[FallbackChoice, ...], Meta(min_length=1, max_length=8)]
    """In order of preference."""
    providers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    """Exact names, or prefixes followed by `*` (`gpt-5*`)."""
    tenants: tuple[str, ...] = ()
    """Values of `metadata.tenant`."""
    metadata: dict[str, str] = {}
    """Text values that the request's metadata must contain."""
