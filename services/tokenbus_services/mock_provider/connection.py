"""One HTTP/1.1 connection on asyncio streams. h11 parses requests and writes heads; bodies are chunked here.

Each intended client read is one HTTP chunk, one write and one drain to an empty buffer, on a socket with TCP_NODELAY.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

import h11

from tokenbus_services.mock_provider.reply import STAMP
from tokenbus_services.mock_provider.request_log import HttpRequest

MAX_REQUEST_BYTES = 64 * 2**20
_READ_BYTES = 64 * 2**10
_STAMP = STAMP.encode()
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class BadRequest(Exception):
    """Invalid or unsupported request bytes; the connection closes after the response."""

    def __init__(self, status: HTTPStatus, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class AcceptedConnection:
    """Receives requests and sends responses. Methods raise OSError if the client has disconnected."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER)
        # With a high-water mark of 0, drain waits until the kernel has taken everything, so reads are never merged
        # here.
        writer.transport.set_write_buffer_limits(high=0)
        self._socket: socket.socket = writer.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def receive(self) -> HttpRequest | None:
        """Return the next request; None if the client closed before one began. Raises BadRequest."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        request: h11.Request | None = None
        body = bytearray()
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as e:
                raise BadRequest(HTTPStatus(e.error_status_hint), str(e)) from None
            if event is h11.NEED_DATA:
                await self._read_more()
            elif isinstance(event, h11.Request):
                request = event
                if request.http_version != b"1.1":
                    raise BadRequest(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.1 only")
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_REQUEST_BYTES:
                    raise BadRequest(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MAX_REQUEST_BYTES} bytes")
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                return _received(request, bytes(body))
            else:
                return None

    async def _read_more(self) -> None:
        if self._http.they_are_waiting_for_100_continue:
            await self._write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
        self._http.receive_data(await self._reader.read(_READ_BYTES))

    async def wait_disconnected(self) -> None:
        """Return when the client has closed its side, or sends data that is not allowed during a response."""
        early = 0
        while data := await self._reader.read(_READ_BYTES):
            self._http.receive_data(data)
            early += len(data)
            if early > MAX_REQUEST_BYTES:
                return

    async def send_head(self, status: int, headers: dict[str, str]) -> None:
        """Send the response head in a separate read."""
        fields = {"date": formatdate(usegmt=True), **headers}  # without a length, so h11 declares it chunked
        head = h11.Response(status_code=status, headers=list(fields.items()), reason=_PHRASES.get(status, ""))
        await self._write(self._http.send(head))

    async def send_reads(self, reads: Iterable[bytes], pace: float | None, sent: Callable[[int], None]) -> None:
        """Send body reads at ``pace`` per second, or as fast as they are taken; ``sent`` is called with the size of
        each.

        The pace is kept on average: a late read does not delay later ones.
        """
        framed = [(len(read), b"%x\r\n%b\r\n" % (len(read), read), _STAMP in read) for read in reads]
        now = asyncio.get_running_loop().time
        start = now()
        for number, (size, chunk, stamped) in enumerate(framed):
            # Yields to the event loop at least once, so that no connection starves the others.
            await asyncio.sleep(max(0.0, start + number / pace - now()) if pace else 0)
            await self._write(chunk.replace(_STAMP, b"%019d" % time.monotonic_ns()) if stamped else chunk)
            sent(size)

    async def send_end(self) -> bool:
        """End the body. Return False if the connection accepts no further request."""
        await self._write(self._http.send(h11.EndOfMessage()))
        return self._http.our_state is h11.DONE

    async def reject(self, bad: BadRequest) -> None:
        """Send a plain error response to an invalid request, as the last response."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = str(bad).encode()
        head = [("content-type", "text/plain"), ("content-length", str(len(body))), ("connection", "close")]
        await self._write(self._http.send(h11.Response(status_code=bad.status, headers=head)))
        await self._write(self._http.send(h11.Data(data=body)))
        await self._write(self._http.send(h11.EndOfMessage()))

    def reset(self) -> None:
        """Make the following close a TCP reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def close(self) -> None:
        """Close the connection immediately. Nothing is lost: written data is already in the kernel."""
        self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _write(self, data: bytes | None) -> None:
        try:
            self._writer.write(data or b"")
        except RuntimeError as e:  # uvloop reports a reset by the client this way
            raise ConnectionResetError(str(e)) from e
        await self._writer.drain()


def _received(request: h11.Request, body: bytes) -> HttpRequest:
    try:
        target = urlsplit(request.target.decode("ascii"))
    except ValueError as e:
        raise BadRequest(HTTPStatus.BAD_REQUEST, str(e)) from None
    return HttpRequest(
        method=request.method.decode("ascii"),
        path=target.path,
        query=dict(parse_qsl(target.query)),
        headers={name.decode("ascii"): value.decode("latin-1") for name, value in request.headers},
        body=body,
    )
