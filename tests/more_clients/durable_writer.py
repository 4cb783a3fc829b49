"""Streams of the suite in front of the gateway, for the conformance suite of Durable Streams alone.

The gateway serves run logs for reading, and every test of the suite makes its stream first. So `Writer` writes a
stream's messages as events of a run's log, and its end as the run's. Sessions are written through the gateway, so
`SessionStreams` only puts a stream's messages, of any type, into texts. In both, every answer is the gateway's own,
status and headers as they are: only the events of a body are taken apart into the messages that were written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from hashlib import sha256
from typing import Any

import httpx
import msgspec
from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tokenbus.bus.keys import Keys
from tokenbus.events.public import Completed, Timing, encode

CLOSED = "stream-closed"
TTL_S = 600
_ASKED = ("accept", "if-none-match", "origin")
_OWN = ("content-length", "transfer-encoding", "date", "server", "connection", "x-request-id", "request-id")


class Stream:
    def __init__(self, name: str, content_type: str) -> None:
        self.run = f"ds-{sha256(name.encode()).hexdigest()[:24]}"
        self.content_type = content_type
        self.count = 0
        self.closed = False
        self.lock = asyncio.Lock()

    @property
    def is_json(self) -> bool:
        return self.content_type.partition(";")[0].strip().lower() == "application/json"

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer to a write."""
        headers = {"content-type": self.content_type, "stream-next-offset": f"{self.count:016d}"}
        return {**headers, CLOSED: "true"} if self.closed else headers

    def messages_of(self, body: bytes) -> list[Any]:
        """The messages in a body: of JSON, an array's elements. Raises msgspec.DecodeError."""
        if not self.is_json:
            return [body.decode("latin-1")] if body else []  # any bytes, as a text
        value = msgspec.json.decode(body) if body else []
        return value if isinstance(value, list) else [value]

    def written(self, events: list[Any]) -> list[Any]:
        """The messages among a page's events; the run's end is none."""
        return [event["message"] for event in events if "message" in event]

    def body(self, messages: list[Any]) -> bytes:
        return msgspec.json.encode(messages) if self.is_json else "".join(messages).encode("latin-1")

    def frame(self, messages: list[Any]) -> bytes:
        """As the data of an event: each end of a line begins another `data:`."""
        text = self.body(messages).decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
        return ("event: data\n" + "".join(f"data:{line}\n" for line in text.split("\n")) + "\n").encode()


class Writer:
    def __init__(self, gateway: str, redis_url: str, keys: Keys) -> None:
        self._redis: Any = Redis.from_url(redis_url, protocol=2)
        self._keys = keys
        self._http = httpx.AsyncClient(base_url=gateway, timeout=120)
        self._streams: dict[str, Stream] = {}
        handlers = {"PUT": self._make, "POST": self._append, "DELETE": self._delete, "GET": self._read}

        async def handle(request: Request) -> Response:
            return await handlers.get(request.method, self._read)(request)

        methods = [*handlers, "HEAD", "OPTIONS"]
        self.app = Starlette(routes=[Route("/v1/stream/{name:path}", handle, methods=methods)])

    async def aclose(self) -> None:
        """Close its connections."""
        await self._http.aclose()
        await self._redis.aclose()

    async def _make(self, request: Request) -> Response:
        name, kind = request.path_params["name"], request.headers.get("content-type", "application/octet-stream")
        if stream := self._streams.get(name):
            same = stream.content_type.lower() == kind.lower()
            return Response(status_code=200 if same else 409, headers=stream.headers)
        stream = Stream(name, kind)
        try:
            messages = stream.messages_of(await request.body())
        except msgspec.DecodeError:
            return Response(status_code=400)
        self._streams[name] = stream
        await self._redis.hset(self._keys.run(stream.run), mapping={"status": "open", "request": b"{}"})
        await self._redis.expire(self._keys.run(stream.run), TTL_S)
        await self._write(stream, messages, close=request.headers.get(CLOSED) == "true")
        return Response(status_code=201, headers={**stream.headers, "location": str(request.url)})

    async def _append(self, request: Request) -> Response:
        stream = self._streams.get(request.path_params["name"])
        if stream is None:
            return Response(status_code=404)
        close, body = request.headers.get(CLOSED) == "true", await request.body()
        kind = request.headers.get("content-type", "")
        if body and kind.partition(";")[0].lower() != stream.content_type.partition(";")[0].lower():
            return Response(status_code=409)
        try:
            messages = stream.messages_of(body)
        except msgspec.DecodeError:
            return Response(status_code=400)
        if not messages and not close:
            return Response(status_code=400)
        await self._write(stream, messages, close=close)
        headers = {name: value for name, value in stream.headers.items() if name != "content-type"}
        return Response(status_code=204, headers=headers)

    async def _write(self, stream: Stream, messages: list[Any], *, close: bool) -> None:
        """Append the messages, and the end, all at once."""
        log = self._keys.log(stream.run)
        async with stream.lock:
            entries: list[bytes] = []
            for seq, message in enumerate(messages, stream.count):
                event = {"type": "written", "run": stream.run, "seq": seq, "turn": 0, "attempt": 1, "message": message}
                entries.append(msgspec.json.encode(event))
            if close and not stream.closed:
                seq = stream.count + len(messages)
                end = Completed(run=stream.run, seq=seq, turn=0, attempt=1, finish="stop", timing=Timing(total_ms=0))
                entries.append(encode(end))
                stream.closed = True
            async with self._redis.pipeline(transaction=True) as pipe:
                for seq, entry in enumerate(entries, stream.count):
                    pipe.xadd(log, {"__data__": entry}, id=f"1-{seq}")
                if entries:
                    pipe.expire(log, TTL_S)
                    await pipe.execute()
            stream.count += len(entries)

    async def _delete(self, request: Request) -> Response:
        stream = self._streams.pop(request.path_params["name"], None)
        if stream is None:
            return Response(status_code=404)
        await self._redis.delete(self._keys.run(stream.run), self._keys.log(stream.run))
        return Response(status_code=204)

    async def _read(self, request: Request) -> Response:
        """The gateway's answer, with messages in place of events."""
        name = request.path_params["name"]
        stream = self._streams.get(name)
        path = f"/v1/stream/{stream.run if stream else 'nobody'}"
        http_request = self._http.build_request(
            request.method,
            f"{path}?{request.url.query}" if request.url.query else path,
            headers={n: v for n, v in request.headers.items() if n in _ASKED or n.startswith("access-control-")},
        )
        answer = await self._http.send(http_request, stream=True)
        headers = {n: v for n, v in answer.headers.items() if n not in _OWN}
        if stream and answer.status_code == 200 and headers["content-type"].startswith("text/event-stream"):
            return StreamingResponse(_frames(stream, answer), 200, headers)
        data = await answer.aread()
        await answer.aclose()
        if stream is None or answer.status_code != 200:
            return Response(data, answer.status_code, headers)
        headers["content-type"] = stream.content_type
        if request.method == "HEAD":
            return Response(status_code=200, headers=headers)
        messages = stream.written(msgspec.json.decode(data))
        if not messages and request.query_params.get("live") == "long-poll":
            return Response(status_code=204, headers=headers)  # the end alone, which is no message
        return Response(stream.body(messages), 200, headers)


class SessionStreams(Writer):
    """Each stream is a session of the model, whose first run never ends: all that follows waits."""

    def __init__(self, gateway: str, redis_url: str, keys: Keys, *, model: str) -> None:
        super().__init__(gateway, redis_url, keys)
        self._model = model

    async def _make(self, request: Request) -> Response:
        name, kind = request.path_params["name"], request.headers.get("content-type", "application/octet-stream")
        known = self._streams.get(name)
        stream = known or SessionStream(name, kind)
        answer = await self._sent(request, stream, kind, f"?model={self._model}")
        if answer.status_code == 201:
            self._streams[name] = stream
            answer.headers["location"] = str(request.url)
        return answer

    async def _append(self, request: Request) -> Response:
        name = request.path_params["name"]
        stream = self._streams.get(name) or SessionStream(name, "text/plain")
        return await self._sent(request, stream, request.headers.get("content-type", ""))

    async def _delete(self, request: Request) -> Response:
        stream = self._streams.pop(request.path_params["name"], None)
        answer = await self._http.delete(f"/v1/stream/{stream.run if stream else 'sessions/nobody'}")
        return Response(answer.content, answer.status_code, _without(answer.headers))

    async def _sent(self, request: Request, stream: Stream, kind: str, query: str = "") -> Response:
        """The gateway's answer to a writer."""
        body = await request.body()
        same = kind.partition(";")[0].strip().lower() == stream.content_type.partition(";")[0].strip().lower()
        try:
            messages = stream.messages_of(body)
            texts = [msgspec.json.encode(each).decode() if stream.is_json else each for each in messages]
            content = msgspec.json.encode(texts) if body else b""
        except msgspec.DecodeError:
            content = body
        headers = {n: v for n, v in request.headers.items() if n.startswith(("producer-", "stream-"))}
        headers["content-type"] = "application/json" if same else "application/x-other"
        answer = await self._http.request(
            request.method, f"/v1/stream/{stream.run}{query}", content=content, headers=headers
        )
        told = {
            **_without(answer.headers),
            **({"content-type": stream.content_type} if request.method == "PUT" else {}),
        }
        return Response(answer.content, answer.status_code, told)


class SessionStream(Stream):
    """Its messages are the texts that were appended to a session."""

    def __init__(self, name: str, content_type: str) -> None:
        super().__init__(name, content_type)
        self.run = f"sessions/{self.run}"

    def written(self, events: list[Any]) -> list[Any]:
        texts = [event["item"]["content"] for event in events if event["type"] == "appended"]
        return [msgspec.json.decode(text) for text in texts] if self.is_json else texts


def _without(headers: Any) -> dict[str, str]:
    return {n: v for n, v in headers.items() if n not in _OWN}


async def _frames(stream: Stream, answer: httpx.Response) -> AsyncGenerator[bytes]:
    """What came in one read goes out in one write. The suite stops reading at the end of the first event after the text
    that it waits for, and its payloads hold that text: a `control` event must be with its data already.
    """
    rest = b""
    try:
        async for data in answer.aiter_raw():
            *frames, rest = (rest + data).split(b"\n\n")
            if written := b"".join(_frame(stream, frame) for frame in frames):
                yield written
    finally:
        await answer.aclose()


def _frame(stream: Stream, frame: bytes) -> bytes:
    if not frame.startswith(b"event: data\n"):
        return frame + b"\n\n"
    messages = stream.written(msgspec.json.decode(frame.partition(b"\ndata:")[2]))
    return stream.frame(messages) if messages else b""
