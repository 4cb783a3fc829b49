"""How to reach an MCP server: as a child process with messages as lines on stdin and stdout, or over HTTP.

The package's own transport accepts lines of any length; this one limits them. The child leads its own process group, so
that Ctrl-C in the terminal does not kill it before its calls end, and so that none of its processes is left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import anyio
import httpx2
import mcp_types as types
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from tokenbus_services.net.egress import Egress
from tokenbus_services.net.http_client import PORTS

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

END_S = 2.0
"""How long the child may take to exit after its stdin is closed, and again after SIGTERM."""
MOST_BAD_LINES = 1000
"""Maximum lines per connection that are not messages (a stray print, say); these are skipped."""
_STDERR_CHARS = 2000
MAX_PARTS = 4096
"""Maximum members of a list in a result: of its content, or of a page of tools. The package makes objects of each."""

Streams: TypeAlias = "tuple[_FewParts, MemoryObjectSendStream[SessionMessage]]"

_log = structlog.stdlib.get_logger()


@asynccontextmanager
async def child(
    server: str,
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    message_bytes: int,
    lost: Callable[[str], None],
) -> AsyncGenerator[Streams]:
    """Open the transport. Once it is closed, no process of the server is running.

    ``lost`` is called when the child stops communicating. Raises OSError if the command cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, limit=message_bytes, start_new_session=True
    )
    _log.info("mcp_server_started", server=server, pid=process.pid)
    to_session, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read, server, process, to_session, lost)
            tasks.start_soon(_write, process, from_session, lost)
            tasks.start_soon(_log_stderr, server, process)
            try:
                yield _FewParts(incoming), outgoing
            finally:
                incoming.close()
                outgoing.close()
                with anyio.CancelScope(shield=True):
                    await _end(process)
                tasks.cancel_scope.cancel()
    finally:
        # kill what the child left behind, or the child itself if the shutdown was interrupted
        _signal(process, signal.SIGKILL)
        for stream in (to_session, incoming, outgoing, from_session):
            stream.close()
        # No public API closes the pipes while another process may hold their other ends.
        if transport := getattr(process, "_transport", None):
            transport.close()


class _FewParts:
    """What a server sends, where a result of too many parts is an error of its call: nothing is made of the parts."""

    def __init__(self, received: Any) -> None:
        """``received``: the stream that it replaces."""
        self._received = received

    def __getattr__(self, name: str) -> Any:
        return getattr(self._received, name)

    async def __aenter__(self) -> Self:
        await self._received.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> bool | None:
        return await self._received.__aexit__(exc_type, exc_val, exc_tb)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return _bounded(await self._received.__anext__())

    async def receive(self) -> SessionMessage | Exception:
        return _bounded(await self._received.receive())

    async def aclose(self) -> None:
        await self._received.aclose()


def _bounded(item: SessionMessage | Exception) -> SessionMessage | Exception:
    if isinstance(item, SessionMessage) and isinstance(item.message, types.JSONRPCResponse):
        for name, value in item.message.result.items():
            if isinstance(value, list) and len(value) > MAX_PARTS:  # pyright: ignore[reportUnknownArgumentType]
                error = types.ErrorData(code=types.INTERNAL_ERROR, message=f"over {MAX_PARTS} parts in `{name[:40]}`")
                return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=item.message.id, error=error))
    return item


async def _read(
    server: str,
    process: Process,
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    lost: Callable[[str], None],
) -> None:
    assert process.stdout
    bad = 0
    problem = "it exited"
    async with to_session:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the session is over
            while bad <= MOST_BAD_LINES:
                try:
                    line = await process.stdout.readuntil(b"\n")
                except asyncio.LimitOverrunError:
                    problem = "it sent a message over `limits.mcp_message_bytes`"
                    break
                except (asyncio.IncompleteReadError, OSError):
                    break
                try:
                    message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    bad += 1
                    if bad == 1:
                        _log.warning("mcp_stdout_not_a_message", server=server, line=repr(line[:200]))
                    continue
                await to_session.send(SessionMessage(message))
            else:
                problem = f"it wrote over {MOST_BAD_LINES} lines that are not messages"
        lost(problem)


async def _write(
    process: Process, from_session: MemoryObjectReceiveStream[SessionMessage], lost: Callable[[str], None]
) -> None:
    assert process.stdin
    async with from_session:
        try:
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
        except OSError:
            lost("it accepts no more input")


async def _log_stderr(server: str, process: Process) -> None:
    assert process.stderr
    with suppress(OSError):
        while text := await process.stderr.read(_STDERR_CHARS):
            _log.debug("mcp_stderr", server=server, text=text.decode(errors="replace"))


async def _end(process: Process) -> None:
    """Shut down in the order of https://modelcontextprotocol.io/specification/2025-11-25/basic/lifecycle#shutdown."""
    assert process.stdin
    process.stdin.close()
    if await _ended(process):
        return
    _signal(process, signal.SIGTERM)
    if await _ended(process):
        return
    _signal(process, signal.SIGKILL)
    await _ended(process)


async def _ended(process: Process) -> bool:
    # `Process.wait` also waits for the pipes to close, which a grandchild may hold open.
    with anyio.move_on_after(END_S):
        while process.returncode is None:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    return process.returncode is not None


def _signal(process: Process, number: signal.Signals) -> None:
    """Signal the whole group, whose id is the child's pid."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


CONNECT_S = 10.0


@asynccontextmanager
async def endpoint(
    url: str, headers: Callable[[], Mapping[str, str]], egress: Egress, *, message_bytes: int
) -> AsyncGenerator[TransportStreams]:
    """Open the transport. Redirects must stay within the URL's origin and ``egress``. A message over the limit fails
    the request that it answers. ``headers`` is called for each request.
    """

    async def authorize(request: httpx2.Request) -> None:
        request.headers.update({**headers(), "Accept-Encoding": "identity"})

    async def bound(response: httpx2.Response) -> None:
        # The package limits events, but not single responses or their decompressed size.
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.DecodingError("the response is compressed, which was not requested")
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream, message_bytes)

    async with (
        httpx2.AsyncClient(
            transport=_Guarded(egress),
            # Each call has its own timeout, and an event stream may be silent for long.
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            event_hooks={"request": [authorize], "response": [bound]},
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=message_bytes) as streams,
    ):
        yield _FewParts(streams[0]), streams[1]


class _Guarded(httpx2.AsyncHTTPTransport):
    """`GuardedTransport` for the package's HTTP client. It has one host, so one pool is enough."""

    def __init__(self, egress: Egress) -> None:
        super().__init__()
        self._egress = egress

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        timeout = request.extensions.get("timeout", {}).get("connect")
        try:
            addresses = await self._egress.addresses(url.host, url.port or PORTS[url.scheme], timeout=timeout)
        except TimeoutError as e:
            raise httpx2.ConnectTimeout(f"no address of {url.host} in time", request=request) from e
        except OSError as e:
            raise httpx2.ConnectError(str(e), request=request) from e
        for address in addresses[:-1]:
            try:
                return await super().handle_async_request(_to(address, request))
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue  # nothing was sent yet
        return await super().handle_async_request(_to(addresses[-1], request))


def _to(address: str, request: httpx2.Request) -> httpx2.Request:
    """The same request, sent to this address under its original host name."""
    return httpx2.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )


class _Bounded(httpx2.AsyncByteStream):
    """A body that raises an error if it exceeds a limit."""

    def __init__(self, body: httpx2.AsyncByteStream, limit: int) -> None:
        self._body = body
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._limit
        async for chunk in self._body:
            left -= len(chunk)
            if left < 0:
                raise httpx2.StreamError(f"over {self._limit} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._body.aclose()
