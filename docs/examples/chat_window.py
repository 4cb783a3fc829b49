"""A chat window over server-sent events: POST /chat with {"text": …}, and read the answer as it comes.

TOKENBUS_REDIS_URL=redis://localhost:6379 CHAT_PROVIDER=anthropic CHAT_MODEL=… uvicorn chat_window:app
"""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tokenbus import Client, Run, coalesced


async def chat(request: Request) -> StreamingResponse:
    text = (await request.json())["text"]
    messages = [{"role": "user", "content": text}]
    model = {"provider": os.environ["CHAT_PROVIDER"], "model": os.environ["CHAT_MODEL"]}
    run = await request.app.state.bus.publish({**model, "messages": messages})
    return StreamingResponse(screen(run), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def screen(run: Run) -> AsyncGenerator[bytes]:
    async for event in coalesced(run.events()):  # a frame's worth of text at a time
        yield b"id: %d\ndata: %s\n\n" % (event.seq, msgspec.json.encode(event))


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[dict[str, Any]]:
    async with Client() as app.state.bus:
        yield {}


app = Starlette(routes=[Route("/chat", chat, methods=["POST"])], lifespan=lifespan)
