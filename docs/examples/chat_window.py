"""A chat window over server-sent events, to copy. Open http://localhost:8000/ and type.

pip install '.[examples]'    # in a checkout of tokenbus
CHAT_PROVIDER=mock-anthropic CHAT_MODEL=any uvicorn chat_window:app    # beside `tokenbus up --mock`

POST /chat {"text": …} begins an answer and gives {"run": …}. GET /chat/RUN streams it to an EventSource, which
reconnects automatically and misses nothing. Closing the tab cancels the answer; with GET /chat/RUN?keep=1 it continues.
Add your login: anyone who knows a run's id may read it here.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from tokenbus import Chunk, Client, PublicEvent, Restarted, Retrying, TerminalEvent, TokenbusError, coalesced

MODEL = {name: os.environ.get(f"CHAT_{name.upper()}", "") for name in ("provider", "model")}
if not all(MODEL.values()):
    raise SystemExit("set CHAT_PROVIDER and CHAT_MODEL: mock-anthropic and any, say, beside `tokenbus up --mock`")
GRACE_S = 5.0
"""Time for a browser to reconnect after it lost its connection. After that the tab counts as closed."""


class Question(msgspec.Struct):
    text: str


async def page(request: Request) -> Response:
    return FileResponse(Path(__file__).with_suffix(".html"))


async def ask(request: Request) -> Response:
    try:
        question = msgspec.json.decode(await request.body(), type=Question)
    except msgspec.DecodeError as e:
        return JSONResponse({"error": str(e)}, status_code=400)
    run = await request.app.state.bus.publish({**MODEL, "messages": [{"role": "user", "content": question.text}]})
    return JSONResponse({"run": run.id})


async def answer(request: Request) -> Response:
    after = request.headers.get("last-event-id", request.query_params.get("after", "-1"))
    if not after.removeprefix("-").isdecimal():
        return JSONResponse({"error": "Last-Event-ID is not a number"}, status_code=400)
    keep = "keep" in request.query_params
    return EventSourceResponse(screen(request.app.state, request.path_params["run"], int(after), keep), ping=5)


async def screen(state: Any, run: str, after: int, keep: bool) -> AsyncGenerator[dict[str, str]]:
    seen, over = after, False
    state.readers[run] += 1
    try:
        async for event in coalesced(state.bus.follow(run, after=after)):  # a frame's worth of text at a time
            seen = event.seq
            if shown := for_browser(event):
                yield {"id": str(event.seq), "data": msgspec.json.encode(shown).decode()}
        over = True
    except TokenbusError as e:
        yield {"data": msgspec.json.encode({"end": "error", "code": e.code}).decode()}
    finally:
        state.readers[run] -= 1
        if not (over or keep):
            state.cancels.create_task(cancel_unless_back(state, run, seen))


async def cancel_unless_back(state: Any, run: str, seen: int) -> None:
    await asyncio.sleep(GRACE_S)
    if not state.readers[run]:
        try:
            await state.bus.cancel(run, "the window was closed", heard_through=seen)
        except TokenbusError:
            logging.exception("run %s goes on", run)


def for_browser(event: PublicEvent) -> dict[str, Any] | None:
    """What a person may see: no thinking, no signature, no tool call, no provider's own data."""
    match event:
        case Chunk(visible=True):
            return {"block": event.block, "text": event.text}
        case Retrying() | Restarted():
            return {"drop_from": event.drop_from}
        case _ if isinstance(event, TerminalEvent):
            return {"end": event.__struct_config__.tag, "finish": event.finish}
        case _:
            return None


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    async with Client() as app.state.bus, asyncio.TaskGroup() as app.state.cancels:
        app.state.readers = Counter[str]()
        yield


app = Starlette(
    routes=[Route("/", page), Route("/chat", ask, methods=["POST"]), Route("/chat/{run}", answer)], lifespan=lifespan
)
