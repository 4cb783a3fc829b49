"""Docs, examples and error messages teach names of the facade alone, so that a module that moves breaks no user."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.unit.test_public_api import FACADE

ROOT = Path(__file__).parents[3]
SHIPPED_ELSEWHERE = {"tokenbus_services.policy_stage.builtin"}
"""A policy that settings name and no Python code imports."""
FOR_FRAMEWORKS = {f"tokenbus.integrations{name}" for name in ("", ".livekit", ".pipecat")}
"""Their frameworks are not installed here; tests/integrations imports them."""
PYTEST_PLUGIN = "tokenbus.testing.fixtures"
ALLOWED = {*FACADE, *SHIPPED_ELSEWHERE, *FOR_FRAMEWORKS, PYTEST_PLUGIN}

IMPORT = re.compile(r"^\s*(?:from|import) (tokenbus\w*(?:\.\w+)*)", re.MULTILINE)
NAMED = re.compile(r"\b(tokenbus(?:_services)?(?:\.[a-z_]+)*)[.:](?!toml\b)[A-Z]\w*")
"""`tokenbus.policy:ToolRules` in settings, `tokenbus.policy.ToolRules` in prose."""
MODULE = re.compile(r"\btokenbus(?:_services)?(?:\.[a-z_]+)+")
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*")]
    found += [*(ROOT / "deploy").rglob("*.md"), *(ROOT / "clients").glob("*/README.md")]
    return [path for path in found if path.suffix in {".md", ".py", ".html"}]


def is_module(name: str) -> bool:
    path = name.replace(".", "/")
    return any(
        (ROOT / root / f"{path}{end}").exists() for root in ("shared", "services") for end in (".py", "/__init__.py")
    )


def hidden_names(source: str) -> Iterator[str]:
    """What the code imports from a module of the facade that the facade does not export, such as its submodules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in FACADE:
            exported = FACADE[node.module].split()
            yield from (f"{node.module}: {alias.name}" for alias in node.names if alias.name not in exported)


def test_docs_and_examples_import_and_name_only_what_the_facade_exports() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in pages()}
    deeper = {
        f"{path}: {module}"
        for path, text in texts.items()
        for module in [*IMPORT.findall(text), *NAMED.findall(text), *filter(is_module, MODULE.findall(text))]
        if module not in ALLOWED
    }
    assert not deeper


def test_docs_and_examples_import_no_name_that_the_facade_does_not_export() -> None:
    sources = {
        str(path.relative_to(ROOT)): [path.read_text()]
        if path.suffix == ".py"
        else PYTHON_BLOCK.findall(path.read_text())
        for path in pages()
    }
    assert len(sources["README.md"]) > 1
    assert not {f"{path}: {name}" for path, codes in sources.items() for code in codes for name in hidden_names(code)}


def test_a_deeper_import_would_be_found() -> None:
    assert IMPORT.findall("    from tokenbus.policy.apply import apply_policies") == ["tokenbus.policy.apply"]
    assert NAMED.findall("use = 'tokenbus.policy.builtin.tool_call_gate:ToolRules'") == [
        "tokenbus.policy.builtin.tool_call_gate"
    ]
    assert [*filter(is_module, MODULE.findall("`tokenbus.core.prefill` reads `tokenbus.toml`"))] == [
        "tokenbus.core.prefill"
    ]
    assert [*hidden_names("from tokenbus import Client, bus\n")] == ["tokenbus: bus"]
