"""A run as plain text for pipes: visible text as it arrives, everything else on marked lines. Pure."""

from __future__ import annotations

from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, ImagePreview, PublicEvent, RunEnd, UsageReported
from tokenbus_services.cli.render import event_text as wording


class PlainText:
    """Converts one run's events to text. Lines that begin with a word in brackets are about the run; others are its
    text.
    """

    def __init__(self) -> None:
        self._at_line_start = True
        self._block: int | None = None
        """The visible block written last."""

    def feed(self, event: PublicEvent) -> str:
        """Return the text to write for this event; may be empty."""
        match event:
            case Chunk(visible=True):
                return self._visible(event)
            case BlockComplete() if event.kind != "text":
                return self._marked(wording.title(event), wording.content(event))
            case BlockStarted(prompt=str(prompt)):
                return self._marked("image of", prompt)
            case Chunk() | BlockStarted() | ImagePreview() | BlockComplete() | UsageReported():
                return ""  # the run's end shows the total usage
            case _:
                text = self._marked(wording.name(event), wording.details(event))
                if isinstance(event, RunEnd):
                    text += self._marked("usage", wording.usage(event.usage)) if event.usage else ""
                    text += self._marked("timing", wording.timing(event.timing))
                return text

    def _visible(self, chunk: Chunk) -> str:
        begin = "" if chunk.block == self._block else self._fresh_line()
        self._block = chunk.block
        text = begin + chunk.text
        if text:
            self._at_line_start = text.endswith("\n")
        return text

    def _marked(self, mark: str, text: str) -> str:
        lines = "".join(f"[{mark}] {line}".rstrip() + "\n" for line in text.splitlines() or [""])
        begin = self._fresh_line()
        self._at_line_start = True
        return begin + lines

    def _fresh_line(self) -> str:
        return "" if self._at_line_start else "\n"
