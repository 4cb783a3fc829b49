"""The runner of the suite: each test once, in forked workers; what fails beside others is tried alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.pool import Cost
from tests.rows import over_rows
from tests.run import CHAINED, COMPUTE, ON_BOTH_SERVERS, SECONDS, SLOW, files_in, over_budget


def test_the_rooms_and_files_that_the_runner_names_exist() -> None:
    assert [path for path in (*COMPUTE, *ON_BOTH_SERVERS, *CHAINED, *SLOW) if not files_in([path])] == []


def test_files_far_over_their_cpu_seconds_and_costly_files_without_any_are_named() -> None:
    took = {"a": 30.0, "b": 11.0, "new": 7.0, "small": 3.0}
    budget = {"a": Cost(99, 10), "b": Cost(1, 10), "small": Cost(9, 0.1)}
    lines = over_budget({file: Cost(50, cpu) for file, cpu in took.items()}, budget)
    assert [line.split()[-1] for line in lines] == ["a", "new"]


def run(directory: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    (directory / "pytest.ini").touch()
    (directory / SECONDS.parent).mkdir()
    (directory / SECONDS).write_text("{}")
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "tests.run", "-n", "2", "--keep-seconds", ".", *options],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
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
        ("import nothing_of_this_name", "1 sessions ended otherwise than by a failed test"),
    ],
)
def test_what_fails_again_or_cannot_be_collected_fails_the_run(tmp_path: Path, text: str, said: str) -> None:
    ended = run(tmp_path, bad=text, good="def test_good(): pass")
    assert ended.returncode == 1
    assert said in ended.stdout
    assert text in ended.stdout


def test_a_worker_that_dies_fails_its_test_and_what_was_to_follow_in_the_file_and_no_other(tmp_path: Path) -> None:
    dies = "import os\ndef test_dies(): os._exit(7)\ndef test_next(): pass"
    ended = run(tmp_path, dies=dies, good="def test_good(): pass", other="def test_other(): pass")
    assert ended.returncode == 1
    first = ended.stdout.split("Second try")[0]
    lost = [f"ERROR test_dies.py::test_{name}" in first for name in ("dies", "next")]
    assert lost == [True, True]
    assert "its worker ended with 7" in first
    assert "2 passed" in first


def test_each_test_runs_once_and_its_cost_has_what_its_processes_took(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    text = f"""
import subprocess, sys, pathlib
def test_burns(): subprocess.run([sys.executable, "-c", {burn!r}], check=True)
def test_is_counted(): pathlib.Path(__file__).with_suffix(".ran").open("a").write(".")
"""
    skipped = "import pytest\ndef test_not(): pytest.skip('for this')"
    ended = run(tmp_path, "-ra", **{f"file{n}": text for n in range(4)}, skipped=skipped)
    assert ended.returncode == 0, ended.stdout
    assert "8 passed, 1 skipped" in ended.stdout
    assert [path.read_text() for path in tmp_path.glob("*.ran")] == ["."] * 4
    costs = msgspec.json.decode((tmp_path / SECONDS).read_bytes(), type=dict[str, Cost])
    assert sorted(costs) == [*(f"test_file{n}.py" for n in range(4)), "test_skipped.py"]
    assert [cost.cpu >= 0.5 for _, cost in sorted(costs.items())] == [True] * 4 + [False]


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
