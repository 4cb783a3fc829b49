"""Drives an ASGI app's lifespan, so that the error that stops an app keeps its type.

uvicorn would log it with its traceback and end the process itself, and it would not notice an app that fails while it
runs. Messages: https://asgi.readthedocs.io/en/latest/specs/lifespan.html
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Lifespan:
    """One app, from its start to its stop."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._started = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the app; returns when it has started. Raises the error that stopped it."""
        self._messages.put_nowait({"type": "lifespan.startup"})
        self._task = asyncio.create_task(self._run(), name="lifespan")
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if not self._started.is_set():
            await self._task

    async def ended(self) -> None:
        """Wait until the app has ended, asked or not; `stop` then raises its error."""
        assert self._task
        await asyncio.wait({self._task})

    async def stop(self) -> None:
        """Stop the app; returns when it has stopped. Raises the error that stopped it."""
        assert self._task
        self._messages.put_nowait({"type": "lifespan.shutdown"})
        await self._task

    async def _run(self) -> None:
        await self._app(
            {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, self._messages.get, self._on_app_message
        )

    async def _on_app_message(self, message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            self._started.set()
