"""Runs the suite; a test that fails beside others has a second try alone, and is named.

Most tests run real processes, several tests at once. On a loaded machine one of 7,000 can miss a bound of its own that
says nothing of the code. Such a test passes alone. More failures than that are never tried again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
MOST = 12
"""More failures than this are no accident."""


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments; return its exit code, or 0 if all that failed pass alone."""
    FAILED.unlink(missing_ok=True)
    # Some machines switch the bytecode cache off. A suite that starts hundreds of interpreters would compile all of its
    # sources in each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    pytest = [sys.executable, "-m", "pytest"]
    # A process that has no test left gets half of those that wait for another one. In the default way a test of a
    # minute keeps what waits behind it, and at the end of the suite cores are idle.
    stealing = ["--dist=worksteal"] if "-n" in arguments else []
    code = subprocess.run([*pytest, *stealing, *arguments], check=False).returncode
    if code != 1 or not FAILED.exists():  # 1: all ran and some failed
        return code
    failed: list[str] = sorted(json.loads(FAILED.read_text()))
    if len(failed) > MOST:
        return code
    print(f"\nSecond try, alone: {', '.join(failed)}", flush=True)
    code = subprocess.run([*pytest, "-p", "no:xdist", *failed], check=False).returncode
    if code == 0:
        print(f"\nFailed beside others and passed alone: {', '.join(failed)}")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
