"""Drops thinking that a vendor sends twice: in a reasoning field and between tags at the start of the text.

If the tagged content equals the reasoning field, it is not part of the text. So once the reasoning field has content, a
text that starts with the tag is held back until the tag closes. If the content differs, it is emitted unchanged.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.quirks import Quirks
from tokenbus.providers.response.repeats import EmittedText

MAX_CHARS = 256 * 1024
"""Maximum length of tagged thinking to compare with the reasoning field."""
_ROOM = 256
"""How far into a text to look for the opening tag."""


class RepeatedThinking(msgspec.Struct):
    """Takes the text of one answer and removes thinking that was already emitted. Its fields are its whole state."""

    names: tuple[str, ...]
    """Tag names."""
    place: Literal["start", "inside", "after"] = "start"
    close: str = ""
    """The tag that closes the thinking in the text."""
    waits: bool | None = None
    """Whether the reasoning field had content before the text began."""
    held: list[str] = []
    """The beginning of the text, while it may be repeated thinking."""
    size: int = 0
    """Characters received in the current place."""
    tail: str = ""
    """The end of the searched text: a possible beginning of a tag."""
    inner: EmittedText = msgspec.field(default_factory=EmittedText)
    """The text between the tags, as far as it was searched."""

    @classmethod
    def of(cls, quirks: Quirks) -> RepeatedThinking:
        """For a vendor with these tags, or with those that are usual."""
        names = quirks.inline_thinking or ("think", "thinking", "thought", "reasoning")
        if quirks.inline_thinking_opened:
            return cls(names, "inside", f"</{names[0]}>")
        return cls(names)

    def take(self, piece: str, thought: EmittedText) -> str:
        """Return the text to emit now. ``thought``: what the reasoning field has brought so far."""
        if self.place == "after":
            return piece
        if self.waits is None:
            self.waits = bool(thought)
        if self.waits:
            self.held.append(piece)
        self.size += len(piece)
        left = self._search(piece, thought)
        return left if self.waits else piece

    def says(self, thought: str) -> bool:
        """Whether the text contained this thinking between its tags."""
        return self.place == "after" and bool(self.inner) and self.inner.rest(thought) == ""

    def release(self) -> str:
        """Return held-back content as text."""
        held, self.held = "".join(self.held), []
        if held:
            self.place = "after"
        return held

    def _search(self, piece: str, thought: EmittedText) -> str:
        """Search the held-back text for its tags. Return the text that is certain by now and not repeated thinking."""
        if self.place == "start":
            begun = (self.tail + piece).lstrip()
            tags = [f"<{name}>" for name in self.names]
            tag = next((tag for tag in tags if begun.startswith(tag)), "")
            if not tag:
                self.tail = begun
                return (
                    "" if self.size <= _ROOM and any(tag.startswith(begun) for tag in tags) else self._stop_comparing()
                )
            self.place, self.close, self.tail = "inside", f"</{tag[1:]}", ""
            piece = begun[len(tag) :]
        text = self.tail + piece
        end = text.find(self.close)
        if end < 0:
            keep = max(0, len(text) - len(self.close) + 1)
            self.inner.add(text[:keep])
            self.tail = text[keep:]
            return "" if self.size <= MAX_CHARS else self._stop_comparing()
        self.inner.add(text[:end])
        if (self.inner.units, self.inner.crc) != (thought.units, thought.crc):
            return self._stop_comparing()
        self.place, self.held = "after", []
        return text[end + len(self.close) :]

    def _stop_comparing(self) -> str:
        self.place = "after"
        return self.release()
