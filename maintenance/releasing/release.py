"""What a release changes, and what must hold before."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

UNRELEASED = "## Unreleased"
OPERATOR = "### What an operator must do"
BRANCH = "main"
BY_HAND = (
    ".ci/run                     everything, from a clean checkout",
    "make chaos                  ten minutes of faults, and a judge",
    "make upgrade-test           each worker replaced by this release and back, twenty times",
    "make bench                  the figures in README.md, if they changed",
    "docs/operate/upgrade.md     what the changelog deprecates and removes is in keeping with what it promises",
)
"""What no command can decide, or takes too long for one."""
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:(a|b|rc)(\d+))?")


class Release:
    """One release of the repository in ``root``."""

    def __init__(self, root: Path, version: str) -> None:
        self.root = root
        self.version = version
        self._init = root / "shared/tokenbus/__init__.py"
        self._changelog = root / "CHANGELOG.md"
        self._package = root / "clients/typescript/package.json"
        self._package_lock = root / "clients/typescript/package-lock.json"

    def git(self, *arguments: str) -> str:
        """Run git; return what it prints."""
        done = subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    @property
    def current(self) -> str:
        """The version in the sources."""
        found = re.search(r'^__version__ = "(.+)"$', self._init.read_text(encoding="utf-8"), re.MULTILINE)
        return found[1] if found else ""

    def section(self, heading: str) -> str:
        """The text under a heading of the unreleased part; empty if there is none."""
        unreleased = self._changelog.read_text(encoding="utf-8").partition(f"{UNRELEASED}\n")[2]
        unreleased = re.split(r"^## ", unreleased, maxsplit=1, flags=re.MULTILINE)[0]
        if not heading:
            return unreleased.strip()
        part = unreleased.partition(f"{heading}\n")[2]
        return re.split(r"^### ", part, maxsplit=1, flags=re.MULTILINE)[0].strip()

    def write(self, day: date) -> None:
        """Put version and date where they stand."""
        _replace(self._init, f'__version__ = "{self.current}"', f'__version__ = "{self.version}"')
        _replace(self._changelog, f"{UNRELEASED}\n", f"{UNRELEASED}\n\n## {self.version} - {day.isoformat()}\n")
        for path in (self._package, self._package_lock):
            _set_version(path, _for_npm(self.version))

    def commit(self) -> None:
        """Commit what `write` changed, and tag it."""
        self.git("commit", "--quiet", "--all", "--message", f"Release {self.version}")
        self.git("tag", "--annotate", f"v{self.version}", "--message", f"tokenbus {self.version}")

    def build(self) -> list[str]:
        """Build sdist and wheel into dist/; return their names. Raises RuntimeError if they have another version."""
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
        subprocess.run(command, cwd=self.root, check=True, stdout=subprocess.DEVNULL)
        built = sorted(path.name for path in (self.root / "dist").glob(f"tokenbus-{self.version}*"))
        if len(built) != 2:
            raise RuntimeError(f"dist/ has {built} of version {self.version}, not a wheel and an sdist")
        return built


def problems(release: Release) -> list[str]:
    """What keeps the release from being made."""
    found: list[str] = []
    if not _VERSION.fullmatch(release.version):
        return [f"version {release.version!r} is not of the form 1.2.3, 1.2.3rc1"]
    if (branch := release.git("branch", "--show-current")) != BRANCH:
        found.append(f"the branch is {branch or 'none'}, not {BRANCH}")
    if changed := release.git("status", "--porcelain"):
        found.append(
            f"the tree is not clean: {', '.join(line.split(maxsplit=1)[1] for line in changed.splitlines()[:5])}"
        )
    tags = [tag[1:] for tag in release.git("tag", "--list", "v*").split() if _VERSION.fullmatch(tag[1:])]
    if later := [tag for tag in tags if _order(tag) >= _order(release.version)]:
        found.append(f"v{max(later, key=_order)} is tagged already")
    if not release.section(""):
        found.append(f"CHANGELOG.md has nothing under {UNRELEASED!r}")
    elif not release.section(OPERATOR):
        found.append(f"CHANGELOG.md has no section {OPERATOR!r} under {UNRELEASED!r}; write 'Nothing.' if so it is")
    return found


def _order(version: str) -> tuple[int, int, int, str, int]:
    parts = _VERSION.fullmatch(version)
    assert parts
    major, minor, patch, kind, number = parts.groups()
    return int(major), int(minor), int(patch), kind or "z", int(number or 0)


def _for_npm(version: str) -> str:
    parts = _VERSION.fullmatch(version)
    assert parts
    return f"{parts[1]}.{parts[2]}.{parts[3]}" + (f"-{parts[4]}.{parts[5]}" if parts[4] else "")


def _set_version(path: Path, version: str) -> None:
    package = json.loads(path.read_text(encoding="utf-8"))
    package["version"] = version
    if "packages" in package:
        package["packages"][""]["version"] = version
    path.write_text(json.dumps(package, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _replace(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path}: {before!r}"
    path.write_text(text.replace(before, after), encoding="utf-8")
