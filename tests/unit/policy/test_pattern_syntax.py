"""Everything that `pattern_syntax` takes from the private `re._parser`: a Python that changes it is noticed here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tokenbus
from tokenbus.policy.builtin.stream_replace import Pattern, reaching_end

OPERATORS = {
    "a": ["LITERAL"],
    "[^a]": ["NOT_LITERAL"],
    "[^a-z\\d]": ["IN"],
    ".": ["ANY"],
    "a{1,2}": ["MAX_REPEAT"],
    "a{1,2}?": ["MIN_REPEAT"],
    "a{1,2}+": ["POSSESSIVE_REPEAT"],
    "(a)": ["SUBPATTERN"],
    "aa|bb": ["BRANCH"],
    "(?>a)": ["ATOMIC_GROUP"],
    "^": ["AT"],
    "(?=a)": ["ASSERT"],
    "(a)\\1": ["SUBPATTERN", "GROUPREF"],
}


@pytest.mark.parametrize("pattern", OPERATORS)
def test_operators_have_these_names(pattern: str):
    assert [str(operator) for operator, _ in Pattern(pattern, 0).items] == OPERATORS[pattern]


def test_a_pattern_has_the_minimum_and_maximum_length_of_a_match():
    parsed = Pattern("a{2,5}(?:bc|d)[ef]", 0)
    assert (parsed.shortest, parsed.longest) == (4, 8)
    assert Pattern("a*", 0).longest > 2**31


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(?:a{1,9}){1,9}", "a repeat inside a repeat"),
        ("(?>(?:a|b{1,9}){1,9}+)", "a repeat inside a repeat"),
        ("^a", "at cannot"),
        ("a(?!b)", "assert_not cannot"),
        ("(a)\\1", "groupref cannot"),
    ],
)
def test_what_may_be_slow_or_looks_around_is_refused(pattern: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        Pattern(pattern, 0).check()


def test_repeats_of_fixed_length_may_lie_in_each_other():
    Pattern("(?:a{4}b){1,9}", 0).check()


@pytest.mark.parametrize("end", ["ab", "abx", "abxyz", "abxyz7", "ab_"])
def test_what_a_match_may_have_consumed_at_the_end_is_recognised(end: str):
    reaching = reaching_end(Pattern("ab", 0), Pattern(r"[^\s\d]{1,4}\d", 0))
    assert reaching
    assert re.match(reaching, end)
    assert not re.match(reaching, end + " ")


def test_alternatives_are_no_plain_sequence():
    assert reaching_end(Pattern("aa|bb", 0)) is None


def test_no_other_module_uses_the_private_parser():
    root = Path(tokenbus.__file__).parent
    users = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if '"_parser"' in path.read_text()}
    assert users == {"policy/builtin/stream_replace.py"}
