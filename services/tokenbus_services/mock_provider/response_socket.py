"""The Responses API over a WebSocket, one response at a time: https://developers.openai.com/api/docs/guides/steering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from tokenbus_services.mock_provider.plan import ResponsePlan, event_ends, split_at
from tokenbus_services.mock_provider.request_log import Exchange, State

Json = dict[str, Any]
_LOOK_S = 0.05
_encode = msgspec.json.Encoder().encode


class ResponseSocket:
    """The provider's side of one connection. Each response is an exchange, as if its request had come over HTTP."""

    def __init__(
        self,
        socket: WebSocket,
        begin: Callable[[bytes], Exchange],
        plan: Callable[[Exchange], ResponsePlan],
        set_state: Callable[[State, Exchange], None],
        *,
        refuses: Callable[[Exchange], bool],
    ) -> None:
        """``begin`` notes the request with this body; ``refuses``: its turn is not steered."""
        self._socket = socket
        self._begin = begin
        self._plan = plan
        self._set_state = set_state
        self._refuses = refuses
        self._received: asyncio.Queue[Json | None] = asyncio.Queue()

    async def serve(self) -> None:
        """Answer until the client leaves."""
        await self._socket.accept()
        reading = asyncio.create_task(self._read())
        try:
            while (message := await self._received.get()) is not None:
                if message.pop("type") == "response.create":
                    await self._respond({**message, "stream": True})
        except (WebSocketDisconnect, RuntimeError):
            pass  # the client left while it was answered
        finally:
            reading.cancel()

    async def _read(self) -> None:
        try:
            while True:
                self._received.put_nowait(msgspec.json.decode(await self._socket.receive_text()))
        except WebSocketDisconnect:
            self._received.put_nowait(None)

    async def _respond(self, body: Json) -> None:
        """A response, and its successors as long as it is steered."""
        next_body: Json | None = body
        while next_body:
            exchange = self._begin(_encode(next_body))
            try:
                next_body = await self._answer(exchange, next_body)
            finally:
                if not exchange.ended:
                    self._set_state("disconnected", exchange)

    async def _answer(self, exchange: Exchange, body: Json) -> Json | None:
        """Send one response; return the request of its successor, if it was steered."""
        planned = self._plan(exchange)
        exchange.status = planned.status
        self._set_state("sending", exchange)
        if planned.status != 200:
            error = msgspec.json.decode(b"".join(planned.reads) or b"{}")
            await self._send({"type": "error", "status": planned.status or 500, **error})
            self._set_state("sent", exchange)
            return None
        sent: list[Json] = []
        for event in _events(planned.reads):
            steer = await self._steered(1 / planned.pace if planned.pace else 0.0)
            if steer and not await self._refused(steer, exchange):
                return await self._end(exchange, body, sent, steer)
            sent.append(event)
            await self._send(event)
            exchange.reads_sent += 1
        if planned.ending == "stalled":
            self._set_state("stalled", exchange)
            while not exchange.resumed.is_set():
                steer = await self._steered(_LOOK_S)
                if steer and not await self._refused(steer, exchange):
                    return await self._end(exchange, body, sent, steer)
            for event in _events(planned.rest):
                await self._send(event)
        elif planned.ending != "complete":
            self._set_state("cut", exchange)
            await self._socket.close(1011)
            raise WebSocketDisconnect
        self._set_state("sent", exchange)
        return None

    async def _steered(self, patience_s: float) -> Json | None:
        """The message that steers, if it comes in time. Raises WebSocketDisconnect."""
        if patience_s == 0 and self._received.empty():
            await asyncio.sleep(0)
            return None
        try:
            async with asyncio.timeout(patience_s):
                message = await self._received.get()
        except TimeoutError:
            return None
        if message is None:
            raise WebSocketDisconnect
        return message

    async def _refused(self, steer: Json, exchange: Exchange) -> bool:
        if not self._refuses(exchange):
            return False
        error = {"type": "invalid_request_error", "code": "steering_not_supported", "message": "not this one"}
        told = {"previous_response_id": steer["previous_response_id"], "input": steer["input"]}
        await self._send({"type": "response.steer.failed", "steer": told, "error": error})
        return True

    async def _end(self, exchange: Exchange, body: Json, sent: list[Json], steer: Json) -> Json:
        """End the response early. Returns the request of the one that follows."""
        response = next(event["response"] for event in sent if "response" in event)
        told = {"id": "steer_1", "previous_response_id": response["id"]}
        await self._send({"type": "response.steer.accepted", "steer": told})
        ended = {**response, "status": "incomplete", "incomplete_details": {"reason": "steered"}}
        await self._send({"type": "response.incomplete", "response": ended})
        self._set_state("sent", exchange)
        text = "".join(event["delta"] for event in sent if event["type"] == "response.output_text.delta")
        said = [{"role": "assistant", "content": text}] if text else []
        items = [*_items(body["input"]), *said, *_items(steer["input"])]
        return {**body, "input": items, "previous_response_id": response["id"]}

    async def _send(self, event: Json) -> None:
        await self._socket.send_text(_encode(event).decode())


def _items(given: str | list[Json]) -> list[Json]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _events(reads: Iterable[bytes]) -> list[Json]:
    """The events of a stream of server-sent events."""
    stream = b"".join(reads)
    pieces = split_at(stream, event_ends(stream))
    return [cast(Json, msgspec.json.decode(piece.partition(b"data: ")[2])) for piece in pieces]
