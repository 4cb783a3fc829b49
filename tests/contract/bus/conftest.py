"""A toy stage over two partitions of the shared server."""

from __future__ import annotations

import pytest

from tests.contract.bus.toys import Bench
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server


@pytest.fixture
def bench(server: Server, keys: Keys) -> Bench:
    """Two partitions of the test's own."""
    return Bench(server, Keys(keys.prefix, 2))
