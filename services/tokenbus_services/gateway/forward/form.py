"""A form as it streams: the field that names the model is found, and replaced. Pure.

Nothing but that field and the heads of the parts is held. What two readers could take in two ways is refused, since the
provider must not find another model than the gateway did: a second `model`, a line end that is none, an odd boundary.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request

from tokenbus_services.gateway.http_request import hold_bytes, too_large
from tokenbus_services.gateway.problem import Refusal, invalid
from tokenbus_services.net.web_socket import FairShare
from tokenbus_services.settings import GatewaySettings

MODEL = "model"
MAX_HEAD_BYTES = 8 * 2**10
MAX_MODEL_BYTES = 512
_TYPE = re.compile(
    r"multipart/form-data\s*;\s*boundary=(?:\"([0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-])\""
    r"|([0-9A-Za-z'+_.-]{1,70}))\s*",
    re.IGNORECASE,
)
_DISPOSITION = re.compile(rb'form-data; *name="([^"\r\n]*)"(; *filename(\*?)=[^\r\n]*)?', re.IGNORECASE)
_HEADER = re.compile(rb"([A-Za-z0-9-]+): *([^\r\n]*)")


def is_form(content_type: str) -> bool:
    return content_type.lower().startswith("multipart/form-data")


class FormScan:
    """Feed it a form, and `end`. Returns what goes to the provider."""

    def __init__(self, content_type: str, rename: Callable[[str], str]) -> None:
        """``rename``: returns the provider's name of a model. Its Refusal is raised from `feed`. Raises Refusal."""
        found = _TYPE.fullmatch(content_type)
        if found is None:
            raise _malformed("its content-type has no plain boundary")
        self._mark = b"--" + (found[1] or found[2]).encode()
        self._rename = rename
        self._buffer = bytearray()
        self._step: Callable[[bytearray], bool] = self._start
        self.has_model = False
        self.growth = 0
        """How many bytes the form has grown by."""

    def feed(self, data: bytes) -> bytes:
        """Add what came. Raises Refusal."""
        self._buffer += data
        out = bytearray()
        while self._step(out):
            pass
        return bytes(out)

    def end(self) -> None:
        """The form is complete. Raises Refusal if it is not."""
        if self._step != self._end:
            raise _malformed("it breaks off")

    def _start(self, out: bytearray) -> bool:
        if len(self._buffer) < len(self._mark):
            if not self._mark.startswith(self._buffer):
                raise _malformed("it does not begin with its boundary")
            return False
        if not self._buffer.startswith(self._mark):
            raise _malformed("it does not begin with its boundary")
        return self._pass(len(self._mark), self._after_mark, out)

    def _after_mark(self, out: bytearray) -> bool:
        if len(self._buffer) < 2:
            return False
        if self._buffer.startswith(b"--"):
            return self._pass(2, self._end, out)
        if not self._buffer.startswith(b"\r\n"):
            raise _malformed("its boundary is not followed by the end of the line")
        return self._pass(2, self._head, out)

    def _head(self, out: bytearray) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or end > MAX_HEAD_BYTES:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise _malformed("the head of a part is too long")
            return False
        name, is_file = _field(bytes(self._buffer[:end]))
        step = self._body
        if name == MODEL.encode():
            if self.has_model or is_file:
                raise invalid(MODEL, "a form has one, and as a text")
            step = self._value
        return self._pass(end + 4, step, out)

    def _body(self, out: bytearray) -> bool:
        at = self._found_mark()
        if at < 0:
            kept = len(self._mark) + 1
            return len(self._buffer) > kept and self._pass(len(self._buffer) - kept, self._body, out) and False
        return self._pass(at + len(self._mark), self._after_mark, out)

    def _value(self, out: bytearray) -> bool:
        at = self._found_mark()
        if at < 0:
            if len(self._buffer) > MAX_MODEL_BYTES:
                raise invalid(MODEL, "is too long")
            return False
        given = bytes(self._buffer[: at - 2])
        try:
            name = given.decode()
        except UnicodeDecodeError:
            raise invalid(MODEL, "must be UTF-8") from None
        renamed = self._rename(name).encode()
        if b"\r" in renamed or b"\n" in renamed:
            raise invalid(MODEL, "has a line end")
        self.has_model = True
        self.growth = len(renamed) - len(given)
        out += renamed
        del self._buffer[: at - 2]
        return self._pass(2 + len(self._mark), self._after_mark, out)

    def _found_mark(self) -> int:
        """Where the next boundary is; -1 if it has not come. Raises Refusal for one in the middle of a line."""
        at = self._buffer.find(self._mark)
        if at >= 0 and bytes(self._buffer[max(0, at - 2) : at]) != b"\r\n":
            raise _malformed("its boundary is also in a part")
        return at

    def _end(self, out: bytearray) -> bool:
        if self._buffer.strip(b"\r\n"):
            raise _malformed("something follows its end")
        return self._pass(len(self._buffer), self._end, out) and False

    def _pass(self, size: int, step: Callable[[bytearray], bool], out: bytearray) -> bool:
        out += self._buffer[:size]
        del self._buffer[:size]
        self._step = step
        return True


def _field(head: bytes) -> tuple[bytes, bool]:
    """The name of a part, and whether it is a file. Raises Refusal."""
    found: list[tuple[bytes, bool]] = []
    for line in head.split(b"\r\n"):
        header = _HEADER.fullmatch(line)
        if header is None:
            raise _malformed("a part has a head that is none")
        if header[1].lower() == b"content-disposition":
            disposition = _DISPOSITION.fullmatch(header[2])
            if disposition is None:
                raise _malformed("a part has no plain name")
            found.append((disposition[1].strip(), disposition[2] is not None))
    if len(found) != 1:
        raise _malformed("a part has not one name")
    return found[0]


def _malformed(why: str) -> Refusal:
    return invalid(None, f"the form cannot be read: {why}")


class StreamedForm:
    """A form as it comes, no faster than the provider reads: `find_model` if it has one, then `content`."""

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
