"""Every test, benchmark section and fault of the chaos that a page names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.bench.__main__ import ALL as SECTIONS
from tests.chaos.__main__ import THROUGHOUT
from tests.chaos.faults import ALL as FAULTS
from tests.unit.docs.pages import ROOT, page, rows, sections

TEST = re.compile(r"`tests/([\w/]+\.py)::(\w+)`")
SECTION = re.compile(r"--only (\S+?)[\s`]")
FAULT = re.compile(r"FAULTS=(?:\"([^\"]+)\"|(\w+))")


def texts() -> Iterator[tuple[str, str]]:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield path.relative_to(ROOT).as_posix(), path.read_text()


@cache
def named_in(file: Path) -> frozenset[str]:
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def missing(text: str) -> list[str]:
    """What this text names and nobody can run."""
    lost = [f"{file}::{name}" for file, name in TEST.findall(text) if name not in named_in(ROOT / "tests" / file)]
    lost += [f"--only {name}" for name in SECTION.findall(text) if name not in SECTIONS]
    faults = [name.strip() for quoted, bare in FAULT.findall(text) for name in (quoted or bare).split(",")]
    return lost + [f"FAULTS={name}" for name in faults if name not in {*FAULTS, *THROUGHOUT}]


def test_each_test_and_command_that_a_page_names_can_be_run() -> None:
    assert {name: lost for name, text in texts() if (lost := missing(text))} == {}


def test_each_fault_of_the_guarantees_names_a_test() -> None:
    table = rows(sections(page("explain/guarantees.md"))["What shows it"])
    assert len(table) > 10
    for fault, _, test, _ in table:
        assert TEST.search(test), fault


def test_what_is_gone_would_be_found() -> None:
    gone = ["`tests/unit/docs/test_evidence.py::test_gone`", "`tests/unit/gone.py::test_x`", "`--only gone`"]
    assert missing(" ".join([*gone, '`make chaos FAULTS="task, gone"`'])) == [
        "unit/docs/test_evidence.py::test_gone",
        "unit/gone.py::test_x",
        "--only gone",
        "FAULTS=gone",
    ]
    here = "`tests/unit/docs/test_evidence.py::test_what_is_gone_would_be_found`"
    assert missing(f"{here} `--only beside` FAULTS=clocks") == []
