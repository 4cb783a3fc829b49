"""Fixes for behaviours of redis-py and uvloop that break workers.

On Python 3.11 redis-py may swallow the cancellation of a task. It writes each command under `asyncio.wait_for`, which
before Python 3.12 returns the result and drops the cancellation if both occur at once
(https://github.com/python/cpython/issues/86296); the task then runs forever. `wait_for` also creates a task per
command, on the hot path. `asyncio.timeout` does neither.

Each command is a `beat` of its task, also those that set up a connection and those of a pipeline: at a slow server one
call of redis-py may need several answers.

A server sends a value of any size that somebody wrote, and redis-py keeps it in memory before it looks at it. Here a
value that is announced as larger than `MAX_VALUE_BYTES` closes the connection at its first bytes (`ValueTooLarge`).
A larger reply than `_LOOKED_AT_BYTES` has the time of a command for each such part: how long the whole takes says
nothing of the server, but much of the network and of a busy machine. Both only with hiredis, which all services have.

uvloop raises a plain RuntimeError for a write to a transport that the peer has reset, while asyncio silently drops the
bytes. Here it becomes a ConnectionError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import cache
from typing import Any

from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as NoReply

from tokenbus.bus.liveness import beat
from tokenbus.bus.server.error_replies import ValueTooLarge

try:
    from redis._parsers.hiredis import _AsyncHiredisParser as _HiredisParser  # pyright: ignore
except ImportError:
    _HiredisParser = None

MAX_VALUE_BYTES = 96 * 2**20
"""Largest value of a reply. `proto-max-bulk-len` should be the same, so that no larger one gets into the server. The
largest of our own is a turn's history, bounded by `limits.turn_bytes`.
"""
_LOOKED_AT_BYTES = 2**20
"""A reply that is complete within this many bytes is not looked at."""


class AnnouncedSizes:
    """The sizes of the values that a RESP reply announces, followed from its first byte."""

    def __init__(self) -> None:
        self._inside = 0
        """Bytes of the present value, and of its line end, that have not come yet."""
        self._line = b""

    def follow(self, piece: bytes) -> None:
        """Take the next bytes of the reply. Raises ValueTooLarge."""
        at = 0
        while at < len(piece):
            if self._inside:
                taken = min(self._inside, len(piece) - at)
                at, self._inside = at + taken, self._inside - taken
                continue
            end = piece.find(b"\n", at)
            if end < 0:
                self._line += piece[at:]
                return
            line, self._line, at = self._line + piece[at:end], b"", end + 1
            if line[:1] in (b"$", b"=") and (size := int(line[1:])) >= 0:
                if size > MAX_VALUE_BYTES:
                    raise ValueTooLarge(f"a value of {size} bytes: at most {MAX_VALUE_BYTES} are read")
                self._inside = size + 2


def _bounded_parser() -> type[Any] | None:
    """hiredis's parser, which stops at a value that is too large. None: hiredis is not installed."""
    if _HiredisParser is None:
        return None
    parent: Any = _HiredisParser

    class Bounded(parent):
        _unread: list[bytes]
        _bytes: int
        _sizes: AnnouncedSizes | None
        _reader: Any
        _stream: Any
        _read_size: int
        _connection: Any

        def on_connect(self, connection: Any) -> None:
            self._connection = connection
            parent.on_connect(self, connection)

        def on_disconnect(self) -> None:
            self._connection = None
            parent.on_disconnect(self)

        async def read_response(self, disable_decoding: bool = False, push_request: bool = False) -> Any:
            self._unread, self._bytes, self._sizes = [], 0, None
            # Bytes of this reply that came with the one before are not seen here: then it is not followed.
            self._follows = not (self._reader and self._reader.has_data())
            return await parent.read_response(self, disable_decoding=disable_decoding, push_request=push_request)

        async def read_from_socket(self) -> bool:
            piece = await self._stream.read(self._read_size)
            if not piece:
                raise ConnectionLost("Connection closed by server.")
            parts = self._bytes // _LOOKED_AT_BYTES
            self._bytes += len(piece)
            if self._bytes // _LOOKED_AT_BYTES > parts and self._connection:
                beat()
                self._connection.update_current_socket_timeout(-1)  # begins anew
            if self._follows:
                self._unread.append(piece)
                if self._bytes > _LOOKED_AT_BYTES:
                    sizes = self._sizes = self._sizes or AnnouncedSizes()
                    pieces, self._unread = self._unread, []
                    for each in pieces:
                        sizes.follow(each)
            self._reader.feed(piece)
            return True

    return Bounded


_PARSER = _bounded_parser()


@cache
def prompt(kind: Any) -> type[Any]:
    """redis-py's connection class ``kind``, with its write timeout implemented by `asyncio.timeout`."""

    class Prompt(kind):
        socket_timeout: float | None
        _writer: Any

        def set_parser(self, parser_class: type[Any]) -> None:
            kind.set_parser(self, _PARSER if parser_class is _HiredisParser else parser_class)

        async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
            beat()
            limit, self.socket_timeout = self.socket_timeout, None
            try:
                async with asyncio.timeout(limit):
                    await kind.send_packed_command(self, command, check_health)
            except TimeoutError as e:  # redis-py's own type, by which its Cluster client recognises a failing node
                raise NoReply("the server takes nothing") from e
            except RuntimeError as e:  # redis-py has closed the connection by now
                raise ConnectionLost(str(e)) from e
            except AttributeError as e:  # another task closed it while this one connected: redis-py has no writer
                if self._writer is not None:
                    raise
                raise ConnectionLost("the connection was closed while a command was sent") from e
            finally:
                self.socket_timeout = limit

    return Prompt
