"""`tokenbus top`: shows a deployment at work, sampled repeatedly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from tokenbus.bus.keys import Keys, PublicTopic
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.topology import POLICY, RECORDER
from tokenbus.errors import ServerUnavailable
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli.inspect.provider_facts import TroubleObserver
from tokenbus_services.cli.render import output
from tokenbus_services.cli.top.figures import Sample, lines, rates
from tokenbus_services.runtime.deployment_snapshot import DeploymentReader, DeploymentSnapshot, read_nodes
from tokenbus_services.settings import Settings


async def top(*, every_s: float, once: bool, as_json: bool) -> None:
    """Show a sample every ``every_s`` seconds until Ctrl-C; with ``once``, show one, measured over that time.

    On a terminal it keeps running if the server goes away. Raises ServerUnavailable, and other refusals of the server.
    """
    async with reaching.deployment() as (settings, server, keys):
        reader = DeploymentReader(
            server,
            keys,
            added=True,
            topic=_counted(settings),
            recorded=bool(settings.records) or await _has_workers(server, keys, RECORDER[0]),
            judged=bool(settings.policies) or await _has_workers(server, keys, POLICY[0]),
        )
        blobs = settings.blobs
        trouble = TroubleObserver(server, keys, blobs_url=None if blobs.loader else blobs.address)
        looks = _looks(server, reader, trouble, every_s)
        if not (once or as_json) and (console := output.console()):
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
                print(output.safe("\n".join(lines(found))), end="\n" if once else "\n\n", flush=True)
            if once:
                return


async def _looks(
    server: Server, reader: DeploymentReader, trouble: TroubleObserver, every_s: float
) -> AsyncGenerator[Sample | ServerUnavailable]:
    """Yield a look from the second sample on, or ServerUnavailable while the server is away."""
    before: DeploymentSnapshot | None = None
    while True:
        try:
            with translated(server):
                await server.clock.measure()
                now, nodes = await reader.read(), await read_nodes(server)
            failing = await trouble.look()
        except ServerUnavailable as e:
            yield e
        else:
            if before:
                yield Sample(now, nodes, rates(before, now), failing)
            before = now
        await asyncio.sleep(every_s)


async def _has_workers(server: Server, keys: Keys, group: str) -> bool:
    """Whether the group has workers, though these settings may not name what it works for."""
    with translated(server):
        return bool(await server.client.zcard(keys.members(group)))


def _counted(settings: Settings) -> PublicTopic | None:
    """Return the written topic from which chunks can be counted; None if there is none."""
    written: tuple[PublicTopic, ...] = ("chunks", "visible")
    return next((topic for topic in written if topic in settings.topics), None)
