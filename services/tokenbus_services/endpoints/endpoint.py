"""The configured providers: address and call format of each, and its key, which never leaves this process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Collection, Mapping
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
from tokenbus_services.endpoints.auth import Key, auth_of
from tokenbus_services.media.body import MediaBody
from tokenbus_services.net.http_client import BoundedClient, reset_as_made
from tokenbus_services.redaction.redactor import LEARNED, Redaction, named_secret
from tokenbus_services.settings import ProviderSettings, Settings

_LISTS = ("anthropic-beta",)
"""Headers with list values: a call's value is appended to the settings' value instead of replacing it."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
MAX_REQUEST_S = 30.0
"""Longest time that sending a request's body may stall."""


class AuthUnavailable(Exception):
    """The custom `auth` object failed; a retry may help."""


class Endpoint:
    """One configured provider, ready to be called."""

    def __init__(self, name: str, settings: ProviderSettings, env: Mapping[str, str]) -> None:
        """Raises SettingsError for an invalid address."""
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
            # The call itself enforces the read timeout, because it knows how far the answer is.
            timeout=httpx.Timeout(None, connect=settings.connect_timeout_s, write=MAX_REQUEST_S),
            # Unbounded: a call that waited for a pool connection would look like a silent provider.
            # `limits.runs_per_fetcher` and `limits.providers` bound the number of calls.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            follow_redirects=False,
            trust_env=True,
        )

    @property
    def base_path(self) -> str:
        """The path of the base URL, without a trailing slash."""
        return self._client.base_url.path.rstrip("/")

    @property
    def redact(self) -> Redaction:
        """Redacts credentials from answers: some providers repeat a wrong key in their error.

        Includes earlier credentials, because an answer may arrive after its key was replaced.
        """
        self._learn(self._auth.secrets if self._auth else self._key.secrets)
        return self._redaction

    def _learn(self, secrets: Collection[str]) -> None:
        self._redaction.learn(secrets)
        LEARNED.learn(secrets)

    def rejected(self) -> bool:
        """Called after a 401. Returns whether another call would use different credentials."""
        return self._auth.rejected() if self._auth else self._key.rejected()

    @property
    def _credential(self) -> object:
        return (self.settings.auth, self.settings.auth_options) if self._auth else self._key.digestible

    @property
    def account(self) -> str:
        """Identifies the account that owns uploaded files: a digest of the address, the key and the fixed headers
        and query.
        """
        settings = self.settings
        identity = (settings.api, str(self._client.base_url), settings.headers, settings.query, self._credential)
        return blake2b(msgspec.json.encode(identity, order="sorted"), digest_size=16).hexdigest()

    def build(self, request: Generate, history: list[Message]) -> Built:
        """Build the call for the request's next turn, in this provider's format. Raises RequestInvalid, naming the
        field.
        """
        settings = self.settings
        built = self.api.build(request, history, settings.quirks)
        call = self._placed(built.call, built.call.path, request.model, whole=not request.stream)
        if (settings.body or settings.body_without) and call.body.startswith(b"{"):
            fields = {n: value for n, value in _fields.decode(call.body).items() if n not in settings.body_without}
            call = msgspec.structs.replace(call, body=msgspec.json.encode({**fields, **settings.body}))
        return msgspec.structs.replace(built, call=call)

    def job_call(self, call: HttpCall, model: str) -> HttpCall:
        """A call about a job of this model, whose path follows that of the call that started it."""
        assert self.api.jobs
        return self._placed(call, self.api.jobs.path, model, then=call.path)

    def _placed(self, call: HttpCall, path: str, model: str, *, then: str = "", whole: bool = False) -> HttpCall:
        """Add the settings' path and query. Raises RequestInvalid for a model that could change the path."""
        settings = self.settings
        own = settings.path_whole if whole and settings.path_whole is not None else settings.path
        if own is not None:
            path = own.replace("{path}", path).replace("{model}", _segment(model))
        return msgspec.structs.replace(call, path=path + then, query={**call.query, **settings.query})

    def quirks_of(self, request: Generate) -> Quirks:
        """The quirks for reading the answer. In prefill mode the parser gets all text, including inline thinking."""
        quirks = self.settings.quirks.of(request.model)
        return quirks if request.mode == "chat" else msgspec.structs.replace(quirks, inline_thinking=())

    def request(self, call: HttpCall, body: MediaBody | None = None) -> httpx.Request:
        """Build the HTTP request with the key header. ``body`` replaces the call's own body if media is streamed.

        Raises KeyMissing, KeyUnusable.
        """
        # Compression would batch a provider's small events and delay them.
        headers = {"accept-encoding": "identity", **self._with_configured(call.headers), **self._key_headers()}
        if body is not None:
            headers["content-length"] = str(body.size)
        content = call.body if body is None else body
        return self._client.build_request(call.method, call.path, content=content, headers=headers, params=call.query)

    def file_request(self, call: FileCall, body: MediaBody) -> httpx.Request:
        """Build one call of an upload. Raises KeyMissing, KeyUnusable; RequestInvalid if the URL is on another host."""
        ours = self._client.base_url
        headers = {"accept-encoding": "identity", **self._with_configured(call.headers)}
        if "://" in call.path:
            try:
                url, query = httpx.URL(call.path), None
                there = url.scheme, url.host, url.port
            except (httpx.InvalidURL, UnicodeError):  # the latter for a host that is no valid internationalized name
                raise RequestInvalid("file", f"{self.name} wants it uploaded to what is no address") from None
            if there != (ours.scheme, ours.host, ours.port):
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

    def forwarded(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        query: Mapping[str, str],
        content: bytes | AsyncIterable[bytes] | None,
    ) -> httpx.Request:
        """Build a call of another path of this provider, below its base URL. Raises KeyMissing, KeyUnusable.

        ``headers``: those of the settings win, and list headers are joined.
        """
        configured = {name.lower() for name in self.settings.headers} - set(_LISTS)
        allowed = {name: value for name, value in headers.items() if name not in configured}
        sent = {"accept-encoding": "identity", **self._with_configured(allowed), **self._key_headers()}
        timeout = httpx.Timeout(
            self.settings.first_event_timeout_s, connect=self.settings.connect_timeout_s, write=MAX_REQUEST_S, pool=None
        )
        params = {**query, **self.settings.query} or None
        return self._client.build_request(method, path, content=content, headers=sent, params=params, timeout=timeout)

    @property
    def needs_body(self) -> bool:
        """Whether its `auth` reads bodies, which then are held in memory."""
        return self._auth is not None and self._auth.needs_body

    def _key_headers(self) -> dict[str, str]:
        if self._auth:
            return {}
        headers = self._key.headers()
        self._learn(self._key.secrets)
        return headers

    def _with_configured(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of a call, with the settings' values put in front of list headers."""
        configured = {name.lower(): value for name, value in self.settings.headers.items()}
        return {
            name: f"{configured[name]},{value}" if name in _LISTS and name in configured else value
            for name, value in headers.items()
        }

    async def send(self, request: httpx.Request, *, authorised: bool = False) -> httpx.Response:
        """Send the request; the answer's body is still unread. ``authorised``: the URL itself carries the
        authorisation.

        Raises httpx.TransportError, AuthUnavailable.
        """
        if self._auth and not authorised:
            body = await request.aread() if self._auth.needs_body else None
            headers = {name.lower(): value for name, value in request.headers.items()}
            call = CallToSign(method=request.method, url=str(request.url), headers=headers, body=body)
            try:
                request.headers.update(await self._auth.headers(call))
            except Exception as e:  # user code may raise anything, with any content
                problem = Redaction(named_secret(self._env))(f"provider {self.name}: {type(e).__name__}: {e}")
                raise AuthUnavailable(self.redact(problem)) from e
            self._learn(self._auth.secrets)
        with reset_as_made(request):
            return await self._client.send(request, stream=True)

    async def close(self) -> None:
        """Close the connection pool."""
        await self._client.aclose()


def _segment(model: str) -> str:
    """Quote a model name as one path segment. Raises RequestInvalid if it could change the path."""
    if problem := segment_problem(model):
        raise RequestInvalid("model", problem)
    return quote(model, safe="")


class Providers:
    """All endpoints, created on first use."""

    def __init__(self, settings: Settings, env: Mapping[str, str] = os.environ) -> None:
        """Raises SettingsError if a provider's `auth` cannot be created."""
        self._settings = settings.providers
        self._env = env
        self._made: dict[str, Endpoint] = {}
        for name, provider in settings.providers.items():
            if provider.auth:
                self.get(name)  # report what cannot be loaded at startup

    def __contains__(self, name: object) -> bool:
        return name in self._settings

    @property
    def names(self) -> list[str]:
        """The configured names."""
        return sorted(self._settings)

    def get(self, name: str) -> Endpoint:
        """Return the endpoint with this name. Raises SettingsError."""
        if name not in self._settings:
            raise SettingsError("providers", name, f"not configured; there are {', '.join(self.names)}")
        if name not in self._made:
            self._made[name] = Endpoint(name, self._settings[name], self._env)
        return self._made[name]

    async def close(self) -> None:
        """Close all connection pools."""
        for endpoint in self._made.values():
            await endpoint.close()
