"""What the page says that a run does now is true, in each of its turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.console.browser import expect, page_of, see
from tests.console.gates import open_gate
from tests.console.models import GATE, publish
from tests.waiting import eventually
from tokenbus.testing import Exchange, LocalBus

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_each_state_is_shown_while_it_lasts_in_any_turn_by_the_river_and_by_the_run(
    page: Any, chromium: Any, bus: LocalBus
) -> None:
    run = await asyncio.to_thread(publish, bus, "acts", provider="gemini", tools=[GATE])

    async def stalled(nth: int) -> Exchange:
        """The nth call of these models, after its provider has stalled."""
        calls: list[Exchange] = []

        def is_stalled() -> bool:
            calls[:] = [one for one in bus.exchanges if b"acts" in one.http_request.path.encode()]
            return len(calls) > nth and calls[nth].state == "stalled"

        await eventually(is_stalled)
        return calls[nth]

    async with page_of(chromium) as other:
        await see(page, bus)
        await see(other, bus, f"#run={run}")

        async def shown(state: str, turn: int) -> None:
            line = page.locator(f'[data-run="{run}"]')
            await expect(line.locator(".st")).to_have_text(state)
            await expect(line.locator(".last")).to_contain_text(f"t{turn}")
            await expect(other.locator(".run-line .st")).to_have_text(state)

        answer = await stalled(0)
        await shown("first byte", 1)
        bus.resume(answer)
        await shown("tool", 1)

        await asyncio.to_thread(publish, bus, "acts-too", provider="gemini")
        blocker = await stalled(1)  # the one place that the limit leaves
        open_gate("acts-0")
        await shown("waiting", 2)
        bus.resume(blocker)
        answer = await stalled(2)
        await shown("thinking", 2)
        bus.resume(answer)
        await shown("tool", 2)

        open_gate("acts-1")
        answer = await stalled(3)
        await shown("speaking", 3)
        open_gate("acts-2")
        bus.resume(answer)
        await shown("judged", 4)
        open_gate("acts-3")
        await shown("retrying", 5)

        await other.get_by_test_id("cancel").click()
        await other.get_by_role("button", name="Cancel the run").click()
        await expect(page.locator(f'[data-run="{run}"] .st')).to_have_text("cancelled")
