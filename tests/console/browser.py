"""A real browser for tests: Debian's Chromium through Playwright, which downloads none here."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tokenbus.testing import LocalBus

UNRELATED = ("net::ERR_NETWORK_CHANGED",)
"""Of the machine, not of the page: an interface came or went."""
ALLOWED_ERRORS = ("net::ERR_CONNECTION_REFUSED", "net::ERR_INCOMPLETE_CHUNKED_ENCODING", "net::ERR_CONNECTION_RESET")
"""What Chromium logs when a gateway is gone; only for pages that are there to see that."""


PATIENCE_MS = 60_000


def executable() -> str:
    """Chromium on the PATH. Skips the test if there is none, or no Playwright."""
    pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium on the PATH")
    return path


@asynccontextmanager
async def browser() -> AsyncGenerator[Any]:
    path = executable()
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield running
        finally:
            await running.close()


@asynccontextmanager
async def page_of(running: Any, *, allowed: tuple[str, ...] = (), **options: Any) -> AsyncGenerator[Any]:
    """A page in a profile of its own. Fails at its end for any error in the console or violation of the CSP."""
    found: list[str] = []

    def on_message(kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(one in text for one in (*UNRELATED, *allowed)):
            found.append(f"{kind}: {text}")

    context = await running.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    try:
        page = await context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: on_message(message.type, message.text))
        page.on("pageerror", lambda error: on_message("error", str(error)))
        page.on("dialog", lambda dialog: on_message("error", f"a dialog: {dialog.message}"))
        yield page
        assert not found, found
    finally:
        await context.close()


async def see(page: Any, bus: LocalBus, hash_: str = "") -> None:
    """Open the page; again if a network interface of the machine came or went, for Chromium drops requests then."""
    from playwright.async_api import TimeoutError as NotThere

    for patience in (15_000, 15_000, PATIENCE_MS):
        await page.goto(f"{bus.gateway}/console/{hash_}")
        try:
            await page.wait_for_selector("#app > *", state="attached", timeout=patience)
            return
        except NotThere:
            continue


def expect(locator: Any) -> Any:
    """Playwright's, with the patience of a loaded machine."""
    from playwright.async_api import expect as playwright_expect

    playwright_expect.set_options(timeout=PATIENCE_MS)
    return playwright_expect(locator)
