"""The blob store client: plain HTTP with the standard library, streaming in both directions.

Each call opens its own connection and runs its steps one at a time in a worker thread. The event loop is never blocked,
and at most one piece of a large blob is in memory.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec

from tokenbus.blob_wire import (
    DEFAULT_URL,
    DEPLOYMENT_HEADER,
    MAX_ANSWER_BYTES,
    PATH,
    TOKEN_ENV,
    URL_ENV,
    blob_error,
    check_deployment,
)
from tokenbus.blobs import (
    DEFAULT_MEDIA_TYPE,
    BlobRef,
    blob_id_from_digest,
    parse_blob_id,
    parse_media_type,
)
from tokenbus.client.local_up import data_directory, running_in
from tokenbus.errors import BlobCorrupt, BlobTooLarge, BlobUnavailable, SettingsError
from tokenbus.secret_env import Secret, token_problem

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

PIECE_BYTES = 256 * 2**10
TIMEOUT_S = 30.0
"""Socket timeout: longest time the service may stay silent."""

T = TypeVar("T")


class Blobs:
    """Client of a blob service; implements `tokenbus.blobs.BlobStreams`. Safe to use from many tasks at once.

    Calls are not retried. If an error's ``retryable`` is true, the same call may be repeated.
    """

    _max_bytes: int | None = None
    """Largest content that `get` returns; None: any."""

    def __init__(self, url: str | None = None, *, token: str | Secret | None = None, deployment: str = "") -> None:
        """Configure the client. Does no IO except to read the token file.

        - ``url``: None for `TOKENBUS_BLOBS_URL`; if that is not set, the service of the `tokenbus up` that runs in this
          directory, or else the one at the usual port of this machine.
        - ``token``: None for `TOKENBUS_BLOB_TOKEN`, or the content of the file that `TOKENBUS_BLOB_TOKEN_FILE` names,
          read again when it changes.
        - ``deployment``: the id with which the service must answer; empty for that of the `tokenbus up` whose service
          it is, or else any.

        Raises SettingsError.
        """
        source = "blobs"
        if url is None:
            url, source = os.environ.get(URL_ENV), URL_ENV
        if not url:
            up = running_in(data_directory(os.environ))
            url = (up and up.blobs_url) or DEFAULT_URL
            deployment = deployment or (up.deployment if up else "")
        self._deployment = deployment
        self._url = url.rstrip("/")
        parts = urlsplit(self._url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError as e:
            raise SettingsError(source, "url", str(e)) from None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise SettingsError(source, "url", "must be http://host:port or https://host:port")
        self._host, self._port, self._tls = host, port, parts.scheme == "https"
        self._base = parts.path
        if isinstance(token, str) and token_problem(token):
            raise SettingsError(TOKEN_ENV, "token", "has characters that a header cannot hold")
        self._token = Secret(TOKEN_ENV, os.environ, check=token_problem) if token is None else token

    async def put(self, content: bytes | AsyncIterable[bytes], media_type: str = DEFAULT_MEDIA_TYPE) -> BlobRef:
        """Store content, given whole or in pieces, and return its reference. The same content is always the same blob.

        Requests refer to the blob by its ``blob_id``. Raises BlobTooLarge, BlobRefused, BlobUnauthorized,
        BlobStoreFull, BlobUnavailable, and whatever ``content`` raises; nothing is stored then.
        """
        async with self._call("PUT", PATH, {"Content-Type": parse_media_type(media_type)}, content) as call:
            status, answer = await call.answer(MAX_ANSWER_BYTES)
        if status != 201:
            raise blob_error(status, answer, PATH)
        try:
            return msgspec.json.decode(answer, type=BlobRef)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise BlobUnavailable(self._url, f"the answer is not from a blob service: {e}") from e

    async def get(self, blob_id: str) -> bytes:
        """Return a blob's whole content, checked against its id. Raises the same errors as `chunks`."""
        content = bytearray()
        async with aclosing(self.chunks(blob_id)) as chunks:
            async for chunk in chunks:
                content += chunk
                if self._max_bytes is not None and len(content) > self._max_bytes:
                    raise BlobTooLarge(len(content), self._max_bytes)
        return bytes(content)

    async def chunks(self, blob_id: str) -> AsyncGenerator[bytes]:
        """Yield a blob's content in pieces; the last piece is yielded only after the content matched the id.

        Reading renews the blob's lease: it is kept for as long as a run may be open. Raises BlobNotFound, BlobCorrupt,
        BlobRefused, BlobUnauthorized, BlobUnavailable.
        """
        digest = parse_blob_id(blob_id)
        hasher, held, begun = sha256(), b"", False
        try:
            async with self._call("GET", f"{PATH}/{blob_id}") as call:
                if call.status != 200:
                    status, answer = await call.answer(MAX_ANSWER_BYTES)
                    raise blob_error(status, answer, blob_id)
                begun = True
                while chunk := await call.read():
                    hasher.update(chunk)
                    if held:
                        yield held
                    held = chunk
        except BlobUnavailable as e:
            if begun:  # the service cuts the response short if the content does not match the id
                with suppress(BlobUnavailable):
                    await self.check(blob_id)
            raise e
        if hasher.hexdigest() != digest:
            raise BlobCorrupt(blob_id, f"the received content is {blob_id_from_digest(hasher.hexdigest())}")
        if held:
            yield held

    async def head(self, blob_id: str) -> BlobRef:
        """Return the reference of a stored blob without its content. Raises BlobError."""
        parse_blob_id(blob_id)
        async with self._call("HEAD", f"{PATH}/{blob_id}") as call:
            if call.status != 200:  # a HEAD response has no body with details
                code = {404: "blob_not_found", 401: "blob_unauthorized"}.get(call.status, "")
                raise blob_error(call.status, b'{"code":"%s","message":""}' % code.encode() if code else b"", blob_id)
            size, media_type = call.header("content-length") or "", call.header("content-type") or DEFAULT_MEDIA_TYPE
        if not size.isdigit():
            raise BlobUnavailable(self._url, "the answer is not from a blob service: it has no length")
        return BlobRef(blob_id=blob_id, media_type=media_type, size=int(size))

    async def lease(self, blob_id: str) -> None:
        """Keep the blob for as long as a run may be open, starting now. Raises BlobError."""
        await self._ask_for("POST", blob_id, "/lease")

    async def check(self, blob_id: str) -> None:
        """Have the service compare the content with the id. Raises BlobCorrupt if they differ, or another BlobError."""
        await self._ask_for("POST", blob_id, "/check")

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        """Store content, as `put` does; part of `tokenbus.BlobLoader`. Raises the same errors as `put`."""
        return await self.put(content, media_type)

    async def load(self, blob_id: str) -> bytes:
        """Return a blob's whole content, as `get` does; part of `tokenbus.BlobLoader`. Raises like `chunks`."""
        return await self.get(blob_id)

    async def aclose(self) -> None:
        """Do nothing: no connection stays open between calls."""

    async def _ask_for(self, method: str, blob_id: str, action: str = "") -> None:
        parse_blob_id(blob_id)
        async with self._call(method, f"{PATH}/{blob_id}{action}", {"Content-Length": "0"}) as call:
            status, answer = await call.answer(MAX_ANSWER_BYTES)
        if status != 204:
            raise blob_error(status, answer, blob_id)

    @property
    def _authorization(self) -> dict[str, str]:
        token = self._token if isinstance(self._token, str) else self._token.value
        return {"Authorization": f"Bearer {token}"} if token else {}

    @asynccontextmanager
    async def _call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | AsyncIterable[bytes] | None = None,
    ) -> AsyncGenerator[BlobAnswer]:
        """One request on its own connection, which ends with the context, whatever it waits for.

        Raises BlobUnavailable, also if another deployment answers or the body is cut short.
        """
        from http.client import HTTPConnection, HTTPSConnection  # imported only if blobs are used

        made = HTTPSConnection if self._tls else HTTPConnection
        connection = made(self._host, self._port, timeout=TIMEOUT_S, blocksize=PIECE_BYTES)
        try:
            response = await self._request(connection, method, self._base + path, headers or {}, body)
            check_deployment(self._deployment, response.getheader(DEPLOYMENT_HEADER), self._url)

            async def read() -> bytes:
                piece = await self._step(lambda: response.read1(PIECE_BYTES))
                if not piece and response.length:
                    raise BlobUnavailable(self._url, f"the answer was cut short by {response.length} bytes")
                return piece

            yield BlobAnswer(response.status, response.getheader, read)
        finally:
            if connection.sock:
                with suppress(OSError):  # ends a step that still waits in its thread
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    async def _request(
        self,
        connection: HTTPConnection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | AsyncIterable[bytes] | None,
    ) -> HTTPResponse:
        """Send the request and read the response head."""

        async def sent(data: bytes) -> bool:
            try:
                await self._step(lambda: connection.send(data))
            except BlobUnavailable:
                if connection.sock is None:
                    raise
                return False
            return True

        await self._step(lambda: connection.putrequest(method, path, skip_accept_encoding=True))
        chunked = {} if body is None else {"Transfer-Encoding": "chunked"}
        for name, value in {"Accept-Encoding": "identity", **self._authorization, **headers, **chunked}.items():
            connection.putheader(name, value)
        await self._step(connection.endheaders)
        if body is not None:
            async with aclosing(_pieces(body)) as pieces:
                async for piece in pieces:
                    if not await sent(b"%x\r\n%b\r\n" % (len(piece), piece)):
                        break  # the service answered early, for example: too large
                else:
                    await sent(b"0\r\n\r\n")
        return await self._step(connection.getresponse)

    async def _step(self, step: Callable[[], T]) -> T:
        from http.client import HTTPException

        try:
            return await asyncio.to_thread(step)
        except (OSError, HTTPException) as e:
            raise BlobUnavailable(self._url, f"{type(e).__name__} {e}".strip()) from e


@dataclass(frozen=True)
class BlobAnswer:
    """A response whose head has arrived."""

    status: int
    header: Callable[[str], str | None]
    read: Callable[[], Awaitable[bytes]]
    """The next piece of the body; empty at its end. Raises BlobUnavailable."""

    async def answer(self, limit: int) -> tuple[int, bytes]:
        """Return the status and the body, truncated to ``limit`` bytes."""
        body = bytearray()
        while len(body) < limit and (piece := await self.read()):
            body += piece
        return self.status, bytes(body[:limit])


async def _pieces(content: bytes | AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    if isinstance(content, bytes):
        for start in range(0, len(content), PIECE_BYTES):
            yield content[start : start + PIECE_BYTES]
        return
    async for piece in content:
        if piece:
            yield piece
