"""Authorization of provider calls beyond a fixed key in a header: expiring tokens and request signatures.

`[providers.NAME] auth = "module:factory"` names a factory that builds an `Auth` from the table's `auth_options`.
docs/examples/auth has three: AWS SigV4, Microsoft Entra ID, Google service accounts. No IO here; the factory's object
does its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

EARLY_S = 60.0
"""Refresh a token this many seconds before it expires: the call that uses it may be queued for a while."""


class CallToSign(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request, complete except for authorization."""

    method: str
    url: str
    """Includes the query string."""
    headers: Mapping[str, str]
    """Names are lower case."""
    body: bytes | None = None
    """None if the `Auth` does not need it."""


class Auth(Protocol):
    """Authorizes the calls of one provider. One object per process and provider, shared by many tasks of one event
    loop.
    """

    needs_body: bool
    """Whether `headers` reads the call's body; if so, the whole body is held in memory."""

    @property
    def secrets(self) -> Collection[str]:
        """Secrets currently in use. They are redacted from everything the provider returns."""
        ...

    async def headers(self, call: CallToSign) -> Mapping[str, str]:
        """Return the headers to add to the call. An exception ends the attempt with `auth_unavailable`, which is
        retryable.
        """
        ...

    def rejected(self) -> bool:
        """Handle a 401 from the provider: drop cached credentials. Return True to retry the call once with new
        headers."""
        ...


class Token(msgspec.Struct, frozen=True):
    """An access token."""

    value: str
    expires_in_s: float
    """Seconds from now."""


class TokenAuth:
    """An `Auth` that caches a fetched token until shortly before it expires.

    Concurrent calls share one fetch. A 401 forces a new one.
    """

    needs_body = False

    def __init__(
        self,
        fetch: Callable[[], Awaitable[Token]],
        *,
        clock: Callable[[], float],
        lock: AbstractAsyncContextManager[object],
        header: str = "authorization",
        form: str = "Bearer {}",
    ) -> None:
        """``clock``: monotonic seconds (`time.monotonic`); ``lock``: an `asyncio.Lock`."""
        self._fetch = fetch
        self._clock = clock
        self._header = header
        self._form = form
        self._token: Token | None = None
        self._until = 0.0
        self._lock = lock

    @property
    def secrets(self) -> Collection[str]:
        """See `Auth.secrets`."""
        return [self._token.value] if self._token else []

    async def headers(self, call: CallToSign) -> Mapping[str, str]:
        """See `Auth.headers`."""
        token = self._token
        if token is None or self._clock() >= self._until:
            token = await self._fetched()
        return {self._header: self._form.replace("{}", token.value)}

    def rejected(self) -> bool:
        """See `Auth.rejected`."""
        self._token = None
        return True

    async def _fetched(self) -> Token:
        async with self._lock:
            if self._token is None or self._clock() >= self._until:
                token = await self._fetch()
                self._token = token
                self._until = self._clock() + max(token.expires_in_s - EARLY_S, token.expires_in_s / 2)
            return self._token
