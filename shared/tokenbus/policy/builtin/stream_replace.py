"""Replaces words and patterns in streamed text; the result does not depend on how the text is split. Pure.

Only text that may be the beginning of a match is held. A match has a maximum length, so the held text and the work per
character are bounded. Patterns with unbounded length or exponential backtracking (a repeat inside a repeat) are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from tokenbus.policy.builtin.pattern_syntax import Pattern, reaching_end

LONGEST = 8192
"""Maximum characters of a match."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One replacement rule: the text ``find``, followed directly by a match of the pattern ``then``."""

    find: str = ""
    """Literal text. Empty: the pattern may start anywhere, so its whole length of text is always held."""
    then: str = ""
    """A Python regular expression without anchors, references or look-around; every repeat must be bounded."""
    replace: str = ""
    """Literal text."""
    ignore_case: bool = False
    whole_word: bool = False
    """Match only if no letter, digit or ``_`` is directly before or after."""
    word_start: bool = False
    """Match only if no letter, digit or ``_`` is directly before."""


class _Compiled:
    def __init__(self, rule: Rule, where: str) -> None:
        if not (rule.find or rule.then):
            raise ValueError(f"{where}: find or then is needed")
        flags = re.IGNORECASE if rule.ignore_case else 0
        before = r"(?<!\w)" if rule.whole_word or rule.word_start else ""
        behind = r"(?!\w)" if rule.whole_word else ""
        try:
            self.pattern = re.compile(f"{before}{re.escape(rule.find)}(?:{rule.then}){behind}", flags)
            then = Pattern(rule.then, flags)
            then.check()
        except (re.error, ValueError) as e:
            raise ValueError(f"{where}: {e}") from e
        self.longest = len(rule.find) + then.longest
        if not len(rule.find) + then.shortest:
            raise ValueError(f"{where}: it matches the empty text")
        if self.longest > LONGEST:
            raise ValueError(f"{where}: a match may be longer than {LONGEST} characters")
        self.needs = self.longest + rule.whole_word
        """Characters needed to decide whether it matches."""
        self.begins = re.compile(before + _beginnings(rule.find), flags)
        reaching = reaching_end(Pattern(re.escape(rule.find), flags), then)
        self._reaches_end = None if reaching is None else re.compile(before + reaching, flags)
        self.replace = rule.replace

    def open_at(self, text: str, place: int) -> bool:
        """Whether more text could change what this rule matches here."""
        if self._reaches_end:
            return self._reaches_end.match(text, place) is not None
        return len(text) - place < self.needs and self.begins.match(text, place) is not None


class Rewriter:
    """Rewrites one text. ``feed`` returns what is final, ``end`` the rest; concatenated, they are the rewritten text.

    If several rules match at one place, the first one wins. Replacements are not searched again.
    """

    def __init__(self, rules: CompiledRules) -> None:
        self._rules = rules
        self._before: str = ""
        """The last final character, before replacement: decides whether a word starts here."""
        self._held: str = ""

    def feed(self, text: str) -> str:
        """Add a piece; return the text that is final now."""
        return self._release(text, final=False)

    def end(self) -> str:
        """Return the rest; no more text follows."""
        return self._release("", final=True)

    def _release(self, text: str, *, final: bool) -> str:
        text = self._before + self._held + text
        place = len(self._before)
        out: list[str] = []
        while start := self._rules.begins.search(text, place):
            at = start.start()
            if at == len(text):
                break
            out.append(text[place:at])
            place = at
            rule, match = self._rules.at(text, at, final=final)
            if rule and not match:
                break
            out.append(rule.replace if rule else text[at])
            place = match.end() if match else at + 1
        else:
            out.append(text[place:])
            place = len(text)
        self._before, self._held = text[max(place - 1, 0) : place], text[place:]
        return "".join(out)


class CompiledRules:
    """Compiled rules, usable for any number of texts. Raises ValueError, naming the rule, if one is invalid."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = [_Compiled(rule, f"rules[{n}]") for n, rule in enumerate(rules)]
        begins = [f"(?{'i' * bool(c.begins.flags & re.IGNORECASE)}:{c.begins.pattern})" for c in self._rules]
        self.begins = re.compile("|".join(begins) or "(?!)")
        """Where a match may begin, given the text so far."""

    def at(self, text: str, place: int, *, final: bool) -> tuple[_Compiled | None, re.Match[str] | None]:
        """Return the rule that matches here and its match; the rule alone if that is undecided; or neither."""
        for rule in self._rules:
            if not final and rule.open_at(text, place):
                return rule, None
            if match := rule.pattern.match(text, place):
                return rule, match
        return None, None


def _beginnings(literal: str) -> str:
    """A pattern for the literal, or any prefix of it at the end of the text."""
    pattern = ""
    for char in reversed(literal):
        pattern = f"{re.escape(char)}(?:\\Z|{pattern})" if pattern else re.escape(char)
    return pattern
