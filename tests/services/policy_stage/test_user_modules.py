"""A deployment's own policies may be beside its settings file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tokenbus.policy.loading import PolicySpec, load
from tokenbus_services.policy_stage.app import create
from tokenbus_services.settings import Settings


def test_a_policy_worker_finds_modules_beside_the_settings_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guards_beside_settings.py").write_text("async def quiet(chunk, state, context): ...\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TOKENBUS_CONFIG", str(tmp_path / "tokenbus.toml"))
    create(Settings(redis_url="redis://localhost"))
    assert load(PolicySpec(policy="guards_beside_settings:quiet"))().name == "quiet"
