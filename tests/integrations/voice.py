"""What the tests of both voice frameworks share: a bus whose model speaks in sentences, and what a run's log says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.waiting import eventually
from tokenbus import Cancelled, Chunk, Client, RunEnded, Started
from tokenbus.client.sessions.session import Session
from tokenbus.testing import CutOff, Delivery, LocalBus, Reply, Stall, Status, ToolCall, Turn

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
SENTENCES = "The weather will be dry today. Take the umbrella anyway, please. It may rain after six."
HEARD = "The weather will be"
LONG = Turn(says=Reply(text=SENTENCES), delivery=Delivery(pace=50), fault=Stall(after_text="please."))
SETTINGS = """
[gateway]
[policies.quiet]
use = "tokenbus.policy:ReplaceText"
[policies.quiet.options]
rules = [{ find = "umbrella", replace = "coat" }]
"""


@contextmanager
def running_bus() -> Iterator[LocalBus]:
    with LocalBus(SETTINGS) as bus:
        bus.model_says("text", Reply(thinking="Hm.", text=SENTENCES))
        bus.model_says("long", LONG, Reply(text="As you like."))
        bus.model_says("slow", msgspec.structs.replace(LONG, fault=None), Reply(text="As you like."))
        bus.model_says(
            "calls", Reply(tool_calls=(ToolCall(name="place", arguments={"of": "Ann"}),)), "So: {tool_result}"
        )
        bus.model_says("failing", Turn(says=Reply(text=SENTENCES), fault=Status(status=400)))
        bus.model_says("cut", Turn(says=Reply(text=SENTENCES), fault=CutOff(after_text="umbrella")))
        yield bus


async def how_it_was_left(bus: Client, run: str) -> tuple[Cancelled, str]:
    """The end of a cancelled run, and the text that its `heard_through` covers: all chunks wholly within `HEARD`."""
    events = [event async for event in bus.follow(run)]
    end = events[-1]
    assert isinstance(end, Cancelled), end
    assert end.heard_through is not None
    spoken, received = "", ""
    for event in events:
        if isinstance(event, Chunk) and event.visible:
            spoken += event.text
            assert (event.seq <= end.heard_through) == (HEARD.startswith(spoken.strip())), (spoken, end)
            received = spoken if event.seq <= end.heard_through else received
    return end, received


def python_of(guide: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL | re.MULTILINE)


async def gone(bus: LocalBus, number: int = -1) -> None:
    """Until the provider sees that a request's socket is closed."""
    await eventually(lambda: bus.exchanges[number].state == "disconnected")


async def history_of(session: Session) -> list[tuple[str, str]]:
    """Who said what, once no run is open: the history excludes an open one."""

    async def idle() -> bool:
        events = [step.event async for step in session.follow(live=False)]
        ended = {event.run for event in events if isinstance(event, RunEnded)}
        return {event.run for event in events if isinstance(event, Started)} == ended

    await eventually(idle)
    found: list[tuple[str, str]] = []
    for message in await session.messages():
        parts = (
            [message.content] if isinstance(message.content, str) else [getattr(p, "text", "") for p in message.content]
        )
        found.append((message.role, "".join(parts)))
    return found
