# ruff: noqa: RUF001, RUF002 - the stops and quotes of other scripts are meant
"""Cuts a text that comes in pieces into sentences, for speech. Pure, and the same however the pieces are cut.

The sentences put together are the text, to the last blank. A sentence ends after ``. ! ? …`` and closing quotes and
brackets, with the blanks behind them, once the next word has begun: only that tells ``3.14``, ``e.g. this``,
``"Really?" she asked`` and ``etc. and`` from an end. Full stops of scripts that write no blanks (``。！？``) end by
themselves; so does a line end. What is shorter than the least is not spoken alone, and what is longer than the most is
cut where it hurts the least: after a comma, between words.
"""

from __future__ import annotations

import re
import unicodedata

import msgspec

from tokenbus.shaping.abbreviations import BEFORE_NUMBER, GOES_ON

AHEAD = 64
"""Characters behind the most that are looked at to see what an end is; more blanks than that are cut."""

_WIDE_STOPS = "。！？｡"  # of scripts without blanks between sentences
_QUOTED_ON = "とっ"
"""Japanese: the sentence goes on after a quotation."""
_END = re.compile(
    r"""(?P<stop>[.!?…‽؟۔।॥։።。！？｡]+)(?P<close>["'”’»›)\]}」』）】》*_]*)(?P<blank>\s*)|(?P<line>\s*\n\s*)""",
)
_CLAUSE = re.compile(r"""[,;:—–、，；：][”"')\]]*\s+|[、，；：]|\s[—–]\s""")
_WORDS = re.compile(r"\s*\S(?s:.*)\s")
_BLANK = re.compile(r"\s+")
_WORD = re.compile(r"""[^\s"“«(\[{]*\Z""")
_LETTER = re.compile(r"[a-zA-Z\u00c0-\u024f\u0400-\u04ff]")  # of ``J. Smith`` and ``z. B.``
_MARKER = re.compile(r"(?:^|\n)[ \t]*(?:\d{1,3}|[^\W\d_])\Z")


class SentenceRules(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as a sentence. Raises ValueError for bounds that cannot be."""

    language: str | None = None
    """A language tag (``de``, ``en-GB``); None, and one that is not known, for the abbreviations of all languages."""
    least: int = 8
    """Shorter ones are joined with the next. A character of a wide script counts twice."""
    most: int = 300
    """Longer ones are cut."""

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ValueError(f"least {self.least}, most {self.most}: must be 0 <= least <= most, and most at least 1")

    def goes_on(self) -> frozenset[str]:
        """The abbreviations after which a sentence goes on."""
        known = GOES_ON.get((self.language or "").partition("-")[0].lower())
        return frozenset[str]().union(*GOES_ON.values()) if known is None else known


class Sentences:
    """One text. `feed` it, then `end`; what they return, put together, is what was fed."""

    def __init__(self, rules: SentenceRules | None = None) -> None:
        self._rules = rules or SentenceRules()
        self._goes_on = self._rules.goes_on()
        self._ordinals = (self._rules.language or "").lower().startswith("de")
        self._held = ""
        self._line_start = True
        """What is held begins a line, so that a number there may be a list's."""

    @property
    def held(self) -> str:
        """What was fed and not yet returned; less than ``most`` and a little."""
        return self._held

    def feed(self, text: str) -> list[str]:
        """The sentences that are whole by now."""
        self._held += text
        return self._taken(ended=False)

    def release(self) -> list[str]:
        """What is held up to its last blank, for whoever can wait no longer; nothing where there is none."""
        words = _WORDS.match(self._held)
        return [self._cut(words.end())] if words else []

    def end(self) -> list[str]:
        """The rest. The text may begin anew after this."""
        rest = self._taken(ended=True)
        if self._held:
            rest.append(self._cut(len(self._held)))
        self._line_start = True
        return rest

    def _taken(self, *, ended: bool) -> list[str]:
        sentences: list[str] = []
        window, at = self._rules.most + AHEAD, 0
        while at < len(self._held):
            # However much has come, the decision is taken on the same characters.
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
        """Where the first sentence ends; None where that cannot be known yet. ``ended``: nothing more will be known."""
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
        """``1.`` or ``a.`` at the start of a line."""
        before = ("\n" if self._line_start else " ") + text[max(0, found.start() - 8) : found.start()]
        if found.start() > 8:
            before = before[1:]
        return found["stop"] == "." and bool(_MARKER.search(before))


def _forced(text: str, most: int) -> int:
    """Where a text that is too long is cut: after a clause in its second half, else a word, else anywhere but within a
    character that is several code points."""
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
