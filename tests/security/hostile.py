"""An HTTP server that echoes everything it receives, as a provider or a tool may do with a key by mistake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def telltale() -> AsyncGenerator[str]:
    """Its url. Under ``/tool/…`` it is a tool, else a provider of Chat Completions; its behaviour is named in the
    last part of the path, or in the model's name."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = lines[0].split()[1]
        request_head = head.decode("latin-1")
        if path.startswith("/tool/"):
            await _tool(writer, path.rpartition("/")[2], request_head)
        else:
            request_body = json.loads(body)
            await _provider(
                writer, request_body["model"], request_head, answered=request_body["messages"][-1]["role"] == "tool"
            )
        await writer.drain()
    writer.close()


async def _tool(writer: asyncio.StreamWriter, what: str, request_head: str) -> None:
    match what:
        case "refuses":
            await _send(writer, "500 Oops", "text/plain", request_head)
        case "long":
            await _send(writer, "200 OK", "text/plain", "x" * 100_000 + request_head)
        case "binary":
            await _send(writer, "200 OK", "application/octet-stream", "\xff\xfe" + request_head)
        case _:
            await _send(writer, "200 OK", "text/plain", request_head)


async def _provider(writer: asyncio.StreamWriter, model: str, request_head: str, *, answered: bool) -> None:
    """``unauthorized``, ``chatty``, ``spells``, ``breaks``, or the names of tools to call with + between."""
    match model:
        case "unauthorized":
            error = json.dumps({"error": {"message": f"Incorrect API key provided: {request_head}", "type": "auth"}})
            await _send(writer, "401 Unauthorized", "application/json", error)
        case "breaks":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\n")
            await _in_pieces(writer, _event({"content": request_head}))
        case "chatty":
            await _stream(writer, _event({"content": request_head}), finish="stop")
        case "spells":
            events = [
                _event({key: request_head[at : at + step]})
                for key, step in (("content", 3), ("reasoning_content", 1))
                for at in range(0, len(request_head), step)
            ]
            await _stream(writer, b"".join(events), finish="stop")
        case _ if answered:
            await _stream(writer, _event({"content": "done"}), finish="stop")
        case _:
            calls = [
                {"index": i, "id": f"c{i}", "type": "function", "function": {"name": name, "arguments": "{}"}}
                for i, name in enumerate(model.split("+"))
            ]
            await _stream(writer, _event({"tool_calls": calls}), finish="tool_calls")


def _event(delta: object, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return (
        b"data: " + json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"
    )


async def _stream(writer: asyncio.StreamWriter, event: bytes, *, finish: str) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    await _in_pieces(writer, event + _event({}, finish) + b"data: [DONE]\n\n")


async def _send(writer: asyncio.StreamWriter, status: str, media_type: str, text: str) -> None:
    body = text.encode("latin-1")
    writer.write(
        f"HTTP/1.1 {status}\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n"
        f"request-id: {''.join(text.split())[:4000]}\r\nconnection: close\r\n\r\n".encode("latin-1")
    )
    await _in_pieces(writer, body)


async def _in_pieces(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Cut so that a secret of the head comes in several reads."""
    step = 7 if len(body) < 5_000 else 50_007
    for at in range(0, len(body), step):
        writer.write(body[at : at + step])
        await writer.drain()
        await asyncio.sleep(0)
