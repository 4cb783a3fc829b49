"""A client of the test's own deployment."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tokenbus import Client
from tokenbus.bus.keys import Keys


@pytest.fixture
async def bus(server_url: str, keys: Keys) -> AsyncGenerator[Client]:
    async with Client(server_url, prefix=keys.prefix, partitions=keys.partitions, reconnect_s=5) as bus:
        yield bus
