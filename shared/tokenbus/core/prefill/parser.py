"""Parse the text of one turn into blocks, with the same events that a chat decoder emits.

::

               <thinking>                          <invoke>             <parameter>
          ┌─────────────> thinking           ┌──────────────> invoke ───────────────> parameter
         top                 │ <function_calls>                 │  <──────────────────  │
          ├──────────────────┴───────────> calls <──────────────┘      </parameter>     │
          │ <function_results>               │   └─ <parameter>: a call without a name ─┘
          └─────────────> results            │ </function_calls>
                                             v
                                            over

A closing tag returns to the place of its opening tag. Text that is not markup at its place is content there, or is
ignored between calls. `over`: a stop string or the end of the calls was reached, and later text is ignored.

The end-of-turn token is matched first: it ends the turn anywhere, even inside a value.

The events do not depend on how the text is split, after adjacent pieces are joined. Held-back text is bounded: a prefix
of the token, of a tag or of a stop string, and whitespace that may turn out to be between two tags.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.core.prefill.calls import OpenCall, call_id
from tokenbus.core.prefill.tag_scanner import BLANKS, Tag, TagMarks, attribute, both, marks, plain
from tokenbus.core.stop_strings import Stops, stops
from tokenbus.errors import TooLarge
from tokenbus.events.frames import TextReading
from tokenbus.events.normalized import BlockStart, BlockStop, Normalized, TextDelta, ThinkingDelta
from tokenbus.providers.request.participants import CALLS_CLOSES

Place = Literal["top", "thinking", "calls", "invoke", "parameter", "results"]

CALLS = both("function_calls")
RESULTS = both("function_results")
INVOKE = both("invoke")
PARAMETER = both("parameter")


class TextReader(msgspec.Struct):
    """Parses one turn's text into normalised events. Its fields are its complete state."""

    seed: str
    """Identifies run and turn; call ids are derived from it."""
    setting: TextReading
    limit: int
    """Maximum characters of a value that is parsed at its end, and of held-back whitespace."""
    began: str = ""
    """Name of the thinking block in which the turn began; empty: top level."""
    place: Place = "top"
    thinking: str = ""
    """Name of the open thinking block, also while a call inside it is open."""
    held: str = ""
    """Prefix of a possible tag."""
    token_state: int = 0
    """Automaton state: the held-back prefix of the end-of-turn token."""
    stop_state: int = 0
    blanks: list[str] = []
    """Whitespace before the first content of the open region."""
    blank_size: int = 0
    block: int = -1
    """The open text or thinking block; -1: the region has no content yet."""
    next_block: int = 0
    call: OpenCall | None = None
    spelled: str = ""
    """Spelling of the open parameter's tag."""
    calls_spelled: str = ""
    """Spelling of the open function_calls tag."""
    calls: int = 0
    raw: list[str] = []
    """The model's raw text, up to the end of the turn."""
    over: bool = False
    begun: bool = False
    """Whether the top level had any text that is not whitespace."""
    stopped_on: str = ""
    """The stop string that ended the turn."""

    @classmethod
    def start(cls, seed: str, setting: TextReading, limit: int, inside: str) -> TextReader:
        """Start a turn. ``inside``: name of the thinking block that the prompt opened or that a call interrupted."""
        place: Place = "thinking" if inside else "top"
        return cls(seed, setting, limit, inside, place, thinking=inside)

    @property
    def text(self) -> str:
        """The model's raw text of the turn so far, up to the end that counts."""
        return self._read + self._token.held(self.token_state) if self.token_state else self._read

    def knows(self, string: str) -> bool:
        """Whether the request asks to stop on this string."""
        return string in (*self.setting.stops, *CALLS_CLOSES) or string == self.setting.end_of_turn != ""

    def feed(self, text: str) -> list[Normalized]:
        """Parse a piece of text and return the completed events. Raises TooLarge."""
        out: list[Normalized] = []
        if not self.over and text:
            ended = ""
            if self.setting.end_of_turn:
                text, self.token_state, ended = self._token.take(self.token_state, text)
            self._feed(text, out)
            if ended:
                out += self.end()
        return out

    def _feed(self, text: str, out: list[Normalized]) -> None:
        """Parse a piece that does not contain the token."""
        if self.over or not text:
            return
        self.raw.append(text)
        if self.held:
            text, self.held = self.held + text, ""
        elif "<" not in text:
            self._content(text, out)
            return
        at, here = 0, self._marks()
        while tag := here.find(text, at):
            self._content(text[at : tag.start], out)
            if self.over:
                return
            self._tag(tag, out)
            at = tag.end
            if self.over:
                whole = self._read
                self.raw = [whole[: len(whole) - (len(text) - at)]]
                return
            here = self._marks()
        hold = here.held_from(text, at)
        self._content(text[at:hold], out)
        if not self.over:
            self.held = text[hold:]

    def read_as(self, setting: TextReading) -> list[Normalized]:
        """Read the rest by another setting. Returns what was held back as the beginning of a string of the old one."""
        out: list[Normalized] = []
        if setting.end_of_turn != self.setting.end_of_turn:
            self._give_up_token(out)
        if setting.stops != self.setting.stops and not self.over:
            self._give_up_stop(out)
        self.setting = setting
        return out

    def release(self) -> list[Normalized]:
        """Emit held-back text as content because no more text follows. Open blocks stay open."""
        out: list[Normalized] = []
        self._give_up_token(out)
        held, self.held = self.held, ""
        if not self.over:
            self._content(held, out)
        if not self.over:
            self._give_up_stop(out)
        return out

    def end(self) -> list[Normalized]:
        """End the turn's text and return the last events. A call that is still open is malformed."""
        if self.over:
            return []
        out: list[Normalized] = []
        self._give_up_token(out)
        cut = len(self.held) if self.place in ("calls", "invoke") else 0
        out += self.release()
        if not self.over:
            if self.place in ("calls", "invoke", "parameter"):
                self._end_call(out, "the call was cut off by the end of the turn")
                whole = self._read
                # The results follow directly after a closing tag, so add one.
                self.raw = [f"{whole[: len(whole) - cut]}</{self.calls_spelled}>"]
            self._shut(out)
            self.over = True
        return out

    @property
    def _read(self) -> str:
        """The text parsed so far, without the held-back prefix of the token."""
        if len(self.raw) > 1:
            self.raw = ["".join(self.raw)]
        return self.raw[0] if self.raw else ""

    @property
    def _token(self) -> Stops:
        return stops((self.setting.end_of_turn,))

    def _give_up_token(self, out: list[Normalized]) -> None:
        """The held-back prefix of the token did not become the token: parse it as text."""
        if self.token_state:
            held, self.token_state = self._token.held(self.token_state), 0
            self._feed(held, out)

    # --- content --------------------------------------------------------------------------------------------

    def _content(self, text: str, out: list[Normalized]) -> None:
        if not text:
            return
        match self.place:
            case "top":
                self._top(text, out)
            case "thinking":
                if self.block >= 0 or self._appears(text, "thinking", out):
                    out.append(ThinkingDelta(self.block, text))
            case "parameter":
                assert self.call
                self.call.value(text, self.limit, out)
            case "calls" | "invoke" | "results":
                pass  # text between calls, and results that the model invented

    def _top(self, text: str, out: list[Normalized]) -> None:
        stopped = ""
        if self.setting.stops:
            text, self.stop_state, stopped = stops(self.setting.stops).take(self.stop_state, text)
        if text:
            self._emit(text, out)
        if stopped:
            self._shut(out)
            self.over, self.stopped_on = True, stopped

    def _emit(self, text: str, out: list[Normalized]) -> None:
        if not self.begun and text.strip(BLANKS):
            self.begun = True
            if self.setting.follows_a_name:
                text = self._without_wire_blank(text)
        if self.block >= 0 or self._appears(text, "text", out):
            out.append(TextDelta(self.block, text))

    def _without_wire_blank(self, text: str) -> str:
        """Remove the one blank between a name and the message from the turn's first text."""
        blank = "".join(self.blanks)
        if not blank:
            return text.removeprefix(" ")
        self.blanks = [rest] if (rest := blank.removeprefix(" ")) else []
        return text

    def _appears(self, text: str, kind: Literal["text", "thinking"], out: list[Normalized]) -> bool:
        """Start a block at the region's first content that is not whitespace; the whitespace before it belongs to the
        block.
        """
        if not text.strip(BLANKS):
            self.blank_size += len(text)
            if self.blank_size > self.limit:
                raise TooLarge("blank space", self.blank_size, self.limit, unit="characters")
            self.blanks.append(text)
            return False
        self.block = self._take_block()
        out.append(BlockStart(self.block, kind))
        if self.blanks:
            blank = "".join(self.blanks)
            out.append((TextDelta if kind == "text" else ThinkingDelta)(self.block, blank))
            self._forget_blanks()
        return True

    def _shut(self, out: list[Normalized]) -> None:
        """End the text or thinking region. A region without content emits nothing."""
        if self.block >= 0:
            out.append(BlockStop(self.block))
            self.block = -1
        self._forget_blanks()

    def _forget_blanks(self) -> None:
        self.blanks, self.blank_size = [], 0

    def _give_up_stop(self, out: list[Normalized]) -> None:
        """The held-back prefix of a stop string did not complete: emit it as text."""
        if self.stop_state:
            held, self.stop_state = stops(self.setting.stops).held(self.stop_state), 0
            self._emit(held, out)

    def _take_block(self) -> int:
        self.next_block += 1
        return self.next_block - 1

    # --- tags -----------------------------------------------------------------------------------------------

    def _marks(self) -> TagMarks:
        """The tags that are markup at the current place."""
        match self.place:
            case "top":
                named = (*both(*self.setting.thinking), *CALLS, *RESULTS)
                return marks(named, named)
            case "thinking":
                return marks(CALLS, both(self.thinking))
            case "calls" | "invoke":
                return marks((*INVOKE, *PARAMETER), (*CALLS, *INVOKE, *PARAMETER))
            case "parameter":
                return marks((), (self.spelled,))
            case "results":
                return marks((), RESULTS)

    def _tag(self, tag: Tag, out: list[Normalized]) -> None:
        match self.place:
            case "top":
                self._give_up_stop(out)
                if tag.opens:
                    self._shut(out)
                    self._enter(tag)
            case "thinking":
                self._shut(out)
                if tag.closes:
                    self.place, self.thinking = "top", ""
                else:
                    self._enter(tag)
            case "calls" | "invoke":
                self._in_calls(tag, out)
            case "parameter":
                self._end_parameter(out)
            case "results":
                self.place = "top"

    def _enter(self, tag: Tag) -> None:
        if tag.opens in CALLS:
            self.place, self.calls_spelled = "calls", tag.opens
            self.over = tag.alone
        elif not tag.alone:
            if tag.opens in RESULTS:
                self.place = "results"
            else:
                self.place, self.thinking = "thinking", plain(tag.opens)

    def _in_calls(self, tag: Tag, out: list[Normalized]) -> None:
        if tag.opens in INVOKE:
            self._end_call(out, "the call was never closed")
            self._begin_call(attribute(tag.attributes, "name") or "", out)
            self.place = "invoke"
            if tag.alone:
                self._end_call(out)
        elif tag.opens in PARAMETER:
            call = self.call or self._begin_call("", out, stray=True)
            call.open_parameter(attribute(tag.attributes, "name") or None, out)
            if tag.alone:
                call.close_parameter(out)
            else:
                self.place, self.spelled = "parameter", tag.opens
        elif tag.closes in INVOKE:
            if self.place == "invoke":
                self._end_call(out)
        elif tag.closes in CALLS:
            self._end_call(out, "the call was never closed")
            self.over = True

    def _begin_call(self, name: str, out: list[Normalized], *, stray: bool = False) -> OpenCall:
        types = self.setting.types.get(name, {})
        tool_id = call_id(self.seed, self.calls)
        self.call = OpenCall.start(self._take_block(), tool_id, name, types, out, stray=stray)
        self.calls += 1
        return self.call

    def _end_parameter(self, out: list[Normalized]) -> None:
        assert self.call
        self.call.close_parameter(out)
        self.place = "calls" if self.call.stray else "invoke"

    def _end_call(self, out: list[Normalized], problem: str = "") -> None:
        if self.call:
            self.call.finish(out, problem)
            self.call = None
        self.place = "calls"
