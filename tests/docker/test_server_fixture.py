"""The server that most tests share comes from a container, if one can be had."""

from __future__ import annotations

import pytest

from tests.docker.stack import docker
from tests.servers import image_here, shared_server
from tokenbus.bus.server.server import Server, parse_url

pytestmark = pytest.mark.docker


async def test_the_shared_server_is_a_container_and_goes_with_the_session(monkeypatch: pytest.MonkeyPatch):
    if not image_here():
        pytest.skip("no Docker engine answers here, or it has no server image")
    monkeypatch.delenv("TOKENBUS_REDIS_URL", raising=False)
    monkeypatch.delenv("TOKENBUS_TEST_SERVER", raising=False)
    with shared_server() as url:
        [(_, port)] = parse_url(url).nodes
        assert docker("ps", "--quiet", f"--filter=publish={port}").split()
        async with Server(url) as server:
            await server.check()
    assert not docker("ps", "--all", "--quiet", f"--filter=publish={port}").split()
