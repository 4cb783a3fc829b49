"""Tools as a deployment might declare them, and some that misbehave."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable
from functools import partial, wraps
from pathlib import Path

from tokenbus.errors import ToolFailure
from tokenbus.tools import Image, ToolContext

events: list[str] = []
"""What happened, for tests to see."""
release = threading.Event()
"""Lets the threads of `hang` end."""


def echo(**arguments: object) -> dict[str, object]:
    return arguments


def noted(path: str, word: str) -> str:
    """Leave a line of the call behind."""
    with Path(path).open("a") as file:
        file.write(f"{word}\n")
    return word


SEAT: dict[str, object] = {
    "type": "object",
    "properties": {"seat": {"type": "string"}},
    "required": ["seat"],
}
SURE: dict[str, object] = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}


async def book(flight: str, context: ToolContext, path: str = "") -> str:
    """Ask twice, then leave a line of the booking behind."""
    seat = await context.ask(SEAT, f"Which seat on {flight}?")
    if seat.content is None:
        return f"not booked: {seat.decision} by {seat.by} over {seat.door}"
    sure = await context.ask(SURE, f"Book {seat.content['seat']}?", timeout_s=3600)
    if not sure.content or not sure.content["sure"]:
        return f"not booked: {sure.decision}"
    word = f"{flight}/{seat.content['seat']}"
    return noted(path, word) if path else word


async def ask_briefly(context: ToolContext) -> str:
    answer = await context.ask(SURE, "Quick?", timeout_s=0.2)
    return f"{answer.decision} over {answer.door}, {answer.content}"


async def ask_on_a_page(context: ToolContext) -> str:
    answer = await context.ask(None, "Sign in.", url="https://sign.example/in")
    return f"{answer.decision}, {answer.content}"


async def ask_stubbornly(context: ToolContext) -> str:
    """Catch what can be caught, and return something all the same."""
    try:
        await context.ask(SURE, "Really?")
    except Exception as e:  # what a careless tool does
        return f"caught {e}"
    except BaseException:
        await asyncio.sleep(0)
        return "caught"
    return "answered"


async def ask_in_a_task(context: ToolContext) -> str:
    asked = asyncio.create_task(context.ask(SURE, "Really?"))  # type: ignore[arg-type]
    await asyncio.wait({asked})
    return "went on"


def ask_in_a_thread(context: ToolContext) -> str:
    return asyncio.run(context.ask(SURE, "Really?")).decision  # type: ignore[arg-type]


async def ask_something_else(context: ToolContext) -> str:
    ask_something_else.asked += 1  # type: ignore[attr-defined]
    answer = await context.ask(SURE, f"Number {ask_something_else.asked}?")  # type: ignore[attr-defined]
    return answer.decision


ask_something_else.asked = 0  # type: ignore[attr-defined]


async def ask_then_crash_once(path: str, context: ToolContext) -> str:
    answer = await context.ask(SURE, "Really?")
    if noted(path, "began") and lines_of(path) == 1:
        os._exit(3)
    return answer.decision


async def ask_on_and_on(context: ToolContext) -> None:
    while True:
        await context.ask(SURE, "Again?")


async def ask_badly(schema: object, text: str, context: ToolContext, timeout_s: float | None = None) -> str:
    return (await context.ask(schema, text, timeout_s=timeout_s)).decision  # type: ignore[arg-type]


def lines_of(path: str) -> int:
    return len(Path(path).read_text().splitlines())


def greet(name: str, greeting: str = "Hello") -> str:
    return f"{greeting}, {name}"


async def greet_later(name: str) -> str:
    await asyncio.sleep(0)
    return f"Later, {name}"


def nothing() -> None:
    return None


def give(size: int, letter: str = "x") -> str:
    return letter * size


def give_json(size: int) -> dict[str, object]:
    return {"items": list(range(size))}


def data() -> bytes:
    return b"\x00\x01"


def draw() -> Image:
    return Image(b"\x89PNG\r\n\x1a\n")


def draw_gif() -> Image:
    return Image(b"GIF89a", "image/gif")


def report() -> list[object]:
    return ["a chart", draw(), {"points": 2}]


def surrogate() -> str:
    return "half \ud800 a pair"


def unserialisable() -> object:
    return object()


def cyclic() -> object:
    loop: list[object] = []
    loop.append(loop)
    return loop


def context_aware(context: ToolContext, city: str = "") -> list[object]:
    return [context.run, context.turn, context.tool_id, context.key, 0 < context.remaining_s <= 60, city]


def whoami(context: ToolContext) -> dict[str, object]:
    return {"tenant": context.tenant, "metadata": dict(context.metadata)}


def own_context(context: str) -> str:
    return f"about {context}"


def fail(message: str = "no luck") -> None:
    raise ValueError(message)


async def fail_later() -> None:
    raise LookupError("not there")


def fail_politely() -> None:
    raise ToolFailure("fail_politely", "closed", "the shop is closed on Sundays")


def leave() -> None:
    sys.exit(3)


async def leave_later() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


class Exotic(BaseException):
    """Not even an Exception."""


async def exotic_later() -> None:
    raise Exotic("rare")


def stop_iteration() -> None:
    raise StopIteration("odd")


async def cancel_itself() -> None:
    raise asyncio.CancelledError


async def time_out_itself() -> None:
    raise TimeoutError("the far end")


async def stall() -> None:
    events.append("stalling")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        events.append("cancelled")
        raise


async def ignore_cancel() -> str:
    events.append("ignoring")
    while not release.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            events.append("swallowed")
    return "at last"


def hang() -> str:
    events.append("hanging")
    release.wait()
    return "released"


barrier = threading.Barrier(4)


def meet() -> str:
    """Returns once four calls are in here at the same time."""
    barrier.wait(timeout=60)
    return "met"


gathered = 0


async def meet_later() -> str:
    """The same for coroutines."""
    global gathered  # noqa: PLW0603
    gathered += 1
    while gathered < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return "met"


def positional(value: int, /) -> int:
    return value


def optional_positional(value: int = 7, /) -> int:
    return value


class Counter:
    """An object with methods and an async call."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, by: int) -> int:
        self.count += by
        return self.count

    async def __call__(self, by: int) -> int:
        return self.add(by)


counter = Counter()
partial_greet = partial(greet, greeting="Ahoy")


@wraps(greet_later)
def wrapped(*args: str, **kwargs: str) -> Awaitable[str]:
    """A plain function that hands back a coroutine, as decorators do."""
    return greet_later(*args, **kwargs)


not_callable = 42


async def reports_in_loop(context: ToolContext) -> str:
    context.report(0.5, 1, "half, very-secret")
    while not release.is_set():  # noqa: ASYNC110 - set by a test, for threads too
        await asyncio.sleep(0.002)
    return "done"


def reports_in_thread(context: ToolContext) -> str:
    context.report(0.5, 1, "half, very-secret")
    release.wait()
    return "done"
