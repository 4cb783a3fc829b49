"""`tokenbus audit`, and the entries that commands add to it: who changed what, and over which door."""

from __future__ import annotations

import getpass
import socket
from typing import Any

from tokenbus.bus.audit import audit, newest_audited
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server, translated
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli.render import output
from tokenbus_services.cli.render.event_text import moment


def whoami() -> str:
    """Who gives this command: `USER@HOST`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


async def noted(server: Server, keys: Keys, action: str, **facts: Any) -> None:
    """Add an entry about what a command did. Raises ServerError."""
    with translated(server):
        await audit(server, keys, action, by=whoami(), door="cli", **facts)


async def noted_apart(action: str, **facts: Any) -> None:
    """The same, for a command without a connection of its own to the server."""
    async with reaching.deployment() as (_, server, keys):
        await noted(server, keys, action, **facts)


async def show(*, most: int, as_json: bool) -> None:
    """Show the newest entries."""
    async with reaching.deployment() as (_, server, keys):
        with translated(server):
            for entry in await newest_audited(server, keys, most=most):
                if as_json:
                    output.print_json(entry)
                    continue
                facts = " ".join(f"{name}={value}" for name, value in entry.facts.items())
                print(output.safe(f"{moment(str(entry.at_ms))}  {entry.by}  {entry.door}  {entry.action}  {facts}"))
