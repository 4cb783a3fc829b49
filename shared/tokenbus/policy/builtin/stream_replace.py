"""Replaces words and patterns in streamed text; the result does not depend on how the text is split. Pure.

Only text that may be the beginning of a match is held. A match has a maximum length, so the held text and the work per
character are bounded. Patterns with unbounded length or exponential backtracking (a repeat inside a repeat) are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec

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


# Python has no public parser for its own patterns: `sre_parse` is deprecated, `re` has it as `re._parser`. This is the
# only module that uses it. tests/unit/policy/test_pattern_syntax.py names every operator that is used here, so a Python
# that changes them is noticed there.


class Pattern:
    """A parsed pattern. Raises re.error if it is not one."""

    def __init__(self, pattern: str, flags: int) -> None:
        tree: Any = getattr(re, "_parser").parse(pattern, flags)  # noqa: B009
        self.items: list[tuple[Any, Any]] = list(tree)
        """Operators with their arguments."""
        self.shortest, self.longest = cast("tuple[int, int]", tree.getwidth())
        """Least and most characters of a match."""

    def check(self) -> None:
        """Raise ValueError for anything but characters, groups, alternatives and repeats, and for a variable repeat
        inside another, which may take exponential time.
        """
        _check_items(self.items, repeated=False)


def reaching_end(*patterns: Pattern) -> str | None:
    """A pattern for anything that a match of these, one directly after the other, may have consumed when the text ends;
    None if they are not a plain sequence of characters and repeats.
    """
    reaching = r"\Z"
    for item in reversed([item for pattern in patterns for item in pattern.items]):
        least, most, inner = item[1] if str(item[0]) in ("MAX_REPEAT", "MIN_REPEAT") else (1, 1, [item])
        if len(inner) != 1 or (char := _one_char(*inner[0])) is None:
            return None
        # The text ends within these characters, or after them.
        reaching = f"(?:{char}{{0,{most}}}\\Z|{char}{{{least},{most}}}{reaching})"
    return reaching


def _check_items(items: Iterable[tuple[Any, Any]], *, repeated: bool) -> None:
    for operator, argument in items:
        match str(operator):
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                pass
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, inner = argument
                if repeated and least != most:
                    raise ValueError("a repeat inside a repeat")
                _check_items(inner, repeated=repeated or least != most)
            case "SUBPATTERN":
                _check_items(argument[-1], repeated=repeated)
            case "BRANCH":
                for branch in cast("list[Any]", argument[1]):
                    _check_items(branch, repeated=repeated)
            case "ATOMIC_GROUP":
                _check_items(argument, repeated=repeated)
            case other:
                raise ValueError(f"{other.lower()} cannot be used here: no anchors, references or look-around")


_CATEGORIES = {"DIGIT": r"\d", "NOT_DIGIT": r"\D", "SPACE": r"\s", "NOT_SPACE": r"\S", "WORD": r"\w", "NOT_WORD": r"\W"}


def _one_char(operator: Any, argument: Any) -> str | None:
    match str(operator):
        case "LITERAL":
            return re.escape(chr(argument))
        case "NOT_LITERAL":
            return f"[^{re.escape(chr(argument))}]"
        case "ANY":
            return "."
        case "IN":
            return "[" + "".join(_member(str(kind), value) for kind, value in argument) + "]"
        case _:
            return None


def _member(kind: str, value: Any) -> str:
    match kind:
        case "NEGATE":
            return "^"
        case "LITERAL":
            return re.escape(chr(value))
        case "RANGE":
            return f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
        case _:
            return _CATEGORIES[str(value).removeprefix("CATEGORY_")]
