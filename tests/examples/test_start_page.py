"""docs/start/index.md: its programs and its commands work as they stand, beside `tokenbus up --mock`."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.unit.docs.pages import page
from tests.waiting import eventually_sync

TEXT = page("start/index.md")
PROGRAMS = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
SPOKEN = re.findall(r"^speaks: .+$", TEXT, re.MULTILINE)
BIN = Path(sys.executable).parent


def command(start: str) -> list[str]:
    """The page's command that begins so, with the programs of this environment."""
    (line,) = [line for line in COMMANDS if line.startswith(start)]
    program, *arguments = shlex.split(line)
    return [str(BIN / program), *arguments]


@contextmanager
def running(line: list[str], directory: Path, output: Path) -> Iterator[None]:
    """The command until the end of the block, then Ctrl-C."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENBUS_")}
    with output.open("w") as log:
        process = subprocess.Popen(line, cwd=directory, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def run(line: list[str], directory: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENBUS_")}
    done = subprocess.run(
        line, cwd=directory, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    for name, code in PROGRAMS.findall(TEXT):
        (tmp_path / name).write_text(code)
    up, spoken = tmp_path / "up.log", tmp_path / "speak.log"
    with running(command("tokenbus up --mock"), tmp_path, up):
        eventually_sync(lambda: "\nready\n" in up.read_text(), timeout=90)
        assert "Yes, take it along." in run(command("python ask.py"), tmp_path)
        assert "weather" in run(command("tokenbus send"), tmp_path)
        with running(command("python speak.py"), tmp_path, spoken):

            def all_is_spoken() -> bool:
                run(command("python ask.py"), tmp_path)  # repeat until it is received: events before the start are not
                return all(line in spoken.read_text() for line in SPOKEN)

            eventually_sync(all_is_spoken, timeout=120)
