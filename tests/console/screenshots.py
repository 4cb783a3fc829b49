"""`make screenshots`: the console's pictures in docs/images, of a real bus with the mock provider."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

from tests.console.browser import browser, page_of
from tokenbus.testing import Delivery, LocalBus, Reply, Stall, Status, ToolCall, Turn

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SETTINGS = """
[gateway]
models = ["anthropic/claude-sonnet-4-6"]
[gateway.prices.""]
input = 3.0
output = 15.0
[console]
roles_without_keys = ["see_runs", "see_content", "act", "admin"]
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
"""
MODELS = (
    ("anthropic", "claude-sonnet-4-6"),
    ("gemini", "gemini-3-pro"),
    ("openai-responses", "gpt-6"),
    ("openai-chat", "qwen-3-max"),
)
TENANTS = ("acme", "globex", "initech")
TEXTS = (
    "A lease that is renewed late is a lease that was lost: treat it so, even if nobody else asked for it in between. "
    "Write the time of the last renewal beside the owner, and compare both when you commit.",
    "Der Zug um 14:32 fährt heute von Gleis 7 ab. In Olten haben Sie acht Minuten zum Umsteigen, der Zug wartet.",
    "Three tests fail, and all of them for one reason: the fixture opens its socket before the server listens. "
    "Wait for the port, and they pass. I would also drop the sleep in line 40, which hides the same fault.",
    "Dear Ms Okafor, thank you for your patience. Your refund of 84.20 was sent today; it reaches you by Thursday.",
)
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL_TURN = Turn(
    says=Reply(
        thinking="The user asks about an umbrella this afternoon. That depends on rain, so I look at the weather, "
        "and say so, because the wait is long enough to notice.",
        text="Let me look at the sky over Zürich.",
        tool_calls=(ToolCall(name="weather", arguments={"city": "Zürich"}),),
    ),
    first=(Status(status=529),),
    delivery=Delivery(pace=30),
)
ANSWERS = Turn(
    says=Reply(
        text="Yes, take it along. There is light rain over Zürich right now, at 14 °C and with hardly any wind, so an "
        "umbrella will do and you can leave the raincoat at home.\n\nIt should be dry from six in the evening on: if "
        "you can wait until then, you may go without."
    ),
    delivery=Delivery(pace=30),
)


def script(bus: LocalBus) -> None:
    """What the models say."""
    for number, (_, model) in enumerate(MODELS):
        says = Reply(text=TEXTS[number], thinking="First I look at what was asked. " * 3 if number % 2 else "")
        bus.model_says(model, Turn(says=says, delivery=Delivery(pace=60)))
        slow = Turn(says=Reply(text=" ".join(TEXTS * 4)), delivery=Delivery(pace=8 + 7 * number))
        bus.model_says(f"{model}-long", slow)
    bus.model_says("gpt-6-mini", Turn(says=Reply(), fault=Status(status=400)))
    bus.model_says("claude-haiku-5", Turn(says=Reply(text="Let me "), fault=Stall()))
    bus.model_says("claude-opus-5", TOOL_TURN, ANSWERS)


def publish(bus: LocalBus, provider: str, model: str, tenant: str, **fields: Any) -> str:
    messages = [{"role": "user", "content": "Do I need an umbrella in Zürich this afternoon?"}]
    request = {"provider": provider, "model": model, "messages": messages, "metadata": {"tenant": tenant}, **fields}
    with bus.sync_client() as client:
        return client.publish(request).id


async def main() -> int:
    from playwright.async_api import expect

    expect.set_options(timeout=60_000)
    IMAGES.mkdir(exist_ok=True)
    with LocalBus(SETTINGS) as bus:
        script(bus)
        async with (
            browser() as running,
            page_of(running, color_scheme="dark", viewport={"width": 1280, "height": 640}) as page,
        ):
            await page.goto(f"{bus.gateway}/console/")
            await expect(page.get_by_test_id("connection")).to_have_text("live")
            for number in range(16):
                provider, model = MODELS[number % 4]
                publish(bus, provider, model, TENANTS[number % 3])
                if number % 6 == 2:
                    publish(bus, "openai-chat", "gpt-6-mini", TENANTS[number % 3])
                await asyncio.sleep(0.5)
            for number, (provider, model) in enumerate(MODELS * 2):
                publish(bus, provider, f"{model}-long", TENANTS[number % 3])
                await asyncio.sleep(0.7)
            publish(bus, "anthropic", "claude-haiku-5", "acme")
            run = publish(bus, "anthropic", "claude-opus-5", "globex", tools=[WEATHER])
            await expect(page.locator(f'[data-run="{run}"]')).to_contain_text(re.compile("thinking|speaking"))
            await asyncio.sleep(2)  # so that speeds are known
            await page.screenshot(path=IMAGES / "console-river.png")

            await page.goto(f"{bus.gateway}/console/#run={run}")
            await expect(page.locator(".k-text .model-text").last).to_contain_text("raincoat")
            await page.screenshot(path=IMAGES / "console-run.png")

            await page.goto(f"{bus.gateway}/console/#view=health")
            await expect(page.locator(".matrix td").first).to_be_visible()
            await page.emulate_media(color_scheme="light")
            await page.screenshot(path=IMAGES / "console-health.png")
    for path in sorted(IMAGES.glob("console-*.png")):
        print(path.relative_to(IMAGES.parents[1]), f"{path.stat().st_size // 1024} KB")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
