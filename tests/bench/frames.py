"""The cost of a page in the browser, by frame: CPU time of the main thread, from Chromium's own trace.

CPU time, not wall time: the page waits for a core while the machine also runs the bus.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from typing import Any

import msgspec

_TASK = "ThreadControllerImpl::RunTask"
_EVERY_FRAME = "(() => { const next = () => requestAnimationFrame(next); next(); })()"


class Frames(msgspec.Struct, frozen=True):
    """Milliseconds of scripting, style, layout and painting in a frame."""

    p99: float
    longest: float
    count: int


async def frames_of(page: Any, seconds: float) -> Frames:
    """Measure this page while it draws sixty frames a second."""
    await page.evaluate(_EVERY_FRAME)
    session = await page.context.new_cdp_session(page)
    events: list[dict[str, Any]] = []
    complete = asyncio.Event()
    session.on("Tracing.dataCollected", lambda data: events.extend(data["value"]))
    session.on("Tracing.tracingComplete", lambda _: complete.set())
    categories = ["toplevel", "devtools.timeline", "disabled-by-default-devtools.timeline"]
    await session.send("Tracing.start", {"traceConfig": {"includedCategories": categories}})
    await asyncio.sleep(seconds)
    await session.send("Tracing.end")
    await complete.wait()
    await session.detach()
    return _frames(events)


def _frames(events: list[dict[str, Any]]) -> Frames:
    fired = [one for one in events if one["name"] == "FireAnimationFrame"]
    assert fired, "the page drew no frame"
    thread = (fired[0]["pid"], fired[0]["tid"])
    begins = sorted(one["ts"] for one in fired)
    spent = [0.0] * (len(begins) + 1)
    for one in events:
        if one["name"] == _TASK and (one["pid"], one["tid"]) == thread and "tdur" in one:
            spent[bisect_right(begins, one["ts"])] += one["tdur"] / 1000
    whole = sorted(spent[1:-1])
    assert whole, json.dumps(sorted({one["name"] for one in events}))
    return Frames(p99=whole[int(0.99 * (len(whole) - 1))], longest=whole[-1], count=len(whole))
