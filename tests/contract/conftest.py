"""A Cluster for the tests of a module."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

import pytest

from tests.servers import cluster
from tokenbus.bus.server.server import Server


@pytest.fixture(scope="module")
def cluster_url() -> Generator[str]:
    with cluster() as url:
        yield url


@pytest.fixture
async def clustered(cluster_url: str) -> AsyncGenerator[Server]:
    async with Server(cluster_url) as server:
        yield server
        await server.client.flushall(target_nodes=server.client.PRIMARIES)
