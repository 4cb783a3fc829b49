"""The configured providers: where and how each is called, and its key, which never leaves this process."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from hashlib import blake2b
from urllib.parse import quote

import httpx
import msgspec

from tokenbus.errors import RequestInvalid, SettingsError
from tokenbus.events.model_names import segment_problem
from tokenbus.events.requests import Generate, Message
from tokenbus.providers import registry
from tokenbus.providers.api import Built, HttpCall, Provider, Quirks
from tokenbus.providers.auth import CallToSign
from tokenbus.providers.file_api import FileCall
from tokenbus_services.fetcher.auth import Key, auth_of
from tokenbus_services.media.body import MediaBody
from tokenbus_services.net.httpx_reset_fix import reset_as_made
from tokenbus_services.net.response_heads import BoundedClient
from tokenbus_services.redaction import LEARNED, Redaction, named_secret
from tokenbus_services.settings import ProviderSettings, Settings

_LISTS = ("anthropic-beta",)
"""Headers whose values are lists, where a call's own word must not take the place of the settings'."""
MAX_REQUEST_S = 30.0
"""Longest that sending a request's body may stall."""


class AuthUnavailable(Exception):
    """What authorises the calls gave nothing; another try may help."""


class Endpoint:
    """One configured provider, ready to be called."""

    def __init__(self, name: str, settings: ProviderSettings, env: Mapping[str, str]) -> None:
        """Raises SettingsError for an address that is none."""
        self.name = name
        self.settings = settings
        self.api: Provider = registry.get(settings.api)
        self._key = Key(name, settings, self.api, env)
        self._auth = auth_of(name, settings, env)
        self._redaction = Redaction()
        self._env = env
        try:
            base_url = httpx.URL(settings.base_url or self.api.default_base_url)
        except httpx.InvalidURL as e:
            raise SettingsError("providers", f"{name}.base_url", str(e)) from None
        self._client = BoundedClient(
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
    def redact(self) -> Redaction:
        """Takes what authorises calls out of what the provider answers: some repeat a wrong key in their error. What
        authorised them before is looked for too: an answer may come after its key was replaced."""
        self._learn(self._auth.secrets if self._auth else self._key.secrets)
        return self._redaction

    def _learn(self, secrets: Collection[str]) -> None:
        self._redaction.learn(secrets)
        LEARNED.learn(secrets)

    def rejected(self) -> bool:
        """The provider answered 401. Whether a second call would be authorised by something else than the first."""
        return self._auth.rejected() if self._auth else self._key.rejected()

    @property
    def _credential(self) -> object:
        return (self.settings.auth, self.settings.auth_options) if self._auth else self._key.digestible

    @property
    def account(self) -> str:
        """Names whose files it may use: a digest of its address, its key and what it sends with each call."""
        settings = self.settings
        said = (settings.api, str(self._client.base_url), settings.headers, settings.query, self._credential)
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
        if self._auth:
            return {}
        headers = self._key.headers()
        self._learn(self._key.secrets)
        return headers

    def _with_configured(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of a call; those that are lists of what is wanted go on with what the settings have for them."""
        configured = {name.lower(): value for name, value in self.settings.headers.items()}
        return {
            name: f"{configured[name]},{value}" if name in _LISTS and name in configured else value
            for name, value in headers.items()
        }

    async def send(self, request: httpx.Request, *, authorised: bool = False) -> httpx.Response:
        """Send it; the answer's body is still to be read. ``authorised``: its address alone lets it in.

        Raises httpx.TransportError, AuthUnavailable.
        """
        if self._auth and not authorised:
            body = await request.aread() if self._auth.needs_body else None
            headers = {name.lower(): value for name, value in request.headers.items()}
            call = CallToSign(method=request.method, url=str(request.url), headers=headers, body=body)
            try:
                request.headers.update(await self._auth.headers(call))
            except Exception as e:  # whatever the user's own code raises, with whatever it was given
                problem = Redaction(named_secret(self._env))(f"provider {self.name}: {type(e).__name__}: {e}")
                raise AuthUnavailable(self.redact(problem)) from e
            self._learn(self._auth.secrets)
        with reset_as_made(request):
            return await self._client.send(request, stream=True)

    async def close(self) -> None:
        """Close the pool."""
        await self._client.aclose()


def _segment(model: str) -> str:
    """A model's name as one part of a path. Raises RequestInvalid where it could lead elsewhere."""
    if problem := segment_problem(model):
        raise RequestInvalid("model", problem)
    return quote(model, safe="")


class Providers:
    """All endpoints, made when first asked for."""

    def __init__(self, settings: Settings, env: Mapping[str, str] = os.environ) -> None:
        """Raises SettingsError for a provider's `auth` that cannot be made."""
        self._settings = settings.providers
        self._env = env
        self._made: dict[str, Endpoint] = {}
        for name, provider in settings.providers.items():
            if provider.auth:
                self.get(name)  # what cannot be loaded is told at the start

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
