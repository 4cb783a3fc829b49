"""Thinking that a vendor gives twice: in its field of reasoning, and between tags at the beginning of the text.

The tags with what is between them are no text where the field said the same. So once the field has thinking, a text
that begins with the tag waits for its close; should it be another text, it comes out as it was.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.quirks import Quirks
from tokenbus.providers.response.repeats import Told

MAX_CHARS = 256 * 1024
"""Longest thinking in a text that is compared with the field's."""
_ROOM = 256
"""Longest beginning of a text in which the tag is looked for."""


class Echo(msgspec.Struct):
    """The text of one answer in, the same without thinking that is told already. Its fields are its whole state."""

    names: tuple[str, ...]
    """Of the tags."""
    place: Literal["start", "inside", "after"] = "start"
    close: str = ""
    """The tag that the thinking in the text ends with."""
    waits: bool | None = None
    """The field had thinking before the text began."""
    held: list[str] = []
    """The beginning of the text, while it may be thinking that was told."""
    size: int = 0
    """Characters of the place so far."""
    tail: str = ""
    """The end of what was looked through: the beginning of a tag, it may be."""
    inner: Told = msgspec.field(default_factory=Told)
    """What the text has between its tags, as far as that was looked through."""

    @classmethod
    def of(cls, quirks: Quirks) -> Echo:
        """For a vendor with these tags, or with those that are usual."""
        names = quirks.inline_thinking or ("think", "thinking", "thought", "reasoning")
        if quirks.inline_thinking_opened:
            return cls(names, "inside", f"</{names[0]}>")
        return cls(names)

    def take(self, piece: str, thought: Told) -> str:
        """What of the text may go on; ``thought`` is what the field said so far."""
        if self.place == "after":
            return piece
        if self.waits is None:
            self.waits = bool(thought)
        if self.waits:
            self.held.append(piece)
        self.size += len(piece)
        left = self._look_through(piece, thought)
        return left if self.waits else piece

    def says(self, thought: str) -> bool:
        """Whether the text had this thinking between its tags."""
        return self.place == "after" and bool(self.inner) and self.inner.rest(thought) == ""

    def release(self) -> str:
        """What is held back is text."""
        held, self.held = "".join(self.held), []
        if held:
            self.place = "after"
        return held

    def _look_through(self, piece: str, thought: Told) -> str:
        """What of the held text is clear by now, and none that was told."""
        if self.place == "start":
            begun = (self.tail + piece).lstrip()
            tags = [f"<{name}>" for name in self.names]
            tag = next((tag for tag in tags if begun.startswith(tag)), "")
            if not tag:
                self.tail = begun
                return "" if self.size <= _ROOM and any(tag.startswith(begun) for tag in tags) else self._give_up()
            self.place, self.close, self.tail = "inside", f"</{tag[1:]}", ""
            piece = begun[len(tag) :]
        text = self.tail + piece
        end = text.find(self.close)
        if end < 0:
            keep = max(0, len(text) - len(self.close) + 1)
            self.inner.add(text[:keep])
            self.tail = text[keep:]
            return "" if self.size <= MAX_CHARS else self._give_up()
        self.inner.add(text[:end])
        if (self.inner.units, self.inner.crc) != (thought.units, thought.crc):
            return self._give_up()
        self.place, self.held = "after", []
        return text[end + len(self.close) :]

    def _give_up(self) -> str:
        self.place = "after"
        return self.release()
