"""Public events of one run for tests: each with the next seq."""

from __future__ import annotations

from itertools import count
from typing import Any

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import (
    BlockComplete,
    BlockKind,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    ImagePreview,
    ImageRef,
    Incomplete,
    Restarted,
    Retrying,
    RunFailedEvent,
    Started,
    Timing,
    ToolProgress,
)
from tokenbus.events.usage import Usage

TIMING = Timing(first_byte_ms=5, first_visible_ms=12, total_ms=40)
OVERLOADED = ErrorInfo(code="overloaded_error", kind="overloaded", message="come back later", status=529)


class EventFactory:
    def __init__(self, run: str = "r1") -> None:
        self.run = run
        self._seq = count()

    def _at(self) -> dict[str, Any]:
        return {"run": self.run, "seq": next(self._seq), "turn": 0, "attempt": 1}

    def started(self) -> Started:
        return Started(**self._at(), provider="anthropic", model="m")

    def opens(self, block: int, kind: BlockKind, **more: Any) -> BlockStarted:
        return BlockStarted(**self._at(), block=block, kind=kind, **more)

    def chunk(self, block: int, text: str, kind: BlockKind = "text", **more: Any) -> Chunk:
        return Chunk(**self._at(), block=block, kind=kind, text=text, visible=kind == "text", depth=0, **more)

    def preview(self, number: int, index: int, image: ImageRef) -> ImagePreview:
        return ImagePreview(**self._at(), block=number, kind="image", index=index, image=image)

    def progress(self, block: int, progress: float, **more: Any) -> ToolProgress:
        return ToolProgress(**self._at(), block=block, tool_id="t1", tool_name="weather", progress=progress, **more)

    def block(self, block: int, kind: BlockKind, **more: Any) -> BlockComplete:
        return BlockComplete(**self._at(), block=block, kind=kind, **more)

    def retrying(self, drop_from: int) -> Retrying:
        return Retrying(**self._at(), error=OVERLOADED, next_attempt=2, delay_ms=500, drop_from=drop_from)

    def restarted(self, drop_from: int) -> Restarted:
        return Restarted(**self._at(), error=OVERLOADED, next_attempt=2, delay_ms=500, drop_from=drop_from)

    def completed(self) -> Completed:
        usage = Usage(input=7, output=3)
        return Completed(**self._at(), finish="stop", timing=TIMING, usage=usage)

    def incomplete(self) -> Incomplete:
        return Incomplete(**self._at(), finish="unknown", timing=TIMING, reason="the stream broke off")

    def failed(self) -> RunFailedEvent:
        return RunFailedEvent(**self._at(), finish="error", timing=TIMING, error=OVERLOADED)

    def cancelled(self) -> Cancelled:
        return Cancelled(**self._at(), finish="unknown", timing=TIMING, reason="enough")
