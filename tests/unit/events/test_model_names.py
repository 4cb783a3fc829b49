"""A model is known by its name, however it is spelled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.events.quirks import (
    Quirks,
    ThinkingTags,
    begins_with,
    model_key,
    names_model,
    segment_problem,
    text_problem,
)

SPELLINGS = [
    "gemini-2.5-pro",
    "models/gemini-2.5-pro",
    "MODELS/Gemini-2.5-Pro",
    "models/models/gemini-2.5-pro",
    "models//gemini-2.5-pro",
    "  gemini-2.5-pro\t",
    "models/ gemini-2.5-pro",
    "publishers/google/models/gemini-2.5-pro",
    "projects/mine/locations/eu/publishers/google/models/gemini-2.5-pro",
    "".join(chr(ord(char) + 0xFEE0) for char in "gemini") + "-2.5-pro",  # of full width
]


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_every_spelling_is_the_same_model(spelled: str) -> None:
    assert model_key(spelled) == "gemini-2.5-pro"
    for name in (*SPELLINGS, "gemini-2*", "models/Gemini-2*", "*"):
        assert names_model(name, spelled), name
    assert begins_with(spelled, ("claude", "Gemini-2.5"))
    assert not names_model("gemini-2.5", spelled)
    assert Quirks(models={"gemini-2": ThinkingTags(inline_thinking=("think",))}).of(spelled).inline_thinking


@pytest.mark.parametrize("other", ["tunedModels/gemini-2.5-pro", "google/gemini-2.5-pro", "gemini-2.5-pro:free"])
def test_another_model_of_a_like_name_is_another(other: str) -> None:
    assert not names_model("gemini-2.5-pro", other)


@given(st.text())
def test_a_key_is_its_own_key(name: str) -> None:
    assert model_key(model_key(name)) == model_key(name)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\x00", "a\u200bb", "a\u202eb", "a\u2028b"])
def test_an_invisible_name_counts_as_no_name(name: str) -> None:
    assert text_problem(name)


@pytest.mark.parametrize("name", ["..", ".", "../x", "a/../b", "a//b", "/a", "a/", "a\\b", "a%2fb", "%2e%2e", "a\r\nb"])
def test_a_name_that_could_change_the_path_is_refused_in_a_path(name: str) -> None:
    assert segment_problem(name)


@pytest.mark.parametrize("name", ["gpt-5", "ft:gpt-4o:org::id", "meta-llama/Llama-3.1-8B", "accounts/me/models/x#y"])
def test_names_that_there_are_can_be(name: str) -> None:
    assert segment_problem(name) is None
