"""Splits streamed text into sentences for speech. Pure; chunk boundaries never change the result.

The sentences concatenate to the exact text. A sentence ends after ``. ! ? …`` plus closing quotes, brackets and
whitespace, once the next word has begun: only that word distinguishes ``3.14``, ``e.g. this``, ``"Really?" she asked``
and ``etc. and`` from a sentence end. Full stops of scripts without spaces (``。！？``) end a sentence by themselves,
and so does a line end. Sentences shorter than ``least`` are joined with the next. Those longer than ``most`` are split
at the least harmful point: after a comma, else between words.
"""

from __future__ import annotations

import re
import unicodedata

import msgspec

from tokenbus.events.public import Chunk, PublicEvent

# ruff: noqa: RUF001, RUF002 - the punctuation of other scripts is intended


AHEAD = 64
"""How many characters beyond ``most`` to look at when deciding where a sentence ends; longer whitespace is split."""

_WIDE_STOPS = "。！？｡"  # full stops of scripts without spaces between sentences
_QUOTED_ON = "とっ"
"""Japanese: the sentence continues after a quotation."""
_END = re.compile(
    r"""(?P<stop>[.!?…‽؟۔।॥։።。！？｡]+)(?P<close>["'”’»›)\]}」』）】》*_]*)(?P<blank>\s*)|(?P<line>\s*\n\s*)""",
)
_CLAUSE = re.compile(r"""[,;:—–、，；：][”"')\]]*\s+|[、，；：]|\s[—–]\s""")
_WORDS = re.compile(r"\s*\S(?s:.*)\s")
_BLANK = re.compile(r"\s+")
_WORD = re.compile(r"""[^\s"“«(\[{]*\Z""")
_LETTER = re.compile(r"[a-zA-Z\u00c0-\u024f\u0400-\u04ff]")  # as in ``J. Smith`` and ``z. B.``
_MARKER = re.compile(r"(?:^|\n)[ \t]*(?:\d{1,3}|[^\W\d_])\Z")


class SentenceRules(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as a sentence. Raises ValueError for invalid bounds."""

    language: str | None = None
    """A language tag (``de``, ``en-GB``). If None or unknown, the abbreviations of all languages apply."""
    least: int = 8
    """Characters. A shorter sentence is joined with the next one. A wide character counts twice."""
    most: int = 300
    """Characters. A longer sentence is split."""

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ValueError(f"least {self.least}, most {self.most}: 0 <= least <= most and most >= 1 are required")

    def goes_on(self) -> frozenset[str]:
        """The abbreviations after which a sentence continues."""
        known = GOES_ON.get((self.language or "").partition("-")[0].lower())
        return frozenset[str]().union(*GOES_ON.values()) if known is None else known


class Sentences:
    """Splits one text. Call `feed`, then `end`; the returned sentences concatenate to the input."""

    def __init__(self, rules: SentenceRules | None = None) -> None:
        self._rules = rules or SentenceRules()
        self._goes_on = self._rules.goes_on()
        self._ordinals = (self._rules.language or "").lower().startswith("de")
        self._held = ""
        self._line_start = True
        """The buffered text starts a line, so a number there may be a list marker."""

    @property
    def held(self) -> str:
        """Text that was fed but not yet returned; not much longer than ``most`` characters."""
        return self._held

    def feed(self, text: str) -> list[str]:
        """Add text. Return the sentences that are complete."""
        self._held += text
        return self._taken(ended=False)

    def release(self) -> list[str]:
        """Return the held text up to its last whitespace; empty if it has none.

        For a caller that cannot wait longer for the end of the sentence.
        """
        words = _WORDS.match(self._held)
        return [self._cut(words.end())] if words else []

    def end(self) -> list[str]:
        """Return the rest. A new text may follow."""
        rest = self._taken(ended=True)
        if self._held:
            rest.append(self._cut(len(self._held)))
        self._line_start = True
        return rest

    def _taken(self, *, ended: bool) -> list[str]:
        sentences: list[str] = []
        window, at = self._rules.most + AHEAD, 0
        while at < len(self._held):
            # Always decide on the same characters, however much text has arrived.
            text = self._held[at : at + window]
            end = self._first_end(text, ended=ended or len(text) == window)
            if end is None and (len(text) == window or (ended and len(text) > self._rules.most)):
                end = _forced(text, self._rules.most)
            if end is None:
                break
            sentences.append(text[:end])
            self._line_start = _ends_line(text[:end])
            at += end
        self._held = self._held[at:]
        return sentences

    def _cut(self, end: int) -> str:
        sentence, self._held = self._held[:end], self._held[end:]
        self._line_start = _ends_line(sentence)
        return sentence

    def _first_end(self, text: str, *, ended: bool) -> int | None:
        """Where the first sentence ends; None if undecided. ``ended``: no more text will come."""
        for found in _END.finditer(text):
            if found.end() == len(text):
                return len(text) if ended and found.start() < self._rules.most else None
            if found.start() >= self._rules.most:
                return None
            if self._is_end(text, found) and _width(text[: found.end()].strip()) >= max(1, self._rules.least):
                return found.end()
        return None

    def _is_end(self, text: str, found: re.Match[str]) -> bool:
        if found["line"] or "\n" in found["blank"]:
            return not (found["stop"] or "").startswith(".") or not self._is_marker(text, found)
        stop, following = found["stop"], text[found.end()]
        if not found["blank"]:
            return stop[-1] in _WIDE_STOPS and not (found["close"] and following in _QUOTED_ON)
        if following.islower():
            return False
        if stop != "." or found["close"]:
            return True
        word = _last_word(text[: found.start()])
        if self._is_marker(text, found) or word.lower() in self._goes_on:
            return False
        if word.lower() in BEFORE_NUMBER and following.isdigit():
            return False
        if self._ordinals and word.isdigit() and len(word) <= 2:
            return False
        return word == "I" or not _LETTER.fullmatch(word)

    def _is_marker(self, text: str, found: re.Match[str]) -> bool:
        """A list marker: ``1.`` or ``a.`` at the start of a line."""
        before = ("\n" if self._line_start else " ") + text[max(0, found.start() - 8) : found.start()]
        if found.start() > 8:
            before = before[1:]
        return found["stop"] == "." and bool(_MARKER.search(before))


def _forced(text: str, most: int) -> int:
    """Where to split a text that is too long: after a clause in its second half, else after a word, else anywhere
    except within a character made of several code points.
    """
    for kind, least in ((_CLAUSE, most // 2), (_BLANK, 1)):
        ends = [m.end() for m in kind.finditer(text, 0, most) if m.end() >= least and text[: m.end()].strip()]
        if ends:
            return ends[-1]
    end = most
    while end > 1 and (unicodedata.combining(text[end]) or text[end] in "\u200d\ufe0f" or text[end - 1] == "\u200d"):
        end -= 1
    return end if end > 1 else most


def _ends_line(sentence: str) -> bool:
    return "\n" in sentence[len(sentence.rstrip()) :]


def _last_word(text: str) -> str:
    found = _WORD.search(text[-32:])
    return found[0].lstrip("'‘") if found else ""


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


# Includes those that models write in prose. A word that ends sentences as often as it is an abbreviation (``no.``,
# ``art.``) is listed only for use before a number.


# ruff: noqa: RUF001, SIM905 - other scripts are intended; a word list is most readable as one string


GOES_ON: dict[str, frozenset[str]] = {
    "en": frozenset(
        "mr mrs ms dr prof rev hon st mt ft gen col sgt capt lt gov sen rep pres messrs vs cf e.g i.e viz approx dept"
        " est jan feb mar apr jun jul aug sept oct nov dec".split()
    ),
    "de": frozenset(
        "hr fr frl dr prof dipl ing z.b d.h u.a o.ä u.ä i.d.r z.t v.a bzw ca evtl ggf inkl exkl max min mind nr sog str"
        " tel vgl zzgl abs allg bspw s.o s.u".split()
    ),
    "fr": frozenset("m mm mme mlle mgr dr pr st ste cf c.-à-d p.ex env av apr".split()),
    "es": frozenset("sr sra srta dr dra ud uds d dña prof p.ej aprox av avda".split()),
    "it": frozenset("sig sigg sig.ra dott dott.ssa prof avv ing p.es ca".split()),
    "pt": frozenset("sr sra srta dr dra prof profa p.ex aprox av".split()),
    "nl": frozenset("dhr mevr mw dr prof ir drs bijv bv d.w.z o.a m.b.t t.o.v ca".split()),
    "pl": frozenset("p dr prof inż np tj tzw m.in ok ul al".split()),
    "ru": frozenset("г гг ул им проф т.е т.к см напр руб тыс млн".split()),
}
"""The sentence always continues after these."""

BEFORE_NUMBER = frozenset("no nos nr p pp vol ch art sec fig eq ver par абз стр núm pág n° s".split())
"""The sentence continues after these if a digit follows, in any language."""


# Chunks of one block are merged until the first has waited ``hold_s`` or they reach ``most`` characters. Any other
# event, or a chunk of another block, flushes the merged text first: order is preserved, and the merged chunks
# concatenate to the same content.


HOLD_S = 0.016
"""One frame at 60 Hz."""
MOST = 1024


class Coalescer:
    """Merges the events of one or more runs, preserving their order.

    A merged chunk has the seq of its last part, so it works as a cursor for all of them.
    """

    def __init__(self, *, hold_s: float = HOLD_S, most: int = MOST) -> None:
        """``hold_s``: maximum wait in seconds; ``most``: maximum characters. Raises ValueError if one is negative."""
        if hold_s < 0 or most < 0:
            raise ValueError("hold_s and most must not be negative")
        self._hold_s = hold_s
        self._most = most
        self._parts: list[Chunk] = []
        self._size = 0
        self._due = 0.0

    @property
    def due(self) -> float | None:
        """When to call `flush`, in seconds on the clock of `feed`; None if nothing is waiting."""
        return self._due if self._parts else None

    def feed(self, event: PublicEvent, now: float) -> list[PublicEvent]:
        """Add an event that arrived at ``now``, in seconds of any clock. Return the events to emit."""
        if not isinstance(event, Chunk):
            return [*self.flush(), event]
        out: list[PublicEvent] = []
        if self._parts and _region(self._parts[0]) != _region(event):
            out += self.flush()
        if not self._parts:
            self._due, self._size = now + self._hold_s, 0
        self._parts.append(event)
        self._size += len(event.text)
        if self._size >= self._most or now >= self._due:
            out += self.flush()
        return out

    def flush(self) -> list[PublicEvent]:
        """Return the waiting text as one chunk, in a list; empty if nothing is waiting."""
        parts, self._parts = self._parts, []
        if len(parts) < 2:
            return list(parts)
        return [msgspec.structs.replace(parts[-1], text="".join(part.text for part in parts))]


def _region(chunk: Chunk) -> tuple[object, ...]:
    return chunk.run, chunk.attempt, chunk.block, chunk.visible, chunk.depth, chunk.tool_call_part
