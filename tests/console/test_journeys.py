"""What an operator does on the page besides reading: dead letters, images, policies, and a page that stays still."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis

from tests.console.browser import expect, page_of, see
from tests.console.gates import open_gate
from tests.console.models import WEATHER, ended, publish
from tests.waiting import eventually
from tokenbus.testing import LocalBus

pytestmark = pytest.mark.asyncio(loop_scope="package")

WATCH_SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    if (entry.value < 0.001) continue;  // a fraction of a pixel
    shifts.push([entry.value, ...entry.sources.map((one) => one.node?.className || one.node?.nodeName || "")]);
  }
}).observe({ type: "layout-shift", buffered: true });
"""
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


async def test_nothing_moves_while_pages_load_and_text_streams(chromium: Any, bus: LocalBus) -> None:
    over = await asyncio.to_thread(ended, bus, "calls", tools=[WEATHER])
    talks = await asyncio.to_thread(publish, bus, "talks")
    async with page_of(chromium) as page:
        await page.add_init_script(WATCH_SHIFTS)
        replies = {
            "": page.locator(f'[data-run="{talks}"] .words'),
            f"#run={talks}": page.locator(".k-text .model-text"),
        }
        for hash_, words in replies.items():
            await see(page, bus, hash_)
            await expect(words).to_contain_text("word")
            before = await words.inner_text()
            await expect(words).not_to_have_text(before)
            assert await page.evaluate("shifts") == [], hash_
            await page.goto("about:blank")
        for hash_, sign in ((f"#run={over}", ".end"), ("#view=health", "[aria-labelledby=workers-title] td")):
            await see(page, bus, hash_)
            await expect(page.locator(sign).first).to_be_visible()
            assert await page.evaluate("shifts") == [], hash_
            await page.goto("about:blank")
        await see(page, bus, f"#run={talks}")
        await page.get_by_test_id("cancel").click()
        await page.get_by_role("button", name="Cancel the run").click()
        await expect(page.locator(".end")).to_contain_text("cancelled")
        assert await page.evaluate("shifts") == [], "the end of a run"


async def test_dead_letters_are_looked_at_retried_and_dropped_after_a_question(chromium: Any, bus: LocalBus) -> None:
    def poison() -> None:
        with Redis.from_url(bus.url) as client:
            client.xadd("tokenbus:requests", {"__data__": f'{{"type": "generate", "id": "{uuid4().hex}", "model": 3}}'})

    await asyncio.to_thread(poison)
    async with page_of(chromium, allowed=("409",)) as page:
        await see(page, bus, "#view=health")
        row = page.locator("[aria-labelledby=dead-title] tbody tr")
        await expect(row).to_have_count(1)
        await expect(page.locator("#dead-title")).to_contain_text("1 rejected")
        await row.get_by_role("button", name="Look").click()
        await expect(page.get_by_role("dialog")).to_contain_text("generate")
        await page.keyboard.press("Escape")

        await row.get_by_role("button", name="Drop").click()
        await expect(page.get_by_role("dialog")).to_contain_text("Its bytes are lost then.")
        await expect(page.get_by_role("button", name="No")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await expect(row).to_have_count(1)

        await row.get_by_role("button", name="Retry").click()
        await page.get_by_role("button", name="Send it again").click()
        await expect(page.locator("[aria-labelledby=dead-title] .error")).to_contain_text("invalid request at model")

        await row.get_by_role("button", name="Drop").click()
        await page.get_by_role("button", name="Drop it").click()
        await expect(row).to_have_count(0)
        await expect(page.locator("#dead-title")).not_to_contain_text("1 rejected")


async def test_a_run_shows_its_images_and_the_previews_before_them(page: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "paints", provider="openai-responses", images={"previews": 1})
    await see(page, bus, f"#run={run}")
    picture = page.locator(".k-image img")
    await eventually(lambda: picture.evaluate("(image) => image.complete && image.naturalWidth"))
    await expect(page.locator(".k-image figcaption")).not_to_contain_text("preview")
    await page.get_by_role("combobox", name="Type of event").select_option("image_preview")
    await page.locator(".raw-line").click()
    await expect(page.locator(".k-image figcaption")).to_contain_text("preview 1")
    await eventually(lambda: picture.evaluate("(image) => image.complete && image.naturalWidth"))


async def test_what_policies_decided_is_shown_with_what_they_judged(page: Any, bus: LocalBus) -> None:
    open_gate("at-once")
    run = await asyncio.to_thread(ended, bus, "minds")
    await see(page, bus, f"#run={run}")
    decision = page.locator("[aria-labelledby=decisions-title]")
    await expect(decision).to_contain_text("it said too much")
    await decision.get_by_text("what it judged").click()
    await expect(decision.locator(".was")).to_contain_text("held:at-once")
    await expect(page.locator(".timeline .row.t-policy")).to_contain_text("replace")
    await expect(page.locator(".k-text .model-text")).to_have_text("[kept back]")


async def test_the_attempts_of_a_retry_are_shown_side_by_side(page: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "stumbles", on_failure="restart")
    await see(page, bus, f"#run={run}")
    await page.get_by_role("button", name="Compare attempts").click()
    attempts = page.locator("dialog .attempt")
    await expect(attempts).to_have_count(2)
    await expect(attempts.nth(0)).to_contain_text("one two")
    await expect(attempts.nth(0)).not_to_contain_text("three")
    await expect(attempts.nth(0)).to_contain_text("discarded")
    await expect(attempts.nth(1)).to_contain_text("one two three")


async def test_a_hidden_page_ends_its_streams_and_continues_when_it_is_visible(page: Any, bus: LocalBus) -> None:
    streams: list[Any] = []
    over: list[Any] = []
    page.on("request", lambda one: "/stream?" in one.url and streams.append(one))
    page.on("requestfailed", lambda one: "/stream?" in one.url and over.append(one))
    await see(page, bus)
    connection = page.get_by_test_id("connection")
    await expect(connection).to_have_text("live")
    await page.evaluate(HIDE, True)
    await expect(connection).to_have_text("paused")
    await eventually(lambda: over == streams)
    run = await asyncio.to_thread(ended, bus, "recovers")
    await expect(page.locator(f'[data-run="{run}"]')).to_have_count(0)
    await page.evaluate(HIDE, False)
    await expect(page.locator(f'[data-run="{run}"]')).to_contain_text("completed")
    await expect(connection).to_have_text("live")
    assert len(streams) == 2
