"""What is asked of the page at night: which tab is which, what failed, what it cost, and what another run did."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.console.browser import expect, page_of, see
from tests.console.models import WEATHER, ended, publish
from tests.waiting import eventually
from tokenbus.testing import LocalBus

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_the_title_of_a_tab_says_what_it_shows(page: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "refuses")
    for hash_, title in (
        ("", r"River · tokenbus$"),
        ("#view=health", r"^Health · tokenbus$"),
        ("#view=waiting", r"^Waiting · tokenbus$"),
        (f"#run={run}", rf"^failed · …{run[-12:]} · tokenbus$"),
    ):
        await see(page, bus, hash_)
        await expect(page).to_have_title(re.compile(title))


async def test_a_run_s_page_scrolls_as_one_and_follows_its_end_until_its_reader_leaves(
    chromium: Any, bus: LocalBus
) -> None:
    run = await asyncio.to_thread(publish, bus, "talks")
    async with page_of(chromium, viewport={"width": 1000, "height": 360}) as page:
        await see(page, bus, f"#run={run}")
        words = page.locator(".k-text .model-text")
        await expect(words).to_contain_text("word")
        panes = await page.evaluate(
            """[...document.querySelectorAll("main .output, main aside, main .card, main .raw-json")]
               .filter((one) => /auto|scroll/.test(getComputedStyle(one).overflowY)).length"""
        )
        assert panes == 0
        await eventually(lambda: page.evaluate("scrollY > 150"))
        await page.evaluate("scrollTo(0, 0)")  # its reader looks at the beginning
        before = await words.inner_text()
        await expect(words).not_to_have_text(before)
        assert await page.evaluate("scrollY") == 0
        await page.get_by_test_id("cancel").click()
        await page.get_by_role("button", name="Cancel the run").click()
        await expect(page.locator(".run-line .st")).to_have_text("cancelled")


async def test_a_failed_tool_is_said_at_the_top_of_the_page(page: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "miscalls", tools=[WEATHER])
    await see(page, bus, f"#run={run}")
    said = page.get_by_test_id("failed-tools")
    await expect(said).to_have_text("1 call failed: weather")
    await said.click()
    await expect(page.locator(".k-tool_result .facts .bad")).to_be_in_viewport()
    await expect(page.locator(".timeline .row.t-tool.o-failed")).to_have_count(1)


async def test_attempts_are_named_by_their_turn(page: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "recovers")
    await see(page, bus, f"#run={run}")
    names = page.locator(".timeline .row.t-attempt .name")
    await expect(names).to_have_text(["turn 1", "turn 1, try 2"])
    await expect(page.locator(".raw-line .try").first).to_have_text("t1")


async def test_costs_have_their_currency_at_a_gateway_without_keys(page: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "speaks")
    await see(page, bus)
    await expect(page.locator(f'[data-run="{run}"] .last')).to_have_text(re.compile(r"^€0\.\d+$"))
    await see(page, bus, f"#run={run}")
    await expect(page.locator(".facts-list")).to_contain_text(re.compile(r"cost€0\.\d+"))
    await see(page, bus, "#view=health")
    await expect(page.locator("[aria-labelledby=spend-title]")).to_contain_text("The river shows what each run cost.")


async def test_two_runs_are_compared_by_request_figures_and_output(page: Any, bus: LocalBus) -> None:
    first = await asyncio.to_thread(ended, bus, "speaks", metadata={"ticket": "A-1"})
    other = await asyncio.to_thread(ended, bus, "recovers", metadata={"ticket": "A-2"})
    await see(page, bus, f"#run={first}")
    await page.get_by_role("button", name="Compare", exact=True).click()
    await page.get_by_label("Its id").fill(other)
    await page.get_by_role("dialog").get_by_role("button", name="Compare").click()
    await expect(page).to_have_url(re.compile(rf"#run={first}&with={other}$"))
    facts = page.locator("[aria-labelledby=facts-title] tr")
    await expect(facts.filter(has_text="model")).to_have_class("differs")
    await expect(facts.filter(has_text="retries")).to_contain_text("1")
    asked = page.locator("[aria-labelledby=asked-title] tr")
    await expect(asked.filter(has_text="metadata.ticket").locator("td")).to_have_text(['"A-1"', '"A-2"'])
    outputs = page.locator(".two-outputs .output")
    await expect(outputs.nth(0)).to_contain_text("word59")
    await expect(outputs.nth(1)).to_contain_text("at last")


async def test_a_run_that_is_not_there_is_said_so_with_the_reason(chromium: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "recovers")
    async with page_of(chromium, allowed=("404",)) as page:
        for hash_ in ("#run=no-such-run", f"#run={run}&with=no-such-run"):
            await see(page, bus, hash_)
            await expect(page.get_by_role("alert")).to_contain_text("no-such-run")
            await expect(page.get_by_role("alert")).to_contain_text("It never was, or it has expired.")


async def test_all_columns_of_health_are_in_sight_on_a_phone(chromium: Any, bus: LocalBus) -> None:
    await asyncio.to_thread(ended, bus, "speaks")
    async with page_of(chromium, viewport={"width": 390, "height": 844}) as page:
        await see(page, bus, "#view=health")
        table = page.locator("[aria-labelledby=providers-title] table")
        await expect(table).to_contain_text("speaks")
        assert await table.evaluate("(one) => one.scrollWidth - one.parentElement.clientWidth") <= 0
