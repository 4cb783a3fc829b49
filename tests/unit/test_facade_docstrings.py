"""What users read in their editor: a public name says in its first line what it does, and names errors that exist."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest

import tokenbus
import tokenbus.sync
from tests.unit.test_public_api import BEHIND_THE_FACADE, FACADE
from tokenbus import errors

MODULES = ("tokenbus", "tokenbus.policy", "tokenbus.shaping", "tokenbus.errors", "tokenbus.testing", "tokenbus.sync")
_FIRST_SENTENCE = re.compile(r"[^\n]*[^\s.][.:](?=\s|$)")
_RAISES = re.compile(r"\b[Rr]aises?\b(.*?)(?:\.(?=\s|$)|\Z)", re.DOTALL)
_NAME_OF_A_CLASS = re.compile(r"(?<![\w.`])(?:[A-Z][a-z]+){2,}\b")


def _texts(name: str, public: object) -> Iterator[tuple[str, str]]:
    """The docstring of a name, and those of the methods and properties of a class; a method may inherit its text."""
    if not (inspect.isclass(public) or inspect.isfunction(public)):
        return
    yield name, inspect.cleandoc(public.__doc__ or "")
    if not inspect.isclass(public) or name in BEHIND_THE_FACADE:
        return
    for member, value in inspect.getmembers(public):
        called = inspect.isfunction(value) or inspect.ismethod(value) or isinstance(value, property)
        if called and not member.startswith("_"):
            yield f"{name}.{member}", inspect.getdoc(value) or ""


def _has_a_first_line(text: str) -> bool:
    """The first sentence ends on the first line, and does not send the reader elsewhere."""
    return bool(_FIRST_SENTENCE.match(text)) and not text.startswith(("See ", "Same as "))


def _unknown_errors(text: str) -> set[str]:
    named = {name for sentence in _RAISES.findall(text) for name in _NAME_OF_A_CLASS.findall(sentence)}
    known = {*dir(errors), *dir(builtins), *(name for module in FACADE.values() for name in module.split())}
    return named - known


@pytest.mark.parametrize("module", MODULES)
def test_a_public_name_says_in_one_line_what_it_does_and_raises_errors_that_exist(module: str) -> None:
    facade = importlib.import_module(module)
    texts = {name: text for public in FACADE[module].split() for name, text in _texts(public, getattr(facade, public))}
    assert texts
    assert [name for name, text in texts.items() if not _has_a_first_line(text)] == []
    assert {name: wrong for name, text in texts.items() if (wrong := _unknown_errors(text))} == {}


def test_a_docstring_that_breaks_a_rule_is_found() -> None:
    assert not _has_a_first_line("")
    assert not _has_a_first_line("See `Client.follow`.")
    assert not _has_a_first_line("Return what\nis asked for.")
    assert _has_a_first_line("Return it. Raises ValueError.")
    assert _unknown_errors("Return it. Raises RunVanished if there\nis none, ValueError.") == {"RunVanished"}


def test_the_synchronous_client_takes_what_the_asynchronous_one_takes() -> None:
    taken = inspect.signature(tokenbus.Client).parameters
    assert list(inspect.signature(tokenbus.sync.Client).parameters.values()) == list(taken.values())
