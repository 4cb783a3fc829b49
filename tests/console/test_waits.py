"""What runs wait for in the console: an inbox, the pages of a run and of a session, and who may decide."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from tests.clients.node import packages
from tests.console.browser import expect, page_of, see
from tests.console.models import SETTINGS, publish, script
from tests.console.test_page import log_in
from tests.console.test_sessions import begun
from tokenbus.events.public import BlockComplete, PublicEvent, Resumed
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.keys.key import new_key

pytestmark = pytest.mark.asyncio(loop_scope="package")

INBOX = "#view=waiting"


async def asks(bus: LocalBus, model: str, tool: str = "pay", **more: Any) -> str:
    """A run whose call of this tool waits."""
    return await asyncio.to_thread(publish, bus, model, tools=[{"name": tool}], **more)


async def log_of(bus: LocalBus, run: str) -> list[PublicEvent]:
    def read() -> list[PublicEvent]:
        with bus.sync_client() as client:
            return list(client.follow(run))

    return await asyncio.to_thread(read)


async def fate_of(bus: LocalBus, run: str) -> tuple[tuple[str, str | None, str], str | None]:
    """How the run's one wait ended, by whom and over which door; and the result that the model read."""
    events = await log_of(bus, run)
    [decided] = [(e.decision, e.by, e.door) for e in events if isinstance(e, Resumed)]
    [result] = [e.content for e in events if isinstance(e, BlockComplete) and e.kind == "tool_result"]
    return decided, result


def item(page: Any, run: str) -> Any:
    return page.locator(f'[data-wait^="{run} "]')


async def test_the_inbox_has_the_oldest_deadline_first_and_each_is_decided_there(page: Any, bus: LocalBus) -> None:
    later, shows, soon = await asks(bus, "pays"), await asks(bus, "shows", "show"), await asks(bus, "hurries", "hurry")
    await see(page, bus)
    await expect(page.get_by_role("link", name="Waiting").get_by_title("open waits")).to_have_text(re.compile("[1-9]"))
    await page.get_by_role("link", name="Waiting").click()
    for run in (later, shows, soon):
        await expect(item(page, run)).to_be_visible()
    places = await page.locator("[data-wait]").evaluate_all("all => all.map((one) => one.dataset.wait.split(' ')[0])")
    assert [run for run in places if run in (later, shows, soon)] == [soon, shows, later]
    await expect(item(page, later)).to_contain_text('{"amount":500}')
    await item(page, soon).get_by_role("button", name="Allow").click()
    await expect(item(page, soon)).to_have_count(0)
    assert await fate_of(bus, soon) == (("allow", None, "console"), '{"amount":9}')
    await item(page, later).get_by_role("button", name="Deny").click()
    await item(page, later).get_by_label("Reason, which the model reads").fill("too dear")
    await item(page, later).get_by_role("button", name="Deny it").click()
    await expect(item(page, later)).to_have_count(0)
    denied = "the call was denied, and did not run: too dear"
    assert await fate_of(bus, later) == (("deny", None, "console"), denied)
    await item(page, shows).get_by_role("button", name="Return a result").click()
    await item(page, shows).get_by_label("Result").fill("5 <b>")
    await item(page, shows).get_by_role("button", name="Send it").click()
    await expect(item(page, shows)).to_have_count(0)
    assert await fate_of(bus, shows) == (("result", None, "console"), "5 <b>")


async def test_arguments_are_edited_and_those_that_do_not_fit_change_nothing(chromium: Any, bus: LocalBus) -> None:
    run = await asks(bus, "pays a stranger")
    async with page_of(chromium, allowed=("status of 400",)) as page:
        await see(page, bus, INBOX)
        await edited(page, run)
    assert await fate_of(bus, run) == (("allow", None, "console"), f'{{"amount":{2**60 - 1}}}')


async def edited(page: Any, run: str) -> None:
    """Allow the call with one less, after two that are refused."""
    await item(page, run).get_by_role("button", name="Edit").click()
    text = item(page, run).get_by_label("Arguments, as JSON")
    given = await text.input_value()
    assert given.startswith(f'{{"amount":{2**60},'), "no digit is lost"
    assert "\\u202e" in given
    await text.fill(given.replace(str(2**60), '"much"'))
    await item(page, run).get_by_role("button", name="Allow with these").click()
    await expect(item(page, run).get_by_role("alert")).to_contain_text("arguments.amount")
    await text.fill("{")
    await item(page, run).get_by_role("button", name="Allow with these").click()
    await expect(item(page, run).get_by_role("alert")).to_contain_text("must be JSON")
    await text.fill(f'{{"amount":{2**60 - 1}}}')
    await item(page, run).get_by_role("button", name="Allow with these").click()
    await expect(item(page, run)).to_have_count(0)


async def test_hostile_arguments_are_text_and_nothing_else(page: Any, bus: LocalBus) -> None:
    run = await asks(bus, "pays a stranger")
    for hash_ in (INBOX, f"#run={run}"):
        await see(page, bus, hash_)
        shown = item(page, run).locator("pre")
        await expect(shown).to_contain_text("<script>document.title='hit'</script><img src=x")
        assert "\\u202egnihton\\u202c" in await shown.inner_text()
        assert "hit" not in await page.title()
        assert await page.locator("main script, main img").count() == 0
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        await page.goto("about:blank")


async def test_the_page_of_a_run_asks_and_says_that_somebody_else_was_first(page: Any, bus: LocalBus) -> None:
    run = await asks(bus, "pays")
    await see(page, bus, f"#run={run}")
    await item(page, run).get_by_role("button", name="Deny").click()  # and thinks about a reason

    def allow() -> None:
        with bus.sync_client() as client:
            [info] = client.waiting(run=run)
            client.approve(run, info.wait, by="ann")

    await asyncio.to_thread(allow)
    await expect(item(page, run)).to_have_count(0)
    await expect(page.locator(".run-line .st")).to_have_text("completed")
    assert await fate_of(bus, run) == (("allow", "ann", "bus"), '{"amount":500}')


async def test_the_page_of_a_session_asks_too(page: Any, bus: LocalBus) -> None:
    name = await asyncio.to_thread(begun, bus, "pays", tools=[{"name": "pay"}])
    await see(page, bus, f"#session={name}")
    asked = page.locator(".asks .ask")
    await expect(asked).to_contain_text('{"amount":500}')
    await asked.get_by_role("button", name="Allow").click()
    await expect(asked).to_have_count(0)
    await expect(page.locator(".answer .k-text .model-text")).to_have_text("Paid.")


async def test_who_may_only_look_sees_no_buttons_and_who_may_decide_sees_arguments_too(chromium: Any) -> None:
    looks, decides = new_key(), new_key()
    keys = f"""
[gateway.keys.looks]
sha256 = "{looks.sha256}"
tenant = "acme"
console = ["see_runs", "act"]
[gateway.keys.decides]
sha256 = "{decides.sha256}"
tenant = "acme"
console = ["decide"]
"""
    with LocalBus(SETTINGS + keys) as bus:
        script(bus)
        run = await asks(bus, "pays", metadata={"tenant": "acme"})
        other = await asks(bus, "pays", metadata={"tenant": "other"})
        for key, buttons, shown in ((looks, 0, "characters, hidden"), (decides, 3, '{"amount":500}')):
            async with page_of(chromium, allowed=("status of 401",)) as page:  # before the login
                await log_in(page, f"{bus.gateway}/console/", key.text, INBOX)
                await expect(item(page, run)).to_contain_text(shown)
                await expect(item(page, run).get_by_role("button")).to_have_count(buttons)
                await expect(item(page, other)).to_have_count(0)


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_axe_finds_nothing_where_runs_wait_and_a_phone_needs_no_scrolling_sideways(
    chromium: Any, bus: LocalBus, scheme: str
) -> None:
    source = packages(Path(__file__).parent) / "axe-core" / "axe.min.js"
    run = await asks(bus, "pays a stranger", metadata={"tenant": "acme"})
    async with page_of(chromium, color_scheme=scheme, bypass_csp=True, viewport={"width": 360, "height": 740}) as page:
        for hash_ in (INBOX, f"#run={run}"):
            await see(page, bus, hash_)
            await item(page, run).get_by_role("button", name="Edit").click()
            await expect(item(page, run).get_by_label("Arguments, as JSON")).to_be_visible()
            assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, hash_
            await page.add_script_tag(path=source)
            found = await page.evaluate("axe.run(document).then((result) => result.violations)")
            places = [(one["id"], [node["target"] for node in one["nodes"]][:5]) for one in found]
            assert not places, (hash_, places)
            await page.goto("about:blank")
