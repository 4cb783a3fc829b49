"""Pytest fixtures: ``pytest_plugins = ["tokenbus.testing.fixtures"]`` in the top `conftest.py`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack

import pytest

from tokenbus.testing import LocalBus


@pytest.fixture(scope="session")
def tokenbus_settings() -> str:
    """More of a `tokenbus.toml` for `local_bus`: override it to declare tools, policies and limits."""
    return ""


@pytest.fixture(scope="session")
def tokenbus_buses() -> Generator[dict[str, LocalBus]]:
    """The buses that run, one for each text of settings: they start when a test first needs them."""
    buses: dict[str, LocalBus] = {}
    with ExitStack() as stack:
        yield buses
        for bus in buses.values():
            stack.callback(bus.stop)


@pytest.fixture
def local_bus(tokenbus_settings: str, tokenbus_buses: dict[str, LocalBus]) -> Generator[LocalBus]:
    """A bus with every service. Tests with the same settings share it, one after the other; each finds it as new."""
    bus = tokenbus_buses.get(tokenbus_settings)
    if bus is None:
        bus = LocalBus(tokenbus_settings)
        bus.start()
        tokenbus_buses[tokenbus_settings] = bus
    yield bus
    bus.reset()
