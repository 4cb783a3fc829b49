"""Docs, examples and error messages teach names of the facade alone, so that a module that moves breaks no user."""

from __future__ import annotations

import re
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


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*")]
    found += [*(ROOT / "deploy").rglob("*.md"), *(ROOT / "clients").glob("*/README.md")]
    return [path for path in found if path.suffix in {".md", ".py", ".html"}]


def test_docs_and_examples_import_and_name_only_what_the_facade_exports() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in pages()}
    deeper = {
        f"{path}: {module}"
        for path, text in texts.items()
        for module in [*IMPORT.findall(text), *NAMED.findall(text)]
        if module not in ALLOWED
    }
    assert not deeper


def test_a_deeper_import_would_be_found() -> None:
    assert IMPORT.findall("    from tokenbus.policy.apply import apply_policies") == ["tokenbus.policy.apply"]
    assert NAMED.findall("use = 'tokenbus.policy.builtin.tool_rules:ToolRules'") == [
        "tokenbus.policy.builtin.tool_rules"
    ]
