"""What the security tests share."""

from __future__ import annotations

import pytest

from tests.services.tools.conftest import blobs, make_executor
from tokenbus_services.process.embedded_server import free_port

__all__ = ["blobs", "make_executor"]


@pytest.fixture
def unused_port() -> int:
    return free_port()
