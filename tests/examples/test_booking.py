"""The agent that books: it asks on a phone, is answered after every service was replaced, and goes on."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from tests.console.browser import browser, executable, expect, page_of
from tests.e2e.fleet import WITH_TOOLS, Fleet, fleet
from tests.examples.conftest import EXAMPLES
from tests.servers import binary
from tokenbus.bus.keys import Keys
from tokenbus_services.mock_provider import MockProvider, Reply, Script, ToolCall, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer

CALL = ToolCall(name="book", arguments={"place": "Mario's", "at": "20:00", "people": 2})
BOOKS = Script(
    name="books", turns=(Turn(says=Reply(text="I ask.", tool_calls=(CALL,))), Turn(says=Reply(text="It is booked.")))
)
SERVICES = (*WITH_TOOLS, "gateway")
PHONE = {"width": 360, "height": 740}


async def test_the_agent_goes_on_with_the_answer_after_all_services_were_replaced(tmp_path: Path) -> None:
    executable()  # skips without a browser
    example = EXAMPLES / "booking"
    shutil.copy(example / "booking.py", tmp_path)
    settings = (example / "tokenbus.toml").read_text()
    with EmbeddedServer(binary=binary()) as server:
        async with (
            MockProvider([BOOKS]) as provider,
            fleet(tmp_path, server.url, Keys(), provider.url, SERVICES, settings) as services,
            browser() as chromium,
        ):

            async def example_says(*arguments: str) -> list[str]:
                """What the example prints, from its beginning to its end."""
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, str(tmp_path / "booking.py"), *arguments),
                    env={**os.environ, "TOKENBUS_REDIS_URL": server.url, "BOOKING_MODEL": "books"},
                    stdout=asyncio.subprocess.PIPE,
                )
                printed, _ = await process.communicate()
                assert process.returncode == 0
                return printed.decode().splitlines()

            [line] = await example_says("ask", "A table for two at Mario's, at eight")
            run = line.removeprefix("run ")
            async with page_of(chromium, viewport=PHONE) as page:
                await page.goto(f"{services.worker_of('gateway').url}/console/#view=waiting")
                await expect(page.locator(".ask")).to_contain_text('{"place":"Mario\'s","at":"20:00","people":2}')

            await replaced(services)
            assert not (tmp_path / "bookings.txt").exists()
            async with page_of(chromium, viewport=PHONE) as page:
                await page.goto(f"{services.workers[-1].url}/console/#view=waiting")
                await page.locator(f'[data-wait^="{run} "]').get_by_role("button", name="Allow").click()
                await expect(page.locator(".ask")).to_have_count(0)

            assert await example_says("read", run) == [
                "I ask.",
                'waits: book {"place":"Mario\'s","at":"20:00","people":2}',
                "allow over console",
                "It is booked.",
            ]
            assert (tmp_path / "bookings.txt").read_text() == "Mario's, 20:00, 2\n", "once"


async def replaced(services: Fleet) -> None:
    """Stop every service as an upgrade does, and then start others; the gateway last."""
    await services.stop()
    await services.start(*SERVICES)
