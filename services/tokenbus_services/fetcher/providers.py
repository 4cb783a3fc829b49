"""The configured providers: where and how each is called, and its key, which never leaves this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from urllib.parse import quote

import httpx
import msgspec

from tokenbus.errors import RequestInvalid, SettingsError
from tokenbus.events.requests import Generate, Message
from tokenbus.providers import registry
from tokenbus.providers.api import Built, HttpCall, Provider, Quirks
from tokenbus.providers.files import FileCall
from tokenbus_services.fetcher.media_body import MediaBody
from tokenbus_services.redaction import Redaction
from tokenbus_services.resets import reset_as_made
from tokenbus_services.settings import ProviderSettings, Settings

_LISTS = ("anthropic-beta",)
"""Headers whose values are lists, where a call's own word must not take the place of the settings'."""
MAX_REQUEST_S = 30.0
"""Longest that sending a request's body may stall."""


class KeyMissing(Exception):
    """The environment variable that should hold a provider's key is empty."""

    def __init__(self, name: str, variable: str) -> None:
        super().__init__(f"provider {name}: the environment variable {variable} holds no key")
        self.variable = variable


class KeyUnusable(Exception):
    """The key has characters that no header can hold; an HTTP library would tell them in its error."""

    def __init__(self, name: str, variable: str) -> None:
        super().__init__(f"provider {name}: the key in {variable} has characters that a header cannot hold")
        self.variable = variable


class Endpoint:
    """One configured provider, ready to be called."""

    def __init__(self, name: str, settings: ProviderSettings, env: Mapping[str, str]) -> None:
        """Raises SettingsError for an address that is none."""
        self.name = name
        self.settings = settings
        self.api: Provider = registry.get(settings.api)
        variable = self.api.default_key_env if settings.api_key_env is None else settings.api_key_env
        self._variable = variable
        self._key = env.get(variable, "").strip() if variable else ""
        self.redact = Redaction([self._key])
        """Takes the key out of what the provider answers: some repeat a wrong one in their error."""
        header, form = self.api.key_header
        if settings.key_header is not None:
            header, form = settings.key_header, "{}"
        self._key_header = header
        self._key_value = (settings.key_format or form).replace("{}", self._key)
        try:
            base_url = httpx.URL(settings.base_url or self.api.default_base_url)
        except httpx.InvalidURL as e:
            raise SettingsError("providers", f"{name}.base_url", str(e)) from None
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers=settings.headers,
            # Silence inside a stream is watched by the call itself, which knows how far the answer is.
            timeout=httpx.Timeout(None, connect=settings.connect_timeout_s, write=MAX_REQUEST_S),
            # Unbounded: a call that waited here for a connection would look like a silent provider. How many there are
            # `limits.runs_per_fetcher` says, and `limits.providers`.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            follow_redirects=False,
            trust_env=True,
        )

    @property
    def base_path(self) -> str:
        """The path of its address, without a slash at the end."""
        return self._client.base_url.path.rstrip("/")

    @property
    def account(self) -> str:
        """Names whose files it may use: a digest of its address, its key and what it sends with each call."""
        settings = self.settings
        said = (settings.api, str(self._client.base_url), settings.headers, settings.query, self._key_value)
        return blake2b(msgspec.json.encode(said, order="sorted"), digest_size=16).hexdigest()

    def build(self, request: Generate, history: list[Message]) -> Built:
        """The call for the request's next turn, as this vendor takes it. Raises RequestInvalid, naming the field."""
        settings = self.settings
        built = self.api.build(request, history, settings.quirks)
        path = built.call.path
        if settings.path is not None:
            path = settings.path.replace("{path}", path).replace("{model}", _segment(request.model))
        call = msgspec.structs.replace(built.call, path=path, query={**built.call.query, **settings.query})
        return msgspec.structs.replace(built, call=call)

    def quirks_of(self, request: Generate) -> Quirks:
        """The quirks by which the answer is read. In prefill mode all of the text is the parser's, thinking too."""
        quirks = self.settings.quirks.of(request.model)
        return quirks if request.mode == "chat" else msgspec.structs.replace(quirks, inline_thinking=())

    def request(self, call: HttpCall, body: MediaBody | None = None) -> httpx.Request:
        """The HTTP request with the key in its header; ``body`` in place of the call's own, where media is sent as it
        is read. Raises KeyMissing, KeyUnusable."""
        # Compressed, a provider's small events would come in larger clumps, and later.
        headers = {"accept-encoding": "identity", **self._with_configured(call.headers), **self._key_headers()}
        if body is not None:
            headers["content-length"] = str(body.size)
        content = call.body if body is None else body
        return self._client.build_request("POST", call.path, content=content, headers=headers, params=call.query)

    def file_request(self, call: FileCall, body: MediaBody) -> httpx.Request:
        """One call of an upload. Raises KeyMissing, KeyUnusable; RequestInvalid for a URL of somebody else's."""
        ours = self._client.base_url
        headers = {"accept-encoding": "identity", **self._with_configured(call.headers)}
        if "://" in call.path:
            url, query = httpx.URL(call.path), None
            if (url.scheme, url.host, url.port) != (ours.scheme, ours.host, ours.port):
                raise RequestInvalid("file", f"{self.name} wants it uploaded to another address than its own")
        else:
            url, query = ours.copy_with(path=call.path, query=None), self.settings.query or None
            headers |= self._key_headers()
        timeout = httpx.Timeout(
            self.settings.first_event_timeout_s, connect=self.settings.connect_timeout_s, write=MAX_REQUEST_S
        )
        if body.size:
            headers["content-length"] = str(body.size)
        content = body if body.size else None
        return self._client.build_request(
            call.method, url, content=content, headers=headers, params=query, timeout=timeout
        )

    def _key_headers(self) -> dict[str, str]:
        if self._variable and not self._key:
            raise KeyMissing(self.name, self._variable)
        if not (self._key.isascii() and self._key.isprintable()):
            raise KeyUnusable(self.name, self._variable)
        return {self._key_header: self._key_value} if self._key else {}

    def _with_configured(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of a call; those that are lists of what is wanted go on with what the settings have for them."""
        configured = {name.lower(): value for name, value in self.settings.headers.items()}
        return {
            name: f"{configured[name]},{value}" if name in _LISTS and name in configured else value
            for name, value in headers.items()
        }

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send it; the answer's body is still to be read. Raises httpx.TransportError."""
        with reset_as_made(request):
            return await self._client.send(request, stream=True)

    async def close(self) -> None:
        """Close the pool."""
        await self._client.aclose()


def _segment(model: str) -> str:
    """A model's name as one part of a path. Raises RequestInvalid where it would lead elsewhere."""
    if model in (".", ".."):
        raise RequestInvalid("model", "it is no name")
    return quote(model, safe="")


class Providers:
    """All endpoints, made when first asked for."""

    def __init__(self, settings: Settings, env: Mapping[str, str] = os.environ) -> None:
        self._settings = settings.providers
        self._env = env
        self._made: dict[str, Endpoint] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._settings

    @property
    def names(self) -> list[str]:
        """The configured names."""
        return sorted(self._settings)

    def get(self, name: str) -> Endpoint:
        """The endpoint of a configured name. Raises SettingsError."""
        if name not in self._settings:
            raise SettingsError("providers", name, f"not configured; there are {', '.join(self.names)}")
        if name not in self._made:
            self._made[name] = Endpoint(name, self._settings[name], self._env)
        return self._made[name]

    async def close(self) -> None:
        """Close all pools."""
        for endpoint in self._made.values():
            await endpoint.close()
