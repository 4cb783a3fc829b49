"""Words, patterns and secrets across the borders of chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.policy.builtin.rewrite import RedactSecrets, RedactSecretsOptions
from tokenbus.policy.builtin.stream_replace import CompiledRules, Rewriter, Rule

RULES = CompiledRules(
    [
        Rule(find="cat", replace="dog", whole_word=True),
        Rule(find="Bad", replace="good", ignore_case=True),
        Rule(find="no", then="[0-9]{1,4}", replace="#"),
        Rule(find="<", then="(?:a|bc){1,2}>", replace="tag"),
        Rule(then=r"\d\d:\d\d", replace="time"),
    ]
)


def rewritten(rules: CompiledRules, *pieces: str) -> list[str]:
    """What each piece gave, and the rest."""
    rewriter = Rewriter(rules)
    return [*(rewriter.feed(piece) for piece in pieces), rewriter.end()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat sat", "the dog sat"),
        ("concat cats cat", "concat cats dog"),
        ("BAD bad baD", "good good good"),
        ("no12345 no no7", "#5 no #"),
        ("<abc> <bcbc> <abca> <>", "tag tag <abca> <>"),
        ("at 12:30.", "at time."),
        ("", ""),
    ],
)
def test_what_the_rules_find_is_replaced(text: str, expected: str):
    assert "".join(rewritten(RULES, text)) == expected


@given(st.lists(st.text("cat BaDdno1234<abc>:5 ", max_size=8), max_size=12))
def test_a_text_is_the_same_however_it_is_cut(pieces: list[str]):
    assert "".join(rewritten(RULES, *pieces)) == "".join(rewritten(RULES, "".join(pieces)))


def test_only_what_may_be_the_beginning_of_a_match_waits():
    rules = CompiledRules([Rule(find="secret", replace="***"), Rule(find="sk-", then="[a-z]{4,200}", replace="***")])
    pieces = ("a plain text ", "a se", "nse ", "my sec", "ret!", " task-", "5 is done", " sk-abcdef", "gh.")
    assert rewritten(rules, *pieces) == [
        "a plain text ",
        "a ",
        "sense ",
        "my ",
        "***!",
        " ta",
        "sk-5 is done",
        " ",
        "***.",
        "",
    ]


def test_the_end_settles_what_is_left():
    assert rewritten(CompiledRules([Rule(find="secret", replace="***")]), "a secre") == ["a ", "secre"]


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (Rule(), "find or then is needed"),
        (Rule(then="(a{1,9}){1,9}"), "a repeat inside a repeat"),
        (Rule(then="a+"), "longer than"),
        (Rule(then="a?"), "the empty text"),
        (Rule(find="x", then="$"), "cannot be used here"),
        (Rule(then=r"(a)\1"), "cannot be used here"),
        (Rule(then="(?=a)b"), "cannot be used here"),
        (Rule(then="("), "missing"),
    ],
)
def test_patterns_that_could_cost_too_much_are_refused_by_name(rule: Rule, problem: str):
    with pytest.raises(ValueError, match=rf"rules\[1\]: .*{problem}"):
        CompiledRules([Rule(find="x"), rule])


SECRETS = (
    *("sk-ant-api03-" + "aB3_" * 20, "sk-proj-" + "x" * 40, "ghp_" + "a" * 36, "github_pat_" + "1" * 40),
    *("glpat-" + "x" * 20, "xoxb-123456789012-abc", "AKIA" + "A1" * 8, "AIza" + "b" * 35, "hf_" + "q" * 34),
    "eyJ" + "a" * 20 + "." + "b" * 90 + "." + "c" * 43,
    "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIE/+a=\n" * 30,
)


@given(secret=st.sampled_from(SECRETS), size=st.integers(1, 9))
def test_a_secret_is_found_whichever_way_it_is_cut(secret: str, size: int):
    text = f"Use {secret}, and nothing else: the task-force-of-the-whole-nation of eyJ. AKIA is a word."
    rules = RedactSecrets(RedactSecretsOptions()).rules()
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert "".join(rewritten(CompiledRules(rules), *pieces)) == text.replace(secret, "[redacted]")
