"""Thinking that a model writes into its text, as ``<think>…</think>``: found there, and given as blocks of its own.

Some vendors pass a model's text on as it wrote it; which tags hold thinking there is data (`Quirks.inline_thinking`).
Their decoders give every event to an `InlineThinking`, which cuts text into text and thinking and lets all else pass.
Blocks are counted anew on the way, for a text may become several blocks, or none.

- A tag is ``<name>`` or ``</name>``, with blanks before the ``>`` or without, 256 characters at the most. Case matters.
- ``<`` holds back what may become a tag. As soon as it cannot, it is text, up to the next ``<``.
- Inside of thinking only its own close is a tag. Outside, a close is as if not written.
- Blank text between tags makes no block; before real text it belongs to it. More blanks than 256 are text themselves.
- Thinking that is open when its text ends (a tool call comes, say) goes on in the next text, to its close or for good.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import msgspec

from tokenbus.events.normalized import (
    BlockStart,
    BlockStop,
    Cut,
    Done,
    Extra,
    Failed,
    Image,
    Normalized,
    Opaque,
    RefusalDelta,
    Start,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStart,
    UsageSeen,
)
from tokenbus.events.vendor import Quirks

MAX_HELD_CHARS = 256
"""Longest tag, and most blanks that are kept until it is known whether text follows."""
MAX_ENDED = 1024
"""Of so many blocks that ended it is remembered where they went, for what may still come of them."""

_BLANK = " \t\r\n"


class _Tags(NamedTuple):
    """The tags that count at a place, and how each begins."""

    pattern: re.Pattern[str]
    stems: tuple[str, ...]

    def may_begin_at(self, text: str, at: int) -> bool:
        """Whether what the text ends with, from this ``<`` on, may become a tag."""
        if len(text) - at >= MAX_HELD_CHARS:
            return False
        tail = text[at:]
        return any(
            stem.startswith(tail) or (tail.startswith(stem) and not tail[len(stem) :].strip(_BLANK))
            for stem in self.stems
        )


class _Block(msgspec.Struct):
    """A block of the decoder that is open."""

    is_text: bool
    ordinal: int = -1
    """Ours, of what it became last; -1: nothing yet."""
    is_open: bool = False
    inside: str = ""
    """text: the name of the tag that its thinking began with; empty outside of any."""
    held: str = ""
    """text: the beginning of a tag, it may be."""
    blank: str = ""
    """text: blanks after a tag, until it is known whether text follows."""


class InlineThinking(msgspec.Struct):
    """Events of one attempt in, the same with the thinking taken out of the text. Its fields are its whole state.

    In time linear in the text, and the same however it came in pieces, once neighbouring pieces are joined.
    """

    names: tuple[str, ...]
    begins_inside: str = ""
    """The tag that the prompt itself opened."""
    inside: str = ""
    """The tag that the next text goes on inside of."""
    next_ordinal: int = 0
    open: dict[int, _Block] = {}
    """By the decoder's ordinal."""
    ended: dict[int, int] = {}
    """Blocks that ended lately: the decoder's ordinal, and ours of what each became last."""

    @classmethod
    def of(cls, quirks: Quirks) -> InlineThinking | None:
        """For a vendor that writes thinking into the text; None for all others."""
        if not quirks.inline_thinking:
            return None
        first = quirks.inline_thinking[0] if quirks.inline_thinking_opened else ""
        return cls(quirks.inline_thinking, first, first)

    def split(self, events: list[Normalized]) -> list[Normalized]:
        """The events as their reader gets them."""
        out: list[Normalized] = []
        for event in events:
            self._take(event, out)
        return out

    def _take(self, event: Normalized, out: list[Normalized]) -> None:
        match event:
            case TextDelta():
                self._read(self.open[event.block], event.text, out)
            case RefusalDelta():
                self._refuse(self.open[event.block], event.text, out)
            case BlockStart() if event.kind == "text":
                self.open[event.block] = _Block(is_text=True, inside=self.inside)
                self.inside = ""
            case BlockStart() | ToolCallStart():
                ordinal = self._take_ordinal()
                self.open[event.block] = _Block(is_text=False, ordinal=ordinal, is_open=True)
                out.append(msgspec.structs.replace(event, block=ordinal))
            case ThinkingDelta() | ToolCallDelta() | Image():
                out.append(msgspec.structs.replace(event, block=self.open[event.block].ordinal))
            case BlockStop() | ToolCallDone():
                self._end(event, out)
            case Opaque():
                if (ordinal := self._whereabouts(event.block, out)) is not None:
                    out.append(msgspec.structs.replace(event, block=ordinal))
            case Extra():
                block = None if event.block is None else self._whereabouts(event.block, out)
                ordinal = self._take_ordinal() if event.ordinal >= 0 else -1
                out.append(msgspec.structs.replace(event, block=block, ordinal=ordinal))
            case Start():
                self._begin(event, out)
            case Done() | Failed() | Cut():
                for block in self.open.values():
                    self._release(block, out)
                out.append(event)
            case UsageSeen():
                out.append(event)

    # --- blocks -----------------------------------------------------------------------------------------------

    def _begin(self, event: Start, out: list[Normalized]) -> None:
        """The message begins, or begins anew."""
        self.open.clear()
        self.ended.clear()
        self.inside = self.begins_inside
        out.append(msgspec.structs.replace(event, void_before=self.next_ordinal if event.void_before else 0))

    def _end(self, event: BlockStop | ToolCallDone, out: list[Normalized]) -> None:
        block = self.open.pop(event.block)
        if block.is_text:
            self._release(block, out)
            self.inside = block.inside or self.inside
            self._shut(block, out)
        else:
            out.append(msgspec.structs.replace(event, block=block.ordinal))
        self.ended[event.block] = block.ordinal
        if len(self.ended) > 2 * MAX_ENDED:
            self.ended = dict(list(self.ended.items())[-MAX_ENDED:])

    def _whereabouts(self, number: int, out: list[Normalized]) -> int | None:
        """Our ordinal of what a block of the decoder became last; an open text becomes a block for it."""
        block = self.open.get(number)
        if block is None:
            ordinal = self.ended.get(number, -1)
            return ordinal if ordinal >= 0 else None
        if block.ordinal < 0:
            self._appear(block, out)
        return block.ordinal

    def _take_ordinal(self) -> int:
        self.next_ordinal += 1
        return self.next_ordinal - 1

    # --- text -------------------------------------------------------------------------------------------------

    def _read(self, block: _Block, new: str, out: list[Normalized]) -> None:
        text = block.held + new
        tags = _tags_of(self.names, block.inside)
        said = at = 0
        while tag := tags.pattern.search(text, at):
            at = tag.end()
            if at - tag.start() > MAX_HELD_CHARS:
                continue
            self._say(block, text[said : tag.start()], out)
            said = at
            if block.inside or not tag[1]:
                self._shut(block, out)
                block.inside = "" if block.inside else tag[2]
                tags = _tags_of(self.names, block.inside)
        hold = text.rfind("<", said)
        if hold < 0 or not tags.may_begin_at(text, hold):
            hold = len(text)
        self._say(block, text[said:hold], out)
        block.held = text[hold:]

    def _refuse(self, block: _Block, text: str, out: list[Normalized]) -> None:
        """A refusal is no place for tags, and no thinking."""
        self._release(block, out)
        if block.inside:
            self._shut(block, out)
            block.inside = ""
        if not block.is_open:
            self._appear(block, out)
        out.append(RefusalDelta(block.ordinal, text))

    def _release(self, block: _Block, out: list[Normalized]) -> None:
        """Nothing more comes: what was held back is no tag."""
        held, block.held = block.held, ""
        self._say(block, held, out)

    def _say(self, block: _Block, text: str, out: list[Normalized]) -> None:
        """A piece between tags, or a part of one."""
        if not block.is_open:
            block.blank += text
            if len(block.blank) > MAX_HELD_CHARS or block.blank.strip(_BLANK):
                self._appear(block, out)
        elif text:
            out.append(ThinkingDelta(block.ordinal, text) if block.inside else TextDelta(block.ordinal, text))

    def _appear(self, block: _Block, out: list[Normalized]) -> None:
        """A text becomes a block, of text or of thinking, with what was kept of it."""
        block.ordinal, block.is_open = self._take_ordinal(), True
        out.append(BlockStart(block.ordinal, "thinking" if block.inside else "text"))
        kept, block.blank = block.blank, ""
        self._say(block, kept, out)

    def _shut(self, block: _Block, out: list[Normalized]) -> None:
        """What is open of a text ends, and blanks alone are nothing."""
        if block.is_open:
            out.append(BlockStop(block.ordinal))
        block.is_open, block.blank = False, ""


@lru_cache(maxsize=64)
def _tags_of(names: tuple[str, ...], inside: str) -> _Tags:
    """Inside of thinking its own close; outside the open and the close of each name."""
    counted, slash = ((inside,), "/") if inside else (names, "/?")
    pattern = re.compile(f"<({slash})({'|'.join(map(re.escape, counted))})[{_BLANK}]*>")
    stems = [f"</{name}" for name in counted]
    if not inside:
        stems += [f"<{name}" for name in counted]
    return _Tags(pattern, tuple(stems))
