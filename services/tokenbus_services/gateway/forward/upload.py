"""A form of a client as content of a call: it goes on as it comes, no faster than the provider reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request

from tokenbus_services.gateway.forward.form import FormScan
from tokenbus_services.gateway.http_request import hold_bytes, too_large
from tokenbus_services.net.web_socket import FairShare
from tokenbus_services.settings import GatewaySettings


class StreamedForm:
    """`find_model` if it has one, then `content`."""

    def __init__(self, request: Request, scan: FormScan | None, room: FairShare, settings: GatewaySettings) -> None:
        """``room``: what all bodies that are held may have."""
        self._request = request
        self._pieces = request.stream()
        self._scan = scan
        self._room = room
        self._settings = settings
        self._held = bytearray()
        self._size = 0
        self.was_read = asyncio.Event()
        """Whether the client has sent all of it."""
        self.holds_all = False
        """Whether what reads the content holds it in memory."""

    async def find_model(self) -> None:
        """Read up to the form's model, or to its end. Raises Refusal, ClientDisconnect."""
        assert self._scan
        async for piece in self._pieces:
            self._held += self._checked(piece, held=True)
            if self._scan.has_model:
                return
        self._ended()

    async def content(self) -> AsyncGenerator[bytes]:
        """Yield all of it. Raises Refusal, ClientDisconnect."""
        if self._held:
            yield bytes(self._held)
            self._held.clear()
        if self.was_read.is_set():
            return
        async for piece in self._pieces:
            if data := self._checked(piece, held=self.holds_all):
                yield data
        self._ended()

    def _checked(self, piece: bytes, *, held: bool) -> bytes:
        self._size += len(piece)
        most = self._settings.body_bytes if held else self._settings.forward_bytes
        if self._size > most:
            raise too_large(most)
        if held:
            hold_bytes(self._request, len(piece), self._room)
        return self._scan.feed(piece) if self._scan else piece

    def _ended(self) -> None:
        if self._scan:
            self._scan.end()
        self.was_read.set()
