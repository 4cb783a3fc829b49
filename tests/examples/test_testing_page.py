"""docs/guides/testing.md: its code runs unchanged, as a user's own test suite."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "testing.md"
BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)


def test_the_tests_that_the_page_shows_pass_as_they_are(tmp_path: Path) -> None:
    for name, code in BLOCK.findall(PAGE.read_text()):
        (tmp_path / name).write_text(code)
    assert len(list(tmp_path.glob("test_*.py"))) == 4
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
