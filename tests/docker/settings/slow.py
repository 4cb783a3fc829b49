"""A tool of a deployment's own."""

from __future__ import annotations

import asyncio

from tokenbus_services.weather import weather as known


async def weather(city: str) -> dict[str, object]:
    """The demo's tool, for as long as it takes to kill its executor."""
    await asyncio.sleep(2)
    return known(city)
