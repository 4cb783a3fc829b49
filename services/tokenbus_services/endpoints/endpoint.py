"""The configured providers: address and call format of each, and its credentials, which never leave this process."""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterable, Collection, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from tokenbus.errors import RequestInvalid, SettingsError
from tokenbus.events.quirks import segment_problem
from tokenbus.events.requests import Generate, Message
from tokenbus.providers import registry
from tokenbus.providers.api import Built, HttpCall, Provider, Quirks
from tokenbus.providers.auth import Auth, CallToSign
from tokenbus.providers.file_api import FileCall
from tokenbus_services.media.locate import MediaBody
from tokenbus_services.net.http_client import Client
from tokenbus_services.redaction.known_secrets import named_secret
from tokenbus_services.redaction.redactor import LEARNED, Redaction
from tokenbus_services.settings import ProviderSettings, Settings
from tokenbus_services.settings.file import add_settings_directory_to_path

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
        self._client = Client(
            base_url=base_url,
            headers=settings.headers,
            # The call itself enforces the read timeout, because it knows how far the answer is.
            timeout=httpx.Timeout(None, connect=settings.connect_timeout_s, write=MAX_REQUEST_S),
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
        headers = {"accept-encoding": "identity", **self._with_configured(call.headers)}
        if "://" in call.path:
            url, query = self._upload_url(call.path), None
        else:
            url, query = self._client.base_url.copy_with(path=call.path, query=None), self.settings.query or None
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

    def _upload_url(self, text: str) -> httpx.URL:
        """Where an upload goes on. Raises RequestInvalid if it is on another host."""
        ours = self._client.base_url
        try:
            url = httpx.URL(text)
            there = url.scheme, url.host, url.port
        except (httpx.InvalidURL, UnicodeError):  # the latter for a host that is no valid internationalized name
            raise RequestInvalid("file", f"{self.name} wants it uploaded to what is no address") from None
        if there != (ours.scheme, ours.host, ours.port):
            raise RequestInvalid("file", f"{self.name} wants it uploaded to another address than its own")
        return url

    def forwarded(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        query: Mapping[str, str],
        content: bytes | AsyncIterable[bytes] | None,
    ) -> httpx.Request:
        """Build a call of another path of this provider. Raises KeyMissing, KeyUnusable; RequestInvalid if a URL is on
        another host.

        ``path``: from the provider's root, or the whole URL of an upload, which carries the authorisation. ``headers``:
        those of the settings win, and list headers are joined.
        """
        configured = {name.lower() for name in self.settings.headers} - set(_LISTS)
        allowed = {name: value for name, value in headers.items() if name not in configured}
        sent = {"accept-encoding": "identity", **self._with_configured(allowed)}
        if "://" in path:
            url, params = self._upload_url(path), None
        else:
            url = self._client.base_url.copy_with(path=path, query=None)
            params = {**query, **self.settings.query} or None
            sent |= self._key_headers()
        timeout = httpx.Timeout(
            self.settings.first_event_timeout_s, connect=self.settings.connect_timeout_s, write=MAX_REQUEST_S, pool=None
        )
        return self._client.build_request(method, url, content=content, headers=sent, params=params, timeout=timeout)

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
        if not authorised:
            await self.authorise(request)
        return await self._client.send(request, stream=True)

    async def authorise(self, request: httpx.Request) -> None:
        """Add what the settings' `auth` says. Raises AuthUnavailable."""
        if self._auth:
            body = await request.aread() if self._auth.needs_body else None
            headers = {name.lower(): value for name, value in request.headers.items()}
            call = CallToSign(method=request.method, url=str(request.url), headers=headers, body=body)
            try:
                request.headers.update(await self._auth.headers(call))
            except Exception as e:  # user code may raise anything, with any content
                problem = Redaction(named_secret(self._env))(f"provider {self.name}: {type(e).__name__}: {e}")
                raise AuthUnavailable(self.redact(problem)) from e
            self._learn(self._auth.secrets)

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


_MEMBERS = ("needs_body", "secrets", "headers", "rejected")


class KeyMissing(Exception):
    """Neither the environment nor a file holds the provider's key."""

    def __init__(self, name: str, where: str, problem: str = "") -> None:
        super().__init__(f"provider {name}: {where} {problem or 'holds no key'}")
        self.variable = where


class KeyUnusable(Exception):
    """The key has characters that are invalid in a header. Checked here because an HTTP library would quote it in
    its error.
    """

    def __init__(self, name: str, where: str) -> None:
        super().__init__(f"provider {name}: the key in {where} has characters that a header cannot hold")
        self.variable = where


class Key:
    """A key sent in a header. A key file is read again when it changes."""

    def __init__(self, name: str, settings: ProviderSettings, api: Provider, env: Mapping[str, str]) -> None:
        """Does not read the key file yet."""
        self._name = name
        variable = api.default_key_env if settings.api_key_env is None else settings.api_key_env
        path = settings.api_key_file or (env.get(f"{variable}_FILE") if variable else None)
        self._value = env.get(variable, "").strip() if variable and not settings.api_key_file else ""
        self._path = Path(path) if path and not self._value else None
        self._where = str(self._path) if self._path else f"the environment variable {variable}"
        self._place = str(self._path) if self._path else variable
        self._needed = bool(variable or settings.api_key_file)
        self._read: tuple[int, int, int] | None = None
        """Inode, time and size of the file when it was last read."""
        header, form = api.key_header
        if settings.key_header is not None:
            header, form = settings.key_header, "{}"
        self._header = header
        self._form = settings.key_format or form

    @property
    def secrets(self) -> Collection[str]:
        """The key that was sent last."""
        return [self._value]

    @property
    def digestible(self) -> str:
        """Input for a digest that distinguishes accounts."""
        self._look()
        return self._form.replace("{}", self._value)

    def headers(self) -> dict[str, str]:
        """Return the header with the key; empty if the provider needs none. Raises KeyMissing, KeyUnusable."""
        problem = self._look()
        if self._needed and not self._value:
            raise KeyMissing(self._name, self._where, problem)
        if not (self._value.isascii() and self._value.isprintable()):
            raise KeyUnusable(self._name, self._place)
        return {self._header: self._form.replace("{}", self._value)} if self._value else {}

    def rejected(self) -> bool:
        """Whether the key has changed since the provider rejected it."""
        before = self._value
        self._look()
        return self._value != before

    def _look(self) -> str:
        """Read the file if it changed. Returns the problem, or empty text if there is none."""
        if self._path is None:
            return ""
        try:
            found = self._path.stat()
            if self._read != (seen := (found.st_ino, found.st_mtime_ns, found.st_size)):
                self._value, self._read = self._path.read_text(encoding="utf-8").strip(), seen
        except (OSError, UnicodeDecodeError) as e:
            self._value, self._read = "", None
            return f"cannot be read: {getattr(e, 'strerror', None) or 'no text'}"
        return ""


def auth_of(name: str, settings: ProviderSettings, env: Mapping[str, str]) -> Auth | None:
    """Create the provider's custom `auth` object; None if it has none. Raises SettingsError."""
    if settings.auth is None:
        return None
    add_settings_directory_to_path(env)
    module, _, attribute = settings.auth.partition(":")
    where = f"{name}.auth"
    try:
        made: Any = getattr(importlib.import_module(module), attribute)(**settings.auth_options)
    except Exception as e:  # user code may raise anything
        raise SettingsError("providers", where, f"{settings.auth}: {type(e).__name__}: {e}") from e
    if missing := [member for member in _MEMBERS if not hasattr(made, member)]:
        raise SettingsError("providers", where, f"{settings.auth} gave a {type(made).__name__} without {missing}")
    return made
