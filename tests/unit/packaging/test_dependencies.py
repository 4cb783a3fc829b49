"""Every package that the code imports is declared by the extra that the code belongs to, and the lock files agree."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"tokenbus", "tokenbus_services"}

NEEDS = [
    ("shared/tokenbus/faststream", ("faststream",)),
    ("shared/tokenbus/integrations/livekit", ("livekit",)),
    ("shared/tokenbus/integrations/pipecat", ("pipecat",)),
    ("shared/tokenbus/testing", ("services", "testing")),
    ("shared", ()),
    ("services/tokenbus_services/tools/mcp", ("services", "mcp")),
    ("services/tokenbus_services/telemetry/otlp_export.py", ("services", "otel")),
    ("services/tokenbus_services/blobs/archive_format.py", ("services", "archive")),
    ("services", ("services",)),
]
"""Code by the beginning of its path, and the extras that its users have installed. The first that fits counts."""

NOT_INSTALLED = {"livekit": ["livekit-agents"], "pipecat": ["pipecat-ai"]}
"""Packages that `make setup` leaves out, by module."""


def declared(extras: tuple[str, ...]) -> set[str]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    tops = {name.partition(".")[0] for name in names}
    return tops - set(sys.stdlib_module_names) - OURS


def test_every_imported_package_is_declared() -> None:
    distributions = packages_distributions()
    undeclared: set[str] = set()
    for path in sorted([*(ROOT / "shared").rglob("*.py"), *(ROOT / "services").rglob("*.py")]):
        where = path.relative_to(ROOT).as_posix()
        extras = next(extras for beginning, extras in NEEDS if where.startswith(beginning))
        for module in imported(path):
            names = {canonicalize_name(name) for name in distributions.get(module) or NOT_INSTALLED[module]}
            if not names & declared(extras):
                undeclared.add(f"{where} imports {module}, which {extras or 'the base'} does not declare")
    assert not undeclared


def test_the_internals_of_faststream_are_imported_in_one_module_alone() -> None:
    users: dict[str, list[str]] = {}
    for path in [*(ROOT / "shared").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "faststream._internal" in source else ():
            if isinstance(node, ast.ImportFrom) and "faststream._internal" in (node.module or ""):
                users.setdefault(path.name, []).extend(alias.name for alias in node.names)
    assert users == {"faststream_internals.py": ["Registrator", "CallsCollection", "BaseMiddleware"]}


def test_the_extra_all_is_every_extra_that_runs_something() -> None:
    [everything] = PROJECT["optional-dependencies"]["all"]
    of_users_tests_and_examples = {"all", "examples", "testing"}
    of_other_frameworks = {"livekit", "pipecat"}
    rest = set(PROJECT["optional-dependencies"]) - of_users_tests_and_examples - of_other_frameworks
    assert Requirement(everything).extras == rest


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return {canonicalize_name(Requirement(line).name): line for line in lines}


LOCKS = sorted(path.name for path in (ROOT / "requirements").glob("*.lock"))


def test_the_demos_lock_file_is_a_part_of_the_whole_and_has_all_that_the_demo_imports() -> None:
    whole, demo = locked("requirements/development.lock"), locked("requirements/demo.lock")
    assert demo.items() <= whole.items()
    assert declared(("services", "embedded")) | {"hatchling"} <= demo.keys()
    assert not demo.keys() & {"pytest", "pyright", "ruff", "boto3", "openai", "anthropic", "mcp"}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_has_all_that_the_services_import(name: str) -> None:
    assert declared(("services", "embedded")) <= locked(f"requirements/{name}").keys()


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_holds_names_and_versions_and_no_addresses(name: str) -> None:
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[^\s/:@]+( ; [^/:@]+)?", line), line


def test_each_python_of_the_classifiers_satisfies_requires_python() -> None:
    versions = [line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert versions[0] == PROJECT["requires-python"].removeprefix(">=")
