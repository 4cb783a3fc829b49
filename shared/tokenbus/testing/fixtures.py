"""Pytest fixtures: ``pytest_plugins = ["tokenbus.testing.fixtures"]`` in the top `conftest.py`."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tokenbus.testing import LocalBus


@pytest.fixture(scope="session")
def tokenbus_settings() -> str:
    """More of a `tokenbus.toml` for `local_bus`: override it to declare tools, policies and limits."""
    return ""


@pytest.fixture
def local_bus(tokenbus_settings: str) -> Generator[LocalBus]:
    """A bus of this test's own, with every service; stopped and gone after the test."""
    with LocalBus(tokenbus_settings) as bus:
        yield bus
