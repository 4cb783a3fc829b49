"""Signed texts, for cookies and links: any gateway of the deployment can check them, and none keeps a list."""

from __future__ import annotations

import asyncio
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from hmac import compare_digest
from hmac import digest as hmac_digest
from typing import Protocol, TypeVar

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server, translated

_SECRET_BYTES = 32
_SIGNATURE_BYTES = 32
_READ_AGAIN_S = 5.0
MAX_TEXT = 2048

S = TypeVar("S", bound=msgspec.Struct)


class SecretSource(Protocol):
    """Source of the deployment's secret."""

    async def read(self) -> bytes:
        """The secret. Raises ServerError."""
        ...


class StoredSecret:
    """Random bytes in Redis, made by the first gateway that needs them."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._key = keys.console_secret

    async def read(self) -> bytes:
        """See `SecretSource`."""
        with translated(self._server, self._key):
            await self._server.client.set(self._key, secrets.token_bytes(_SECRET_BYTES), nx=True)
            found: bytes | None = await self._server.client.get(self._key)
        assert found is not None
        return found


class Signer:
    """Signs small structs. A text is for one purpose alone, its ``kind``."""

    def __init__(self, source: SecretSource) -> None:
        self._source = source
        self._secret = b""
        self._read_at = 0.0
        self._reading = asyncio.Lock()

    async def sign(self, kind: str, value: msgspec.Struct) -> str:
        """The value as a text that `check` accepts. Raises ServerError if the secret cannot be read."""
        body = msgspec.msgpack.encode(value)
        return _text(body + await self._signature(kind, body))

    async def check(self, kind: str, text: str, of: type[S]) -> S | None:
        """The value in a signed text; None if it was not signed here, or for another purpose.

        Raises ServerError if the secret cannot be read.
        """
        data = _bytes(text)
        if data is None or len(data) <= _SIGNATURE_BYTES:
            return None
        body, given = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
        matches = compare_digest(given, await self._signature(kind, body))
        if not matches and await self._read_again():  # the server came back empty, and another gateway made a new one
            matches = compare_digest(given, await self._signature(kind, body))
        if not matches:
            return None
        try:
            return msgspec.msgpack.decode(body, type=of)
        except msgspec.DecodeError:
            return None  # of another version

    async def token(self, kind: str, text: str) -> str:
        """A short text that only this deployment can derive from ``text``."""
        return _text((await self._signature(kind, text.encode()))[:18])

    async def _signature(self, kind: str, body: bytes) -> bytes:
        if not self._secret:
            await self._read_again()
        return hmac_digest(self._secret, kind.encode() + b"\0" + body, sha256)

    async def _read_again(self) -> bool:
        """Read the secret, unless that was a moment ago; returns whether it is another one now."""
        async with self._reading:
            now, before = time.monotonic(), self._secret
            if before and now - self._read_at < _READ_AGAIN_S:
                return False
            self._secret = await self._source.read()
            self._read_at = now
            return self._secret != before


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes | None:
    if len(text) > MAX_TEXT or not text.isascii():
        return None
    try:
        return urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
