"""The syntax tree of a regular expression: how long its matches are, and whether matching is linear. Pure.

Python has no public parser for its own patterns: `sre_parse` is deprecated, `re` has it as `re._parser`. This is the
only module that uses it. tests/unit/policy/test_pattern_syntax.py names every operator that is used here, so a Python
that changes them is noticed there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, cast


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
