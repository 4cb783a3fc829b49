# ruff: noqa: RUF001, RUF002 - the punctuation of other scripts is intended
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

from tokenbus.shaping.abbreviations import BEFORE_NUMBER, GOES_ON

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
