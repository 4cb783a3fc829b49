"""Misspelt names."""

from __future__ import annotations

from tokenbus.core.nearest_name import nearest, unknown_name

FIELDS = ["max_tokens", "messages", "model", "temperature"]


def test_a_misspelt_name_gets_the_name_it_was_meant_to_be() -> None:
    assert nearest("max_token", FIELDS) == "max_tokens"
    assert nearest("Temprature", FIELDS) == "temperature"
    assert nearest("modle", ["mode", "model"]) == "model"


def test_a_name_like_no_other_gets_none() -> None:
    assert nearest("zzz", FIELDS) is None
    assert nearest("nope", ["queued", "open", "failed"]) is None


def test_a_short_name_may_lack_its_first_letter_or_have_one_more() -> None:
    assert nearest("odel", FIELDS) == "model"
    assert nearest("xopen", ["open", "ended"]) == "open"


def test_the_problem_names_the_close_one_or_all() -> None:
    assert unknown_name("max_token", FIELDS) == "unknown 'max_token': did you mean 'max_tokens'?"
    assert unknown_name("zzz", ["a", "b"]) == "unknown 'zzz': must be one of 'a', 'b'"
    assert unknown_name(7, ["a", "b"]) == "unknown 7: must be one of 'a', 'b'"
