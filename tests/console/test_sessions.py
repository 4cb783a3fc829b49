"""Sessions in the console: found in the list, read as a conversation, written to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.clients.node import packages
from tests.console.browser import expect, page_of, see
from tests.console.models import HOSTILE
from tokenbus.testing import LocalBus

pytestmark = pytest.mark.asyncio(loop_scope="package")


def begun(bus: LocalBus, model: str, said: str = "hello", **more: Any) -> str:
    """A session in which ada said something."""
    name = f"s-{uuid4().hex[:10]}"
    with bus.sync_client() as client:
        session = client.session(name, tenant=more.pop("tenant", ""))
        session.configure({"provider": "anthropic", "model": model, **more})
        session.send(said, participant="ada")
    return name


def say(bus: LocalBus, name: str, text: str) -> None:
    """Bob says something."""
    with bus.sync_client() as client:
        client.session(name).send(text, participant="bob")


async def test_a_session_is_found_by_words_tenant_and_metadata_and_opens(page: Any, bus: LocalBus) -> None:
    word = uuid4().hex
    name = await asyncio.to_thread(
        begun, bus, "speaks", f"rain and {word}", tenant="acme", metadata={"room": f"r{word}"}
    )
    await asyncio.to_thread(begun, bus, "speaks")
    await see(page, bus)
    await page.get_by_role("link", name="Sessions").click()
    line = page.locator(f'[data-session="{name}"]')
    await expect(line).to_contain_text(word)
    for field, text in (("words", f"{word} rain"), ("metadata", f"room=r{word}")):
        await page.locator(f"[name={field}]").fill(text)
        await expect(page.locator("[data-session]")).to_have_count(1)
        await expect(line).to_contain_text("acme")
        await page.locator(f"[name={field}]").fill("")
    await page.locator("[name=tenant]").fill("nobody")
    await expect(page.locator(".empty")).to_contain_text("No session matches")
    await page.locator("[name=tenant]").fill("acme")
    await line.click()
    await expect(page.locator(".utterance .model-text")).to_have_text(f"rain and {word}")
    await expect(page.locator(".answer .k-text .model-text")).to_contain_text("word59")
    await page.keyboard.press("Escape")
    await expect(line).to_contain_text("1 run")


async def test_one_says_something_while_the_model_speaks_sees_its_fate_and_interrupts(page: Any, bus: LocalBus) -> None:
    name = await asyncio.to_thread(begun, bus, "waits")
    await see(page, bus, f"#session={name}")
    answers = page.locator(".answer .k-text .model-text")
    await expect(answers).to_have_text("one two three")
    say = page.get_by_role("textbox", name="Message")
    await say.fill("and then?")
    await page.keyboard.press("Enter")
    await expect(say).to_have_value("")
    waits = page.locator(".waits li")
    await expect(waits).to_contain_text("and then?")
    await say.fill("never mind")
    await page.get_by_role("button", name="Send").click()
    await expect(waits).to_have_count(2)
    await waits.nth(1).get_by_role("button", name="Withdraw").click()
    await expect(waits).to_have_count(1)
    await expect(page.locator(".returned")).to_contain_text("never mind")
    await expect(page.locator(".returned .bad")).to_have_text("returned: it was taken back")
    await page.get_by_role("button", name="Interrupt").click()
    await expect(page.locator(".answer .st").first).to_have_text("cancelled")
    await expect(page.locator(".utterance h3")).to_have_text(["ada", "console", "console"])
    await expect(waits).to_have_count(0)


async def test_a_page_of_a_session_goes_on_and_says_that_it_was_deleted(page: Any, bus: LocalBus) -> None:
    name = await asyncio.to_thread(begun, bus, "speaks")
    await see(page, bus, f"#session={name}")
    await expect(page.locator(".answer .st")).to_have_text("completed")
    await asyncio.to_thread(say, bus, name, "more")
    await expect(page.locator(".utterance h3")).to_have_text(["ada", "bob"])

    def delete() -> None:
        with bus.sync_client() as client:
            client.session(name).delete()

    await asyncio.to_thread(delete)
    await expect(page.get_by_role("alert")).to_contain_text("deleted")
    await expect(page.get_by_role("textbox", name="Message")).to_have_count(0)


async def test_hostile_words_of_a_session_are_text_and_nothing_else(page: Any, bus: LocalBus) -> None:
    said = HOSTILE[:5000]
    name = await asyncio.to_thread(begun, bus, "hostile", said, metadata={"note": said[:200]})
    await see(page, bus, f"#session={name}")
    await expect(page.locator(".answer .st")).to_have_text("completed")
    for shown in (page.locator(".utterance .model-text"), page.locator(".answer .k-thinking .model-text")):
        assert "⟨U+" in await shown.inner_text()
    await expect(page.locator(".utterance .model-text")).to_contain_text(
        "<script>document.title='hit'</script><img src=x"
    )
    await see(page, bus, "#view=sessions")
    await expect(page.locator(f'[data-session="{name}"]')).to_contain_text("<script>")
    assert "hit" not in await page.title()
    assert await page.locator("main script, main img").count() == 0
    assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_axe_finds_nothing_in_sessions_and_a_phone_needs_no_scrolling_sideways(
    chromium: Any, bus: LocalBus, scheme: str
) -> None:
    source = packages(Path(__file__).parent) / "axe-core" / "axe.min.js"
    name = await asyncio.to_thread(begun, bus, "waits")
    await asyncio.to_thread(say, bus, name, "later")
    async with page_of(chromium, color_scheme=scheme, bypass_csp=True, viewport={"width": 360, "height": 740}) as page:
        for hash_, sign in (("#view=sessions", f'[data-session="{name}"]'), (f"#session={name}", ".waits li")):
            await see(page, bus, hash_)
            await expect(page.locator(sign).first).to_be_visible()
            assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, hash_
            await page.add_script_tag(path=source)
            found = await page.evaluate("axe.run(document).then((result) => result.violations)")
            places = [(one["id"], [node["target"] for node in one["nodes"]][:5]) for one in found]
            assert not places, (hash_, places)
            await page.goto("about:blank")
