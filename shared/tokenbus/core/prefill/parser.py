"""Reads the text that the model writes in one turn as blocks, with the events that a chat decoder would give.

::

               <thinking>                          <invoke>             <parameter>
          ┌─────────────> thinking           ┌──────────────> invoke ───────────────> parameter
         top                 │ <function_calls>                 │  <──────────────────  │
          ├──────────────────┴───────────> calls <──────────────┘      </parameter>     │
          │ <function_results>               │   └─ <parameter>: a call without a name ─┘
          └─────────────> results            │ </function_calls>
                                             v
                                            over

A close leads back to where its open came from; what is no markup at its place is content there, or nothing between
calls. `over`: a stop string or the calls' end was read, and nothing after it counts.

The end-of-turn token is found before all else: it ends the turn wherever it stands, in a value too.

However the text is cut, the events are the same after joining neighbouring pieces. What is held back is bounded: the
beginning of the token, of a tag, of a stop string, and blank space that may turn out to lie between two tags.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.core.prefill.calls import OpenCall, call_id
from tokenbus.core.prefill.tag_scanner import BLANKS, Marks, Tag, attribute, both, marks, plain
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
    """One turn's text in, normalised events out. Its fields are its whole state."""

    seed: str
    """Names run and turn: what the ids of its calls are made from."""
    setting: TextReading
    limit: int
    """Most characters of a value that is read at its end, and of blank space."""
    began: str = ""
    """The name of the thinking in which the turn began; empty: at the top."""
    place: Place = "top"
    thinking: str = ""
    """The open thinking's name, also while a call stands inside it."""
    held: str = ""
    """The beginning of a tag."""
    token_state: int = 0
    """How much of the end-of-turn token is held back."""
    stop_state: int = 0
    blanks: list[str] = []
    """Blank space before the open region's first content."""
    blank_size: int = 0
    block: int = -1
    """The open text or thinking block; -1: the region has no content yet."""
    next_block: int = 0
    call: OpenCall | None = None
    spelled: str = ""
    """How the open parameter is spelled."""
    calls_spelled: str = ""
    """How the open function_calls is spelled."""
    calls: int = 0
    raw: list[str] = []
    """The text as the model wrote it, up to where it counts."""
    over: bool = False
    begun: bool = False
    """There was text at top level that is not blank."""
    stopped_on: str = ""
    """The stop string that ended the turn."""

    @classmethod
    def start(cls, seed: str, setting: TextReading, limit: int, inside: str) -> TextReader:
        """A turn begins; ``inside``: the name of the thinking that its prompt opened, or that a call interrupted."""
        place: Place = "thinking" if inside else "top"
        return cls(seed, setting, limit, inside, place, thinking=inside)

    @property
    def text(self) -> str:
        """The turn so far in the model's own words, up to the end that counts."""
        return self._read + self._token.held(self.token_state) if self.token_state else self._read

    def knows(self, string: str) -> bool:
        """Whether a provider that stopped on this string did so at our wish."""
        return string in (*self.setting.stops, *CALLS_CLOSES) or string == self.setting.end_of_turn != ""

    def feed(self, text: str) -> list[Normalized]:
        """The events that this piece completes. Raises TooLarge."""
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
        """Read a piece without the token."""
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

    def release(self) -> list[Normalized]:
        """What is held back comes out as the content it is, for no more text will come. Open blocks stay open."""
        out: list[Normalized] = []
        self._give_up_token(out)
        held, self.held = self.held, ""
        if not self.over:
            self._content(held, out)
        if not self.over:
            self._give_up_stop(out)
        return out

    def end(self) -> list[Normalized]:
        """The turn's text is whole: the last events. A call that is still open is malformed."""
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
                # Its results stand right after a close, so there must be one.
                self.raw = [f"{whole[: len(whole) - cut]}</{self.calls_spelled}>"]
            self._shut(out)
            self.over = True
        return out

    @property
    def _read(self) -> str:
        """What was read, but for what of the token is held back."""
        if len(self.raw) > 1:
            self.raw = ["".join(self.raw)]
        return self.raw[0] if self.raw else ""

    @property
    def _token(self) -> Stops:
        return stops((self.setting.end_of_turn,))

    def _give_up_token(self, out: list[Normalized]) -> None:
        """The beginning of the token stays one: text."""
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
                pass  # between calls, and what the model invented

    def _top(self, text: str, out: list[Normalized]) -> None:
        stopped = ""
        if self.setting.stops:
            text, self.stop_state, stopped = stops(self.setting.stops).take(self.stop_state, text)
        if text:
            self._say(text, out)
        if stopped:
            self._shut(out)
            self.over, self.stopped_on = True, stopped

    def _say(self, text: str, out: list[Normalized]) -> None:
        if not self.begun and text.strip(BLANKS):
            self.begun = True
            if self.setting.follows_a_name:
                text = self._without_wire_blank(text)
        if self.block >= 0 or self._appears(text, "text", out):
            out.append(TextDelta(self.block, text))

    def _without_wire_blank(self, text: str) -> str:
        """The turn's first text without the one blank that stands between a name and what is said."""
        blank = "".join(self.blanks)
        if not blank:
            return text.removeprefix(" ")
        self.blanks = [rest] if (rest := blank.removeprefix(" ")) else []
        return text

    def _appears(self, text: str, kind: Literal["text", "thinking"], out: list[Normalized]) -> bool:
        """The region becomes a block with its first content that is not blank; blank space before it belongs to it."""
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
        """The region of text or thinking ends. One that had no content was none."""
        if self.block >= 0:
            out.append(BlockStop(self.block))
            self.block = -1
        self._forget_blanks()

    def _forget_blanks(self) -> None:
        self.blanks, self.blank_size = [], 0

    def _give_up_stop(self, out: list[Normalized]) -> None:
        """The beginning of a stop string stays one: text."""
        if self.stop_state:
            held, self.stop_state = stops(self.setting.stops).held(self.stop_state), 0
            self._say(held, out)

    def _take_block(self) -> int:
        self.next_block += 1
        return self.next_block - 1

    # --- tags -----------------------------------------------------------------------------------------------

    def _marks(self) -> Marks:
        """What is markup here."""
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
