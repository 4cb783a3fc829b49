"""Runs of the past: found by words, metadata and how they ended, also those that only their records tell."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.node import packages
from tests.console.browser import expect, page_of, see
from tests.console.models import WORDS, ended, script
from tests.waiting import eventually
from tokenbus.testing import LocalBus

pytestmark = pytest.mark.asyncio(loop_scope="package")

SHORT = """
[gateway]
models = ["anthropic/speaks"]
[console]
roles_without_keys = ["see_runs", "see_content"]
[records]
sample = 1.0
[retention]
finished_run_s = 4
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
"""


@pytest.fixture(scope="module")
def archiving() -> Generator[LocalBus]:
    """A bus that keeps ended runs for seconds, and archives and records them."""
    with LocalBus(f"{SHORT}[archive]\n") as running:
        script(running)
        yield running


@pytest.fixture(scope="module")
def forgetful() -> Generator[LocalBus]:
    """A bus that keeps ended runs for seconds, and records of them."""
    with LocalBus(SHORT) as running:
        script(running)
        yield running


def row(page: Any, run: str) -> Any:
    return page.locator(f'.history [data-run="{run}"]')


async def test_runs_are_found_by_words_of_question_and_answer_by_metadata_and_by_their_end(
    page: Any, bus: LocalBus
) -> None:
    said = await asyncio.to_thread(ended, bus, "speaks", metadata={"ticket": "T-77", "shop": "north"})
    failed = await asyncio.to_thread(ended, bus, "refuses", metadata={"ticket": "T-78"})
    await see(page, bus, "#view=history")
    await expect(row(page, said)).to_contain_text("ticket=T-77")
    await expect(row(page, failed)).to_contain_text("failed")
    words = page.get_by_placeholder("Words of question or answer")
    await words.fill("WORD59 t-77")
    await expect(row(page, failed)).to_have_count(0)
    await expect(row(page, said)).to_be_visible()
    await expect(page).to_have_url(re.compile("words=WORD59"))
    await words.fill("")
    await page.get_by_placeholder("Metadata, as name=value").fill("ticket=T-78")
    await expect(row(page, said)).to_have_count(0)
    await expect(row(page, failed)).to_be_visible()
    await page.get_by_label("State").select_option("completed")
    await expect(page.locator(".history .empty")).to_have_text("No run matches.")


async def test_two_runs_of_the_history_are_chosen_and_compared(page: Any, bus: LocalBus) -> None:
    first = await asyncio.to_thread(ended, bus, "recovers")
    other = await asyncio.to_thread(ended, bus, "refuses")
    await see(page, bus, "#view=history")
    for run in (first, other):
        await row(page, run).get_by_role("checkbox").check()
    await page.get_by_role("button", name="Compare two").click()
    await expect(page).to_have_url(re.compile(rf"#run={first}&with={other}$"))
    await expect(page.locator(".two-outputs .output")).to_have_count(2)


async def test_a_run_that_the_server_has_no_more_is_listed_found_and_shown_from_its_record(
    chromium: Any, forgetful: LocalBus
) -> None:
    run = await asyncio.to_thread(ended, forgetful, "speaks", metadata={"ticket": "T-99"})

    def gone() -> bool:
        with forgetful.sync_client() as client:
            return run not in client.describe([run])

    await eventually(lambda: asyncio.to_thread(gone))
    async with page_of(chromium) as page:
        await see(page, forgetful, "#view=history&words=word59&metadata=ticket%3DT-99")
        await expect(row(page, run)).to_contain_text("completed")
        await row(page, run).locator("a").click()
        await expect(page.locator(".run-line .chip")).to_have_text("from its record")
        await expect(page.locator(".k-text .model-text")).to_have_text(WORDS)
        await expect(page.locator(".end")).to_contain_text("completed")
        await page.get_by_role("slider").fill("12")
        await expect(page.locator(".k-text .model-text")).not_to_have_text(WORDS)


async def test_an_archived_run_is_listed_once_found_by_its_answer_and_metadata_and_shown(
    chromium: Any, archiving: LocalBus
) -> None:
    run = await asyncio.to_thread(ended, archiving, "speaks", metadata={"ticket": "T-55"})

    def gone() -> bool:
        with archiving.sync_client() as client:
            return run not in client.describe([run])

    await eventually(lambda: asyncio.to_thread(gone))
    async with page_of(chromium) as page:
        await see(page, archiving, "#view=history")
        await expect(row(page, run)).to_have_count(1)
        await expect(page.get_by_role("button", name="Look further back")).to_have_count(0)
        await page.get_by_placeholder("Metadata, as name=value").fill("ticket=T-56")
        await expect(row(page, run)).to_have_count(0)
        await see(page, archiving, "#view=history&words=word59&metadata=ticket%3DT-55")
        await expect(row(page, run)).to_contain_text("completed")
        await row(page, run).locator("a").click()
        await expect(page.locator(".k-text .model-text")).to_have_text(WORDS)


async def test_axe_finds_nothing_in_history_and_pairs_and_a_phone_needs_no_scrolling_sideways(
    chromium: Any, bus: LocalBus
) -> None:
    run = await asyncio.to_thread(ended, bus, "refuses", metadata={"ticket": "T" * 300})
    other = await asyncio.to_thread(ended, bus, "recovers")
    source = packages(Path(__file__).parent) / "axe-core" / "axe.min.js"
    async with page_of(chromium, bypass_csp=True, viewport={"width": 360, "height": 740}) as page:
        for hash_, sign in (("#view=history", f'[data-run="{run}"]'), (f"#run={run}&with={other}", ".two-outputs")):
            await see(page, bus, hash_)
            await expect(page.locator(sign)).to_be_visible()
            wide = "[...document.querySelectorAll('*')].filter((one) => one.getBoundingClientRect().right > innerWidth)"
            assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, await page.evaluate(
                f"{wide}.map((one) => one.outerHTML.slice(0, 90))"
            )
            await page.add_script_tag(path=source)
            found = await page.evaluate("axe.run(document).then((result) => result.violations)")
            places = [(one["id"], [node["target"] for node in one["nodes"]][:5]) for one in found]
            assert not places, (hash_, places)
            await page.goto("about:blank")
