"""How other services reach the blob store: over HTTP, by content address, checked on arrival."""

from __future__ import annotations

from collections.abc import AsyncIterable
from hashlib import sha256
from http import HTTPStatus
from typing import Protocol, Self

import httpx
import msgspec

from tokenbus.blobs import BlobRef, blob_id_from_digest, parse_blob_id, parse_media_type
from tokenbus.errors import BlobError, BlobNotFound, BlobRefused, BlobStoreFull, BlobTooLarge, BlobUnavailable
from tokenbus_services.blobs.http import PATH, BlobProblem
from tokenbus_services.settings import BlobSettings

_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
_MAX_ANSWER_BYTES = 64 * 2**10


class BlobLoader(Protocol):
    """What fetcher and tools need of the blob store."""

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        """Store content; the same content again is the same blob. Raises BlobError, and what ``content`` raises."""
        ...

    async def load(self, blob_id: str) -> bytes:
        """A blob's whole content. Raises BlobError."""
        ...

    async def aclose(self) -> None:
        """Give up its connections."""
        ...


class HttpBlobs:
    """The blob service at ``base_url``, over one connection pool; close it with ``aclose`` or ``async with``.

    A call is tried once: every error whose ``retryable`` is true may be tried again as it is.
    """

    def __init__(self, base_url: str, *, max_bytes: int = BlobSettings().max_bytes) -> None:
        self._max_bytes = max_bytes
        self._http = httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT, headers={"Accept-Encoding": "identity"})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        """Store content under its address, in one upload that leaves nothing behind if ``content`` breaks off.

        Raises BlobTooLarge, BlobRefused, BlobStoreFull, BlobUnavailable, and what ``content`` raises.
        """
        request = self._http.build_request(
            "PUT", PATH, content=content, headers={"Content-Type": parse_media_type(media_type)}
        )
        status, answer = await self._send(request, limit=_MAX_ANSWER_BYTES)
        if status != HTTPStatus.CREATED:
            raise _error(status, answer, PATH)
        try:
            return msgspec.json.decode(answer, type=BlobRef)
        except msgspec.DecodeError as e:
            raise BlobUnavailable(PATH, f"the answer is not from a blob service: {e}") from e

    async def load(self, blob_id: str) -> bytes:
        """A blob's whole content, checked against its id.

        Raises BlobNotFound, BlobTooLarge where it is over ``max_bytes``, BlobRefused, BlobUnavailable.
        """
        digest = parse_blob_id(blob_id)
        request = self._http.build_request("GET", f"{PATH}/{blob_id}")
        status, content = await self._send(request, limit=self._max_bytes)
        if status != HTTPStatus.OK:
            raise _error(status, content, blob_id)
        found = sha256(content).hexdigest()
        if found != digest:
            raise BlobRefused(blob_id, f"the content that came is {blob_id_from_digest(found)}")
        return content

    async def _send(self, request: httpx.Request, *, limit: int) -> tuple[int, bytes]:
        """Status and body of the answer. Raises BlobTooLarge where the body is over the limit, BlobUnavailable."""
        body = bytearray()
        try:
            response = await self._http.send(request, stream=True)
            try:
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > limit:
                        raise BlobTooLarge(len(body), limit)
            finally:
                await response.aclose()
        except httpx.HTTPError as e:
            raise BlobUnavailable(str(self._http.base_url), f"{type(e).__name__} {e}".strip()) from e
        return response.status_code, bytes(body)


def _error(status: int, answer: bytes, what: str) -> BlobError:
    """The service's error answer as the error that it stands for."""
    try:
        problem = msgspec.json.decode(answer, type=BlobProblem)
    except msgspec.DecodeError:
        problem = BlobProblem(code="", message=f"HTTP {status}")
    match problem.code:
        case BlobNotFound.code:
            return BlobNotFound(what)
        case BlobTooLarge.code:
            return BlobTooLarge(problem.size or 0, problem.limit or 0)
        case BlobRefused.code:
            return BlobRefused(what, problem.message)
        case BlobStoreFull.code:
            return BlobStoreFull(what, problem.message)
        case _:
            return BlobUnavailable(what, problem.message)
