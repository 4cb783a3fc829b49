"""Commands, make targets, files and folders that sentences of the pages name exist, as those of code blocks do."""

from __future__ import annotations

import re

import click
import pytest

from tests.unit.docs.command_lines import check_line, files, is_written_here
from tests.unit.docs.pages import ROOT

_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
_COMMAND = re.compile(r"(?:tokenbus|make|python -m|\.venv/bin/\w+) .*")
_FILE = re.compile(r"(?:\.?[\w-]+/)+[\w.-]*")
_OURS = re.compile(
    r"(?:\.ci|clients|deploy|docs|maintenance|requirements|services|shared|tests|tokenbus_services)/.*|.*/\w+\.py"
)
"""Paths that begin in a folder of the repository, and ends of paths of modules. Others are URLs, or of machines."""
_NOT_IN_A_CHECKOUT = {"deploy/kubernetes/overlays/mine": "the reader's copy", "deploy/fetcher": "a deployment's name"}


def pages() -> dict[str, str]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    found += [*(ROOT / "deploy").rglob("*.md"), *(ROOT / "clients").glob("*/README.md")]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in found if is_written_here(path)}


def test_each_command_that_a_sentence_names_can_be_typed() -> None:
    named = {
        (page, " ".join(code.split()))
        for page, text in pages().items()
        for code in _CODE.findall(_BLOCK.sub("", text))
        if _COMMAND.fullmatch(" ".join(code.split()))
    }
    assert {"tokenbus up --mock", "make demo"} <= {line for _, line in named}
    wrong: list[str] = []
    for page, line in sorted(named):
        try:
            check_line(line, complete=False)
        except (AssertionError, click.UsageError) as e:
            wrong.append(f"{page}: {line}: {e}")
    assert not wrong


def test_each_file_that_a_page_names_exists() -> None:
    known = files()
    named = {
        (page, path.rstrip("/."))
        for page, text in pages().items()
        for path in _FILE.findall(re.sub(r"\]\([^)]*\)|https?://\S+", "", text))
        if _OURS.fullmatch(path)
    }
    assert "tests/waiting.py" in {path for _, path in named}
    assert not {f"{page}: {path}" for page, path in named if path not in known and path not in _NOT_IN_A_CHECKOUT}


@pytest.mark.parametrize(
    "line",
    [
        "make coffee",
        "tokenbus brew",
        "tokenbus up --port 1",
        "tokenbus up -z",
        "tokenbus slots --partitions many",
        "tokenbus dead",
        "tokenbus follow",
        "docker compose exec fetcher tokenbus send --tea",
        "python -m tests.tea",
        "python -m tests.chaos --tea",
        ".venv/bin/python -m pytest tests/unit/test_tea.py",
        ".venv/bin/python -m pytest -k 'tea and coffee' tests/e2e",
        "pip install '.[tea]'",
    ],
)
def test_a_line_that_cannot_be_typed_is_found(line: str) -> None:
    with pytest.raises((AssertionError, click.UsageError)):
        check_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "make up MOCK=1  # with the mock provider",
        "TOKENBUS_CONFIG=a.toml tokenbus worker parser --port 0",
        "tokenbus dead drop --all",
        "kubectl -n tokenbus exec deploy/fetcher -- tokenbus doctor",
        "kubectl create namespace tokenbus",
    ],
)
def test_a_line_that_can_be_typed_is_accepted(line: str) -> None:
    check_line(line)
