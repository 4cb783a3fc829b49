"""The import rules of pyproject.toml find what breaks them, and no modules import each other in a circle."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import grimp
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"tokenbus": "shared", "tokenbus_services": "services"}
ROOTS = tuple(SOURCES)


class Planted(NamedTuple):
    """An import that must not be, and the contract that has to say so."""

    module: str
    line: str
    contract: str
    found: str


LIBRARY = "Rooms of the library, each knows only those below"
SERVICES = "Rooms of the services, each knows only those below"
PURE = "Core, events, providers and shaping do no IO"
POLICIES = "Policies open no connection of their own"

PLANTED = {
    "a service that imports another": Planted(
        "tokenbus_services.policy_stage.service",
        "import tokenbus_services.parser.logic",
        SERVICES,
        "tokenbus_services.policy_stage is not allowed to import tokenbus_services.parser",
    ),
    "a room of the services that nobody placed": Planted(
        "tokenbus_services.attic", "", SERVICES, "- tokenbus_services.attic"
    ),
    "a room of the library that nobody placed": Planted("tokenbus.attic", "", LIBRARY, "- tokenbus.attic"),
    "the library that imports a service": Planted(
        "tokenbus.client.client",
        "import tokenbus_services.settings",
        "The library never imports the services",
        "tokenbus.client is not allowed to import tokenbus_services",
    ),
    "a lower room that imports a higher one for type checkers": Planted(
        "tokenbus.errors",
        "if TYPE_CHECKING:\n    from tokenbus.client.response import ResponseBuilder",
        LIBRARY,
        "tokenbus.errors is not allowed to import tokenbus.client",
    ),
    "the library that needs httpx": Planted(
        "tokenbus.client.publishing",
        "import httpx",
        "The library needs msgspec and redis alone",
        "tokenbus.client is not allowed to import httpx",
    ),
    "a socket in the policy library": Planted(
        "tokenbus.policy.processor", "import socket", POLICIES, "tokenbus.policy is not allowed to import socket"
    ),
    "redis in the policy library": Planted(
        "tokenbus.policy.apply", "import redis", POLICIES, "tokenbus.policy is not allowed to import redis"
    ),
    "asyncio in the core": Planted(
        "tokenbus.core.request.parse", "import asyncio", PURE, "tokenbus.core is not allowed to import asyncio"
    ),
    "the time of day in the core": Planted(
        "tokenbus.core.run.state", "import time", PURE, "tokenbus.core is not allowed to import time"
    ),
    "a socket in the core": Planted(
        "tokenbus.core.prefill.parser",
        "def _never():\n    import socket",
        PURE,
        "tokenbus.core is not allowed to import socket",
    ),
    "a command that imports another": Planted(
        "tokenbus_services.cli.runs.send",
        "import tokenbus_services.cli.top",
        "Commands do not know each other",
        "tokenbus_services.cli.runs is not allowed to import tokenbus_services.cli.top",
    ),
    "a provider that knows another": Planted(
        "tokenbus.providers.gemini.stream",
        "import tokenbus.providers.anthropic.stream",
        "Providers know their own API, and no other",
        "tokenbus.providers.gemini is not allowed to import tokenbus.providers.anthropic",
    ),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `lint-imports` says about each broken contract, in a copy of the sources where all of it is planted."""
    tree = tmp_path_factory.mktemp("walls")
    shutil.copy(ROOT / "pyproject.toml", tree)
    for package, root in SOURCES.items():
        shutil.copytree(ROOT / root / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for planted in PLANTED.values():
        file = tree / (planted.module.replace(".", "/") + ".py")
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        file.write_text(f"{text}\n{planted.line}\n", encoding="utf-8")
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    env = {**os.environ, "PYTHONPATH": str(tree), "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tree, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    _, _, details = done.stdout.partition("Broken contracts\n")
    sections: dict[str, str] = {}
    name = ""
    lines = details.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line and following == "-" * len(line):
            name = line
        sections[name] = sections.get(name, "") + line + "\n"
    return sections


@pytest.mark.parametrize("what", PLANTED)
def test_the_import_rules_find(what: str, broken: dict[str, str]) -> None:
    planted = PLANTED[what]
    assert planted.found in broken[planted.contract]


def test_no_contract_has_an_exemption() -> None:
    linter = _linter()
    assert linter["exclude_type_checking_imports"] is False
    for contract in linter["contracts"]:
        assert not {"ignore_imports", "exhaustive_ignores"} & contract.keys(), contract["name"]


def test_every_room_of_the_library_is_kept_off_the_services_and_off_other_packages() -> None:
    rooms = {f"tokenbus.{path.stem}" for path in (ROOT / "shared/tokenbus").iterdir() if _is_module(path)}
    contracts = {contract["name"]: contract for contract in _linter()["contracts"]}
    *_, lowest = contracts["The library never imports the services"]["layers"]
    assert {name.strip() for name in lowest.split(":")} == rooms - {"tokenbus.testing"}
    light = contracts["The library needs msgspec and redis alone"]["source_modules"]
    with_more_dependencies = {
        *("tokenbus.testing", "tokenbus.faststream", "tokenbus.faststream_internals", "tokenbus.integrations")
    }
    shared_by_plug_ins = {f"tokenbus.integrations.{name}" for name in ("chat_request", "spoken_text", "voice_turn")}
    assert {*light} == rooms - with_more_dependencies | shared_by_plug_ins


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph(*ROOTS, exclude_type_checking_imports=False, cache_dir=None)
    assert not _circle({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})


def test_a_circle_of_modules_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert not _circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def _circle(imports: dict[str, set[str]]) -> list[str]:
    left = dict(imports)
    while leaves := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in leaves:
            del left[module]
    path: list[str] = []
    module = min(left, default="")
    while module and module not in path:
        path.append(module)
        module = min(left[module] & left.keys())
    return [*path[path.index(module) :], module] if module else []


def _linter() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]


def _is_module(path: Path) -> bool:
    return (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()


def loaded_by_name(source: str) -> list[str]:
    """The modules of this project that are imported by a text, as far as the text begins with their room."""
    if "import_module" not in source:
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args]
    texts = [call.args[0] for call in calls if "import_module" in ast.unparse(call.func)]
    begun = [text.values[0] if isinstance(text, ast.JoinedStr) else text for text in texts]
    found = [str(text.value) for text in begun if isinstance(text, ast.Constant)]
    return [name for name in found if name.startswith("tokenbus")]


def test_no_room_loads_another_by_name_which_no_contract_could_see() -> None:
    elsewhere = {
        f"{path.relative_to(ROOT)}: {name}"
        for package, folder in SOURCES.items()
        for path in (ROOT / folder / package).rglob("*.py")
        for name in loaded_by_name(path.read_text())
        if name.split(".")[:2] != [package, path.relative_to(ROOT / folder / package).parts[0]]
    }
    assert elsewhere == set()


def test_a_room_that_is_loaded_by_name_would_be_found() -> None:
    assert loaded_by_name('importlib.import_module("tokenbus_services.console.app")') == [
        "tokenbus_services.console.app"
    ]
    assert loaded_by_name('import_module(f"tokenbus_services.{x}.app")') == ["tokenbus_services."]
    assert loaded_by_name("importlib.import_module(path)") == []
