"""A client of the test's own deployment."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.contract.client.writer import Writer
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server


@pytest.fixture
async def bus(server_url: str, keys: Keys) -> AsyncGenerator[Client]:
    async with Client(server_url, prefix=keys.prefix, partitions=keys.partitions, reconnect_s=5) as bus:
        yield bus


@pytest.fixture
def writer(server: Server, keys: Keys) -> Writer:
    """What writes the events of the run `r`."""
    return Writer(server, keys, "r")
