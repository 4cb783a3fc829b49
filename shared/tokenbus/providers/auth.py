"""How calls of a provider are authorised where a key in a header is not enough: tokens that expire, signatures.

`[providers.NAME] auth = "module:factory"` names what makes an `Auth` of the table's `auth_options`. docs/examples/auth
has three: AWS's SigV4, Microsoft Entra ID, Google service accounts. No IO here: a factory's object does its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

EARLY_S = 60.0
"""A token is replaced so long before it expires: a call that takes it may wait for a while."""


class CallToSign(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request, ready but for what authorises it."""

    method: str
    url: str
    """With its query."""
    headers: Mapping[str, str]
    """Lower-case names."""
    body: bytes | None = None
    """None where the `Auth` does not need it."""


class Auth(Protocol):
    """Authorises the calls of one provider; one object a process and provider, used by many tasks of one event loop."""

    needs_body: bool
    """Whether `headers` reads the call's body: it is then in memory whole."""

    @property
    def secrets(self) -> Collection[str]:
        """What it sends now and must never be seen: it is taken out of whatever the provider answers."""
        ...

    async def headers(self, call: CallToSign) -> Mapping[str, str]:
        """The headers to add to the call. What it raises ends the attempt with `auth_unavailable`, which is tried
        again."""
        ...

    def rejected(self) -> bool:
        """The provider answered 401: forget what was kept. True: with new headers the call may be taken; it is made
        once more."""
        ...


class Token(msgspec.Struct, frozen=True):
    """An access token."""

    value: str
    expires_in_s: float
    """Seconds from now."""


class TokenAuth:
    """An `Auth` over a callable that fetches a token: kept until shortly before it expires, fetched once for however
    many calls wait for it, and anew after a 401."""

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
        """``clock``: seconds that never go back (`time.monotonic`); ``lock``: an `asyncio.Lock`."""
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
