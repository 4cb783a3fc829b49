"""`tokenbus top`: a deployment at work, looked at again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from tokenbus.bus.keys import PublicTopic
from tokenbus.bus.server.server import Server
from tokenbus.client.deployment import Deployment
from tokenbus.errors import ServerUnavailable
from tokenbus_services import settings as configuration
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli.inspect.observer import Observer
from tokenbus_services.cli.inspect.snapshot import Snapshot, rates
from tokenbus_services.cli.render import terminal
from tokenbus_services.cli.top.figures import Look, lines
from tokenbus_services.settings import Settings


async def top(*, every_s: float, once: bool, as_json: bool) -> None:
    """Show it every ``every_s`` seconds until Ctrl-C, or once, over as long a time.

    On a terminal it outlasts a server that goes away. Raises ServerUnavailable, and what else a server refuses.
    """
    settings = reaching.with_server(configuration.load())
    assert settings.redis_url
    async with Server(settings.redis_url) as server:
        keys = await Deployment(server, settings.prefix, None).keys()
        observer = Observer(
            server, keys, topic=_counted(settings), recorded=bool(settings.records), judged=bool(settings.policies)
        )
        looks = _looks(observer, every_s)
        if not (once or as_json) and (console := terminal.console()):
            from tokenbus_services.cli.top.screen import TopScreen

            with TopScreen(console, f"{keys.prefix} on {server.url.safe}") as screen:
                async for found in looks:
                    screen.show(found)
            return
        async for found in looks:
            if isinstance(found, ServerUnavailable):
                raise found
            if as_json:
                print(msgspec.json.encode(found).decode(), flush=True)
            else:
                print(terminal.safe("\n".join(lines(found))), end="\n" if once else "\n\n", flush=True)
            if once:
                return


async def _looks(observer: Observer, every_s: float) -> AsyncGenerator[Look | ServerUnavailable]:
    """What is found from the second look on, or that the server is away."""
    before: Snapshot | None = None
    while True:
        try:
            now = await observer.snapshot()
        except ServerUnavailable as e:
            yield e
        else:
            if before:
                yield Look(now, rates(before, now))
            before = now
        await asyncio.sleep(every_s)


def _counted(settings: Settings) -> PublicTopic | None:
    """The topic that shows how many chunks there are, among those that are written."""
    written: tuple[PublicTopic, ...] = ("chunks", "visible")
    return next((topic for topic in written if topic in settings.topics), None)
