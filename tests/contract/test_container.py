"""The fixture's server in a container, if a Docker engine is available and has the image."""

from __future__ import annotations

import pytest

from tests.servers import container, image_here
from tokenbus.bus.server.server import Server


@pytest.mark.docker
async def test_a_server_in_a_container_serves_and_is_new_enough():
    image = image_here()
    if not image:
        pytest.skip("no Docker engine answers here, or it has no server image")
    with container(image) as url:
        async with Server(url) as server:
            info = await server.check()
            assert info.version >= (6, 2)
            assert await server.client.set("k", "v")
