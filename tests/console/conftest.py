"""One bus and one browser for all tests of the page."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest
import pytest_asyncio

from tests.console.browser import browser, executable, page_of
from tests.console.models import SETTINGS, script
from tokenbus.testing import LocalBus


@pytest.fixture(scope="package")
def bus() -> Generator[LocalBus]:
    executable()
    with LocalBus(SETTINGS) as running:
        script(running)
        yield running


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def chromium(bus: LocalBus) -> AsyncGenerator[Any]:
    async with browser() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="package")
async def page(chromium: Any, bus: LocalBus) -> AsyncGenerator[Any]:
    async with page_of(chromium) as opened:
        yield opened
