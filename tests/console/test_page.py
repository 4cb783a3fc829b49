"""The console in a real browser, against the real services: one bus and one browser for all tests."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.clients.node import packages
from tests.console.browser import ALLOWED_ERRORS, expect, page_of, see
from tests.console.gates import open_gate
from tests.console.models import SETTINGS, WEATHER, WORDS, call_with, ended, publish
from tests.waiting import eventually
from tokenbus.testing import LocalBus
from tokenbus_services.console.runs import run_table
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.process.embedded_server import free_port

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def log_in(page: Any, url: str, key: str, hash_: str) -> None:
    await page.goto(url + hash_)
    await page.get_by_label("Key of the gateway").fill(key)
    await page.get_by_role("button", name="Log in").click()


async def copied_link(page: Any) -> str:
    await page.get_by_role("button", name="Link").click()
    await expect(page.locator(".said")).to_contain_text("Copied")
    return await page.evaluate("navigator.clipboard.readText()")


async def test_a_run_streams_into_the_river_and_opens_by_keyboard(page: Any, bus: LocalBus) -> None:
    await see(page, bus)
    await expect(page.get_by_test_id("connection")).to_have_text("live")
    run = await asyncio.to_thread(publish, bus, "speaks", metadata={"tenant": "acme"})
    line = page.locator(f'[data-run="{run}"]')
    await expect(line).to_contain_text("acme")
    await expect(line).to_contain_text("anthropic/speaks")
    await page.keyboard.press("/")
    await page.keyboard.type(run)
    await expect(page.locator(".lines .line")).to_have_count(1)
    await page.keyboard.press("Escape")
    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(re.compile(f"#run={run}"))
    text = page.locator(".k-text .model-text")
    await expect(text).to_contain_text("word1")
    await expect(page.locator(".run-line .st")).to_have_text("completed")
    await expect(text).to_have_text(WORDS)
    await expect(page.locator(".k-thinking .model-text")).to_have_text("let me see")
    await expect(page.locator(".timeline .row")).to_have_count(1)
    await expect(page.locator(".facts-list")).to_contain_text("first byte")
    await page.keyboard.press("Escape")
    await expect(page.locator(f'[data-run="{run}"] .st')).to_have_text("completed")


async def test_a_silent_run_comes_first_and_looks_so_and_the_order_is_in_the_address(
    page: Any, bus: LocalBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_table, "QUIET_MS", 500)
    silent = await asyncio.to_thread(publish, bus, "waits")
    await see(page, bus)
    line = page.locator(f'[data-run="{silent}"]')
    await expect(line.locator(".silent")).to_contain_text("silent")
    await expect(line).to_have_class(re.compile("quiet|stuck"))
    await expect(page.locator(".lines").first.locator(".line").first.locator(".silent")).to_be_visible()
    await page.get_by_label("Sort").select_option("newest")
    await expect(page).to_have_url(re.compile("sort=newest"))
    await page.get_by_label("until", exact=True).fill("2020-01-01T00:00:00")
    await expect(line).to_have_count(0)
    await page.get_by_role("button", name="Clear").click()
    await expect(line).to_be_visible()
    await page.locator(f'[data-run="{silent}"]').click()
    await page.get_by_test_id("cancel").click()
    await page.get_by_role("button", name="Cancel the run").click()
    await expect(page.locator(".run-line .st")).to_have_text("cancelled")


async def test_the_slider_shows_any_event_and_the_link_opens_there(page: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "speaks")
    await see(page, bus, f"#run={run}")
    text = page.locator(".k-text .model-text")
    await expect(text).to_have_text(WORDS)
    slider = page.get_by_role("slider")
    last = int(await slider.get_attribute("max"))
    await slider.fill(str(last // 2))
    await expect(page).to_have_url(re.compile(rf"#run={run}&seq={last // 2}$"))
    await expect(page.locator(".run-line .st")).to_have_text("speaking")
    await expect(page.locator(".k-text .facts")).to_contain_text("streaming")
    part = await text.inner_text()
    assert part != WORDS
    assert WORDS.startswith(part)
    await page.keyboard.press("ArrowLeft")
    await expect(page).to_have_url(re.compile(rf"&seq={last // 2 - 1}$"))
    await page.reload()
    await expect(page.locator(".raw-line[aria-current] .seq")).to_have_text(str(last // 2 - 1))
    assert WORDS.startswith(await text.inner_text())
    await page.get_by_role("button", name="to the newest").click()
    await expect(text).to_have_text(WORDS)
    await expect(page).to_have_url(re.compile(rf"#run={run}$"))


async def test_a_retry_and_a_tool_call_are_rows_of_the_timeline(page: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "recovers")
    await see(page, bus, f"#run={run}")
    await expect(page.locator(".timeline .row.t-attempt")).to_have_count(2)
    await expect(page.locator(".timeline .row.o-retried")).to_contain_text("overloaded")
    await expect(page.locator(".k-text .model-text")).to_have_text("at last")
    run = await asyncio.to_thread(ended, bus, "calls", tools=[WEATHER])
    await see(page, bus, f"#run={run}")
    await expect(page.locator(".k-tool_call .model-text")).to_contain_text("Zürich")
    await expect(page.locator(".k-tool_result .model-text")).to_contain_text("celsius")
    await expect(page.locator(".timeline .row.t-tool .took")).to_have_text(re.compile(r"\d m?s"))
    await expect(page.locator(".timeline .row.t-attempt")).to_have_count(2)


async def test_a_failed_run_is_red_and_its_button_retries_it(page: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "refuses")
    await see(page, bus)
    await expect(page.locator(f'.line.hot[data-run="{run}"]')).to_contain_text("failed")
    await page.locator(f'[data-run="{run}"]').click()
    await page.get_by_test_id("retry").click()
    await expect(page.locator(".k-text .model-text")).to_have_text("now it works")
    assert run not in page.url


async def test_a_cancel_by_button_closes_the_providers_socket(page: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(publish, bus, "waits", "until a button")
    await see(page, bus, f"#run={run}")
    await expect(page.locator(".k-text .model-text")).to_contain_text("one two")
    exchange = call_with(bus, "until a button")
    await page.get_by_test_id("cancel").click()
    await page.get_by_role("button", name="Cancel the run").click()
    await eventually(lambda: exchange.state == "disconnected")
    await expect(page.locator(".run-line .st")).to_have_text("cancelled")
    await expect(page.get_by_test_id("cancel")).to_have_count(0)


async def test_hostile_output_is_text_and_nothing_else(page: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "hostile")
    await see(page, bus, f"#run={run}")
    await expect(page.locator(".run-line .st")).to_have_text("completed")
    await expect(page.locator(".k-thinking .model-text")).to_have_text("⟨U+2066⟩⟨U+009B⟩hm")
    shown = page.locator(".k-text .model-text")
    assert len(await shown.inner_text()) <= 24_000
    await page.get_by_role("button", name="Beginning").click()
    await expect(shown).to_contain_text("<script>document.title='hit'</script><img src=x")
    await expect(shown).to_contain_text("␛[31mred␛[0m ⟨U+202E⟩gnihton⟨U+202C⟩ ⟨U+2066⟩x⟨U+2069⟩ ⟨U+200B⟩|")
    await see(page, bus)
    await expect(page.locator(f'[data-run="{run}"]')).to_contain_text("AAAA")
    assert "hit" not in await page.title()
    assert await page.locator("main script, main img").count() == 0
    width = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert width <= 0, "a long line makes no page wider"


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_axe_finds_nothing(chromium: Any, bus: LocalBus, scheme: str) -> None:
    source = packages(Path(__file__).parent) / "axe-core" / "axe.min.js"
    run = await asyncio.to_thread(ended, bus, "calls", tools=[WEATHER])
    await asyncio.to_thread(ended, bus, "breaks")
    async with page_of(chromium, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce") as page:
        for hash_, sign in (
            ("", f'[data-run="{run}"]'),
            (f"#run={run}", ".end"),
            ("#view=health", "[aria-labelledby=workers-title] td"),
        ):
            await see(page, bus, hash_)
            await expect(page.locator(sign).first).to_be_visible()
            await page.add_script_tag(path=source)
            found = await page.evaluate("axe.run(document).then((result) => result.violations)")
            places = [(one["id"], [node["target"] for node in one["nodes"]][:5]) for one in found]
            assert not places, (hash_, places)
            await page.goto("about:blank")


async def test_a_phone_needs_no_scrolling_sideways(chromium: Any, bus: LocalBus) -> None:
    run = await asyncio.to_thread(ended, bus, "calls", tools=[WEATHER])
    async with page_of(chromium, viewport={"width": 360, "height": 740}) as page:
        for hash_, sign in (
            ("", f'[data-run="{run}"]'),
            (f"#run={run}", ".end"),
            ("#view=health", "[aria-labelledby=workers-title] td"),
        ):
            await see(page, bus, hash_)
            await expect(page.locator(sign).first).to_be_visible()
            assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, hash_
            await page.goto("about:blank")


async def test_a_page_continues_automatically_after_the_gateway_was_killed_and_roles_and_links_hold(
    chromium: Any, bus: LocalBus, tmp_path: Path
) -> None:
    """A gateway of its own, in a process that can be killed, on the same bus; with keys."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/console/"
    config = tmp_path / "tokenbus.toml"
    ada, eve = new_key(), new_key()
    keys = f"""
[gateway.keys.ada]
sha256 = "{ada.sha256}"
operator = true
console = ["see_content", "act"]
[gateway.keys.eve]
sha256 = "{eve.sha256}"
operator = true
console = ["see_runs"]
"""
    config.write_text(f'redis_url = "{bus.url}"\ndata_dir = "{tmp_path}"\n{SETTINGS}{keys}')

    async def start() -> Any:
        output = tmp_path / "out"
        output.write_text("")
        process = fork_server.shared().start(
            *("worker", "gateway", "--port", str(port)),
            env={**os.environ, "TOKENBUS_CONFIG": str(config)},
            stdout=output,
            stderr=tmp_path / "log",
        )
        await eventually(lambda: "ready " in output.read_text())
        return process

    gateway = await start()
    over = await asyncio.to_thread(ended, bus, "recovers")
    allowed = (*ALLOWED_ERRORS, "401")  # before the login
    async with page_of(chromium, allowed=allowed, permissions=["clipboard-read", "clipboard-write"]) as page:
        await log_in(page, url, "tb-wrong", "")
        await expect(page.get_by_role("alert")).to_contain_text("not valid")
        await log_in(page, url, ada.text, f"#run={over}")
        await expect(page.get_by_test_id("connection")).to_have_text("live")
        text = page.locator(".k-text .model-text")
        await expect(text).to_have_text("at last")

        link = await copied_link(page)
        async with page_of(chromium, allowed=allowed) as colleague:
            await colleague.goto(link)
            await expect(colleague.locator(".k-text .model-text")).to_have_text("at last")

        await _nothing_of_what_runs_say(chromium, bus, f"{url}#run={over}", eve.text)

        gateway.send_signal(signal.SIGSTOP)
        await expect(page.get_by_test_id("connection")).to_have_text(re.compile(r"^\d+ s behind"))
        gateway.send_signal(signal.SIGCONT)
        await expect(page.get_by_test_id("connection")).to_have_text("live")
        gateway.terminate()  # as a rolling restart does
        assert await gateway.wait() == 0
        gateway = await start()
        await expect(page.get_by_test_id("connection")).to_have_text("live")

        run = await asyncio.to_thread(publish, bus, "waits", "through a restart")
        await page.goto(f"{url}#run={run}")
        await expect(text).to_have_text("one two three")
        await expect(page.get_by_test_id("cancel")).to_be_visible()
        gateway.kill()
        await gateway.wait()
        await expect(page.get_by_test_id("connection")).to_contain_text("disconnected")
        bus.resume(call_with(bus, "through a restart"))
        gateway = await start()
        await expect(text).to_have_text("one two three four")
        await expect(page.locator(".run-line .st")).to_have_text("completed")
        await expect(page.get_by_test_id("connection")).to_have_text("live")
    gateway.terminate()
    assert await gateway.wait() == 0


async def _nothing_of_what_runs_say(chromium: Any, bus: LocalBus, url: str, key: str) -> None:
    """This key may see runs, and neither what they say nor what policies made of it."""
    open_gate("at-once")
    judged = await asyncio.to_thread(ended, bus, "minds")
    async with page_of(chromium, allowed=(*ALLOWED_ERRORS, "401")) as page:
        await page.goto(url)
        await page.get_by_label("Key of the gateway").fill(key)
        await page.get_by_role("button", name="Log in").click()
        await expect(page.locator(".hidden-content")).to_contain_text("7 characters")
        assert "at last" not in await page.content()
        await page.evaluate("(run) => { location.hash = `#run=${run}`; }", judged)
        await expect(page.locator("h1")).to_have_text(judged)
        await expect(page.locator(".end")).to_be_visible()
        assert "too much" not in await page.content()
        assert "held:" not in await page.content()
