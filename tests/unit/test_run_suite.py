"""The runner of the suite: parts of near-equal length, each file once; what fails beside others is tried alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rows import over_rows
from tests.run import CHAINED, COMPUTE, ON_BOTH_SERVERS, SECONDS, files_in, over_budget, plan


def test_each_file_is_in_one_part_and_the_longest_part_is_first() -> None:
    seconds = {f"tests/test_{n}.py": float(n) for n in range(1, 20)}
    parts = plan(seconds, seconds, 4)
    assert sorted(file for part in parts for file in part.files) == sorted(seconds)
    assert [part.seconds for part in parts] == sorted((part.seconds for part in parts), reverse=True)
    assert max(part.seconds for part in parts) - min(part.seconds for part in parts) <= max(seconds.values())


def test_the_rooms_and_files_that_the_runner_names_exist() -> None:
    assert [path for path in (*COMPUTE, *ON_BOTH_SERVERS, *CHAINED) if not files_in([path])] == []


def test_a_file_longer_than_a_fair_part_is_alone() -> None:
    assert plan(["a", "b", "c"], {"a": 100, "b": 1, "c": 1}, 2)[0].files == ("a",)


def test_files_far_over_their_seconds_and_slow_files_without_any_are_named() -> None:
    took = {"a": 30.0, "b": 11.0, "new": 7.0, "small": 4.0}
    lines = over_budget(took, {"a": 10.0, "b": 10.0, "small": 0.1})
    assert [line.split()[-1] for line in lines] == ["a", "new"]


def run(directory: Path, **files: str) -> subprocess.CompletedProcess[str]:
    (directory / "pytest.ini").touch()
    (directory / SECONDS.parent).mkdir()
    (directory / SECONDS).write_text("{}")
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "tests.run", "-n", "2", "."],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_test_that_fails_beside_others_and_passes_alone_is_named(tmp_path: Path) -> None:
    once = f"""
from pathlib import Path
def test_second_time():
    mark = Path({str(tmp_path / "mark")!r})
    if not mark.exists():
        mark.touch()
        raise AssertionError
"""
    ended = run(tmp_path, once=once, good="def test_good(): pass")
    assert "Failed beside others and passed alone: " in ended.stdout
    assert "test_second_time" in ended.stdout.splitlines()[-1]
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def test_bad(): assert 0", "Second try, alone: test_bad.py::test_bad"),
        ("import nothing_of_this_name", "1 parts ended otherwise than by a failed test"),
    ],
)
def test_what_fails_again_or_cannot_be_collected_fails_the_run(tmp_path: Path, text: str, said: str) -> None:
    ended = run(tmp_path, bad=text, good="def test_good(): pass")
    assert ended.returncode == 1
    assert said in ended.stdout
    assert text in ended.stdout
    assert "1 passed" in ended.stdout


def test_all_rows_are_tried_and_those_that_fail_are_named() -> None:
    tried: list[int] = []

    @over_rows("number, even", [(1, False), (2, True), (3, True), (5, True)], ids=str)
    def check(number: int, even: bool) -> None:
        tried.append(number)
        assert (number % 2 == 0) == even

    with pytest.raises(ExceptionGroup, match="2 of 4 rows fail") as found:
        check()
    assert tried == [1, 2, 3, 5]
    assert [error.__notes__ for error in found.value.exceptions] == [["row: (3, True)"], ["row: (5, True)"]]


async def test_rows_of_a_coroutine_are_awaited() -> None:
    @over_rows("number", [1, 2])
    async def check(number: int) -> None:
        assert number == 1

    with pytest.raises(ExceptionGroup, match="1 of 2 rows fail"):
        await check()
