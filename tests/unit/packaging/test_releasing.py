"""`make release`: what keeps a release from being made, and what it changes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from maintenance.releasing.release import Release, problems
from tests.fork_server import ROOT

FILES = (
    "shared/tokenbus/__init__.py",
    "clients/typescript/package.json",
    "clients/typescript/package-lock.json",
)
UNRELEASED = "# Changelog\n\n## Unreleased\n\n### What an operator must do\n\nNothing.\n"
CHANGELOG = f"{UNRELEASED}\n## 0.1.0 - 2026-01-01\n\nFirst.\n"


@pytest.fixture
def release(tmp_path: Path) -> Release:
    """A repository that is ready for 0.2.0."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    made = Release(tmp_path, "0.2.0")
    made.git("init", "--quiet", "--initial-branch", "main")
    made.git("config", "user.name", "test")
    made.git("config", "user.email", "test@example.org")
    made.git("add", "--all")
    made.git("commit", "--quiet", "--message", "first")
    made.git("tag", "v0.1.0")
    return made


def test_a_ready_repository_has_no_problem(release: Release) -> None:
    assert problems(release) == []


@pytest.mark.parametrize(
    ("disturb", "says"),
    [
        (lambda r: (r.root / "CHANGELOG.md").write_text(CHANGELOG + "more\n"), "not clean: CHANGELOG.md"),
        (lambda r: r.git("switch", "--quiet", "--create", "other"), "the branch is other"),
        (lambda r: r.git("tag", "v0.10.0"), "v0.10.0 is tagged already"),
        (lambda r: setattr(r, "version", "0.2"), "is not of the form"),
        (lambda r: rewrite(r, CHANGELOG.replace("Nothing.", "")), "no section '### What an operator must do'"),
        (lambda r: rewrite(r, "## Unreleased\n\n## 0.1.0\n"), "nothing under '## Unreleased'"),
    ],
)
def test_what_is_not_ready_is_named(release: Release, disturb: Callable[[Release], object], says: str) -> None:
    disturb(release)
    [problem] = problems(release)
    assert says in problem


def rewrite(release: Release, changelog: str) -> None:
    (release.root / "CHANGELOG.md").write_text(changelog)
    release.git("commit", "--quiet", "--all", "--message", "changed")


def test_a_release_writes_version_date_and_tag_in_one_commit(release: Release) -> None:
    release.write(date(2026, 12, 1))
    release.commit()
    assert release.current == "0.2.0"
    assert (
        "## Unreleased\n\n## 0.2.0 - 2026-12-01\n\n### What an operator must do"
        in (release.root / "CHANGELOG.md").read_text()
    )
    assert all('"version": "0.2.0"' in (release.root / name).read_text() for name in FILES[1:])
    assert release.git("describe") == "v0.2.0"
    assert release.git("status", "--porcelain") == ""
    assert "v0.2.0 is tagged already" in problems(release)[0]


def test_without_do_nothing_is_changed(release: Release) -> None:
    before = release.git("rev-parse", "HEAD")
    completed = subprocess.run(
        [sys.executable, "-m", "maintenance.releasing", "0.2.0"],
        cwd=release.root,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "[ ] make chaos" in completed
    assert "DO=1" in completed
    assert release.git("rev-parse", "HEAD") == before
    assert release.git("status", "--porcelain") == ""
