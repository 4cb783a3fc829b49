"""Checkers of providers that speak OpenAI's protocols, pointed at the gateway."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients import node

SOURCES = Path(__file__).parent


@pytest.mark.parametrize("profile", ["chat", "modern"])
def test_compatcanary_has_no_complaint(base: str, profile: str, tmp_path: Path) -> None:
    command = node.packages(SOURCES) / ".bin" / "compatcanary"
    options = ("--base-url", base, "--model", "openai-chat/obliging", "--profile", profile)
    done = node.run(command, "scan", *options, cwd=tmp_path)
    assert "0 warned, 0 failed" in done.stdout, done.stdout + done.stderr


def test_trustedrouter_provider_check_has_no_complaint(base: str, tmp_path: Path) -> None:
    command = shutil.which("trustedrouter-provider-check") or pytest.skip("not installed: make test-clients")
    report = tmp_path / "report.json"
    options = ("--base-url", base, "--model", "openai-chat/obliging", "--tier", "5", "--json", str(report))
    env = {**os.environ, "TR_PROVIDER_API_KEY": "any"}
    done = subprocess.run([command, *options], env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 fail" in done.stdout, done.stdout
    assert json.loads(report.read_text())
