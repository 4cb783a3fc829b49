"""compose.yaml with a server of the user's own: its address is from the environment, and no Valkey is started."""

from __future__ import annotations

from uuid import uuid4

import msgspec
import pytest

from tests.docker.stack import SERVICES, Stack
from tests.waiting import eventually_sync
from tokenbus_services.mock_provider.demo import DEMO_MODEL, DEMO_PROMPT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


def test_a_server_of_ones_own_takes_the_place_of_valkey(image: str) -> None:
    stack = Stack(
        f"tokenbus-test-{uuid4().hex[:8]}",
        ("tests/docker/compose.server.yaml",),
        TOKENBUS_IMAGE=image,
        TOKENBUS_REDIS_URL="redis://elsewhere:6379",
        TOKENBUS_REDIS_PASSWORD="a-password",
        VALKEY_SCALE="0",
    )
    try:
        stack.compose("up", "--detach", "--no-build", *SERVICES, "replay", "elsewhere")
        eventually_sync(stack.ready, timeout=120)
        assert stack.containers("valkey", running=False) == []
        message = ("--provider", "anthropic", "--model", DEMO_MODEL, "--text", DEMO_PROMPT)
        sent = stack.compose("exec", "-T", "tools", "tokenbus", "send", *message, "--follow", "--json")
        assert msgspec.json.decode(sent.splitlines()[-1])["type"] == "completed"
    finally:
        stack.compose("down", "--volumes")
    assert stack.left() == []
