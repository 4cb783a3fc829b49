"""A secret is in a variable or in a file, and is read again when the file changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenbus.errors import SettingsError
from tokenbus.secret_env import GRACE_S, POLL_S, Secret, token_problem


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def write(file: Path, text: str) -> dict[str, str]:
    """As Kubernetes and Docker do: another file takes its place."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)
    return {"X_FILE": str(file)}


def test_a_variable_is_stripped_and_an_unset_one_is_empty() -> None:
    assert Secret("X", {"X": " a \n"}).value == "a"
    assert (bool(Secret("X", {})), Secret("X", {}).value) == (False, "")


def test_a_changed_file_is_read_again_and_looked_at_once_a_second_at_the_most(tmp_path: Path) -> None:
    clock = Clock()
    secret = Secret("X", write(tmp_path / "x", "old\n"), clock=clock)
    write(tmp_path / "x", "new\n")
    assert secret.value == "old", "looked at just now"
    clock.now = POLL_S
    assert secret.value == "new"
    assert secret.accepted() == ("new", "old"), "others may not have seen it yet"
    clock.now += GRACE_S
    assert secret.accepted() == ("new",)


def test_a_service_that_is_asked_with_the_new_secret_looks_at_once(tmp_path: Path) -> None:
    secret = Secret("X", write(tmp_path / "x", "old"), clock=Clock())
    write(tmp_path / "x", "new")
    assert secret.accepted() == ("new", "old")


@pytest.mark.parametrize("broken", ["", "two words"])
def test_an_invalid_or_missing_file_keeps_the_last_secret(tmp_path: Path, broken: str) -> None:
    clock = Clock()
    secret = Secret("X", write(tmp_path / "x", "old"), clock=clock, check=token_problem)
    write(tmp_path / "x", broken)
    clock.now = POLL_S
    assert secret.value == "old"
    (tmp_path / "x").unlink()
    clock.now += POLL_S
    assert secret.value == "old"
    write(tmp_path / "x", "new")
    clock.now += POLL_S
    assert secret.value == "new"


def test_what_is_wrong_at_the_start_is_named_without_the_secret(tmp_path: Path) -> None:
    for env, problem in (
        ({"X": "a", **write(tmp_path / "x", "b")}, "X_FILE: X is set too"),
        ({"X_FILE": str(tmp_path / "none")}, "X_FILE: .*none: No such file"),
        (write(tmp_path / "empty", " \n"), "the file is empty"),
        (write(tmp_path / "words", "secret words"), "not allowed in a header"),
    ):
        with pytest.raises(SettingsError, match=problem) as caught:
            Secret("X", env, check=token_problem)
        assert "secret words" not in str(caught.value)
