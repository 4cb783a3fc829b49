"""The image and one running project for all tests that need them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from uuid import uuid4

import pytest

from tests.docker.stack import Stack, build, engine_missing, running
from tests.waiting import eventually_sync
from tokenbus.bus.server.server import Server


@pytest.fixture(scope="session")
def image() -> str:
    """The image, built from this tree."""
    if missing := engine_missing():
        pytest.skip(missing)
    return build()


@pytest.fixture(scope="session")
def project(image: str) -> Generator[Stack]:
    """The project, started once; nothing may be left of it at the end."""
    with running(f"tokenbus-test-{uuid4().hex[:8]}") as stack:
        yield stack
    assert stack.left() == []


@pytest.fixture
def stack(project: Stack) -> Stack:
    """The project with one ready container of each service, restored after the previous test."""
    project.up()
    eventually_sync(project.ready, timeout=60)
    return project


@pytest.fixture
async def bus(stack: Stack) -> AsyncGenerator[Server]:
    """A connection to its Valkey, from outside."""
    async with Server(stack.redis_url) as server:
        yield server
