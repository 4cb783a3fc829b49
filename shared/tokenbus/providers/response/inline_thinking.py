"""Extracts thinking that a model writes into its text as ``<think>…</think>`` and emits it as separate blocks.

Some vendors pass on the model's text unchanged; `Quirks.inline_thinking` names the tags that hold thinking. Their
decoders pass every event through an `InlineThinking`, which splits a text into alternating text and thinking blocks and
forwards all other events. Ordinals are multiplied by a stride so that the new blocks fit in between and order is
preserved.

- A tag is ``<name>`` or ``</name>``, with optional whitespace before ``>``, at most 256 characters. Case-sensitive.
- ``<`` holds back text that may become a tag. Once it cannot, it is text, up to the next ``<``.
- Inside thinking, only its own closing tag counts. Outside, a stray closing tag is dropped.
- Whitespace next to a tag makes no block of its own; it belongs to the text that follows. Over 256 characters it is
  text.
- Thinking that is still open when its text ends (at a tool call, say) continues in the next text.
- If `Quirks.unclosed_thinking` is `release`, thinking is buffered until it is closed or exceeds a limit. If a call or
  an image comes first, or the answer ends normally, the buffer is released as text. If the answer is cut off, it is
  thinking.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import msgspec

from tokenbus.events import normalized as n
from tokenbus.events.quirks import Quirks

MAX_HELD_CHARS = 256
"""Maximum length of a tag, and of whitespace held back until text follows."""
MAX_UNCLOSED_CHARS = 256 * 1024
"""Maximum characters of unclosed thinking to buffer; beyond that it is emitted as thinking."""
MAX_BESIDE = 100
"""Maximum events to buffer along with unclosed thinking; beyond that it is emitted as thinking."""
_ORDINAL_STRIDE = 2**32
"""Multiplier for the decoder's ordinals. A text with more pieces than this would take many gigabytes."""
_BLANK = " \t\r\n"


class _Tags(NamedTuple):
    """The tags that are recognized at a position, and their prefixes."""

    pattern: re.Pattern[str]
    stems: tuple[str, ...]

    def may_begin_at(self, text: str, at: int) -> bool:
        """Whether the end of ``text``, starting at the ``<`` at ``at``, may still become a tag."""
        if len(text) - at >= MAX_HELD_CHARS:
            return False
        tail = text[at:]
        return any(
            stem.startswith(tail) or (tail.startswith(stem) and not tail[len(stem) :].strip(_BLANK))
            for stem in self.stems
        )


class _Text(msgspec.Struct):
    """An open text block of the decoder."""

    first: int
    """Ordinal of its first piece."""
    inside: str
    """Name of the tag that opened the current thinking; empty outside thinking."""
    tagged: bool
    """It contains a tag, or it started inside thinking."""
    pieces: int = 0
    is_open: bool = False
    """Whether its last piece is open."""
    held: str = ""
    """A possible beginning of a tag."""
    blank: str = ""
    """Whitespace before a piece, until text follows."""
    waiting: list[str] = []
    """Thinking that waits for its closing tag."""
    waits: int = 0
    """Number of characters in `waiting`."""
    beside: list[n.Opaque | n.Extra] = []
    """Events that belong to this block and wait with it."""
    phase: str = ""

    @property
    def last(self) -> int:
        """Ordinal of the last piece; -1 if there is none."""
        return self.first + self.pieces - 1 if self.pieces else -1


class InlineThinking(msgspec.Struct):
    """Takes the events of one attempt and returns them with thinking separated from text. Its fields are its whole
    state.

    Runs in time linear in the text. Chunk boundaries do not change the result once adjacent deltas are joined.
    """

    names: tuple[str, ...]
    begins_inside: str = ""
    """The tag that the prompt itself opened."""
    inside: str = ""
    """The tag that is still open for the next text."""
    open: dict[int, _Text] = {}
    """Open texts by the decoder's ordinal."""
    ended: int = -1
    """The decoder's ordinal of the last closed text; later events may still refer to it."""
    ended_at: int = -1
    """Ordinal of that text's last piece."""
    releases: bool = False
    """Unclosed thinking may be released as text."""
    undecided: _Text | None = None
    """A text that ended while its thinking was buffered."""

    @classmethod
    def of(cls, quirks: Quirks) -> InlineThinking | None:
        """Create one if the vendor writes thinking into the text; None for all other vendors."""
        if not quirks.inline_thinking:
            return None
        first = quirks.inline_thinking[0] if quirks.inline_thinking_opened else ""
        return cls(quirks.inline_thinking, first, first, releases=quirks.unclosed_thinking == "release")

    def split(self, events: list[n.Normalized]) -> list[n.Normalized]:
        """Process events and return the result."""
        out: list[n.Normalized] = []
        for event in events:
            self._process(event, out)
        return out

    def _process(self, event: n.Normalized, out: list[n.Normalized]) -> None:
        match event:
            case n.TextDelta():
                self._read(self.open[event.block], event.text, out)
            case n.RefusalDelta():
                self._refuse(self.open[event.block], event.text, out)
            case n.BlockStart() if event.kind == "text":
                text = _Text(event.block * _ORDINAL_STRIDE, self.inside, tagged=bool(self.inside), phase=event.phase)
                if self.undecided:
                    text.waiting, text.waits = self.undecided.waiting, self.undecided.waits
                    text.beside = self.undecided.beside
                self.open[event.block], self.inside, self.undecided = text, "", None
            case n.BlockStop() if event.block in self.open:
                self._end(event.block, out)
            case n.Opaque() | n.Extra() if waiting := self._waiting(event.block):
                self._attach(waiting, event, out)
            case n.Opaque():
                if (ordinal := self._emitted_ordinal(event.block, out)) >= 0:
                    out.append(msgspec.structs.replace(event, block=ordinal))
            case n.Extra():
                ordinal = -1 if event.block is None else self._emitted_ordinal(event.block, out)
                out.append(msgspec.structs.replace(event, block=ordinal if ordinal >= 0 else None))
            case n.Start():
                self.open.clear()
                self.inside, self.ended, self.undecided = self.begins_inside, -1, None
                out.append(msgspec.structs.replace(event, void_before=event.void_before * _ORDINAL_STRIDE))
            case n.Done() | n.Failed() | n.Cut():
                for text in self.open.values():
                    self._release(text, out)
                    self._think(text, out)
                self._decide(out, as_text=isinstance(event, n.Done) and event.finish in ("stop", "tool_use"))
                out.append(event)
            case n.UsageSeen():
                out.append(event)
            case _:
                if isinstance(event, n.ToolCallStart | n.ItemStart | n.BlockStart):
                    self._decide(out, as_text=not (isinstance(event, n.BlockStart) and event.kind == "thinking"))
                out.append(msgspec.structs.replace(event, block=event.block * _ORDINAL_STRIDE))

    def _end(self, number: int, out: list[n.Normalized]) -> None:
        text = self.open.pop(number)
        self._release(text, out)
        if text.blank and not text.tagged:
            self._open_piece(text, out)
        if text.waiting:
            self._decide(out, as_text=False)  # undecided thinking of another text that was open at the same time
            self.undecided = text
        else:
            self._close_piece(text, out)
        self.inside = text.inside or self.inside
        self.ended, self.ended_at = number, text.last

    def _decide(self, out: list[n.Normalized], *, as_text: bool) -> None:
        """Resolve buffered thinking that will not be closed: as text if ``as_text``, otherwise as thinking."""
        text, self.undecided = self.undecided, None
        if text is None:
            return
        if as_text:
            waiting, text.waiting, text.inside, self.inside = "".join(text.waiting), [], "", ""
            self._emit_text(text, waiting, out)
        self._close_piece(text, out)
        self.ended_at = text.last

    def _think(self, text: _Text, out: list[n.Normalized]) -> None:
        """Emit buffered content as thinking."""
        if text.waiting:
            waiting, text.waiting = "".join(text.waiting), []
            self._write(text, waiting, out)

    def _attach(self, text: _Text, event: n.Opaque | n.Extra, out: list[n.Normalized]) -> None:
        text.beside.append(event)
        if len(text.beside) > MAX_BESIDE:
            self._think(text, out)

    def _waiting(self, number: int | None) -> _Text | None:
        """Return the text block of this ordinal if its thinking is being buffered."""
        text = self.undecided if number == self.ended else self.open.get(-1 if number is None else number)
        return text if text and text.waiting else None

    def _emitted_ordinal(self, number: int, out: list[n.Normalized]) -> int:
        """Map a decoder ordinal to an emitted one, -1 if it has none. A text maps to its last piece; an open, empty one
        gets a piece.
        """
        if text := self.open.get(number):
            if not text.pieces:
                self._open_piece(text, out)
            return text.last
        return self.ended_at if number == self.ended else number * _ORDINAL_STRIDE

    def _read(self, text: _Text, new: str, out: list[n.Normalized]) -> None:
        whole = text.held + new
        tags = _tags_of(self.names, text.inside)
        emitted = at = 0
        while tag := tags.pattern.search(whole, at):
            at = tag.end()
            if at - tag.start() > MAX_HELD_CHARS:
                continue
            self._emit_text(text, whole[emitted : tag.start()], out)
            emitted = at
            text.tagged = True
            if text.inside or not tag[1]:
                self._close_piece(text, out)
                text.inside = "" if text.inside else tag[2]
                tags = _tags_of(self.names, text.inside)
        hold = whole.rfind("<", emitted)
        if hold < 0 or not tags.may_begin_at(whole, hold):
            hold = len(whole)
        self._emit_text(text, whole[emitted:hold], out)
        text.held = whole[hold:]

    def _refuse(self, text: _Text, refusal: str, out: list[n.Normalized]) -> None:
        """Emit a refusal. Refusals contain no tags and end any thinking."""
        self._release(text, out)
        if text.inside:
            self._close_piece(text, out)
            text.inside = ""
        if not text.is_open:
            self._open_piece(text, out)
        out.append(n.RefusalDelta(text.last, refusal))

    def _release(self, text: _Text, out: list[n.Normalized]) -> None:
        """Emit held-back characters: no more text comes, so they are not a tag."""
        held, text.held = text.held, ""
        self._emit_text(text, held, out)

    def _emit_text(self, text: _Text, part: str, out: list[n.Normalized]) -> None:
        """Emit the text between two tags, or a part of it."""
        if not (self.releases and text.inside) or text.is_open:
            self._write(text, part, out)
        elif part:
            text.waiting.append(part)
            text.waits += len(part)
            if text.waits > MAX_UNCLOSED_CHARS:
                self._think(text, out)

    def _write(self, text: _Text, part: str, out: list[n.Normalized]) -> None:
        if not text.is_open:
            text.blank += part
            if len(text.blank) > MAX_HELD_CHARS or text.blank.strip(_BLANK):
                self._open_piece(text, out)
        elif part:
            out.append(n.ThinkingDelta(text.last, part) if text.inside else n.TextDelta(text.last, part))

    def _open_piece(self, text: _Text, out: list[n.Normalized]) -> None:
        """Start a piece, including the whitespace before it."""
        text.pieces += 1
        text.is_open = True
        out.append(
            n.BlockStart(text.last, "thinking") if text.inside else n.BlockStart(text.last, "text", phase=text.phase)
        )
        kept, text.blank = text.blank, ""
        self._write(text, kept, out)
        out += [msgspec.structs.replace(event, block=text.last) for event in text.beside]
        text.beside = []

    def _close_piece(self, text: _Text, out: list[n.Normalized]) -> None:
        """End the open piece. Whitespace on its own is dropped."""
        self._think(text, out)
        text.waits = 0
        if text.is_open:
            out.append(n.BlockStop(text.last))
        text.is_open, text.blank = False, ""


@lru_cache(maxsize=64)
def _tags_of(names: tuple[str, ...], inside: str) -> _Tags:
    """Tags to recognize: inside thinking only the closing tag, outside it the opening and closing tags of every
    name."""
    counted, slash = ((inside,), "/") if inside else (names, "/?")
    pattern = re.compile(f"<({slash})({'|'.join(map(re.escape, counted))})[{_BLANK}]*>")
    stems = [f"</{name}" for name in counted]
    if not inside:
        stems += [f"<{name}" for name in counted]
    return _Tags(pattern, tuple(stems))
