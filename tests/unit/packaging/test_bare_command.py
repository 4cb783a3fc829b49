"""The command with only the light client installed, the README of an index page, and install instructions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from maintenance.build_hook import for_index_page

ROOT = Path(__file__).parents[3]

_RUN = """
import sys
from importlib.abc import MetaPathFinder

class NoServices(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"click", "rich", "uvicorn", "httpx"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoServices())
from tokenbus_services.cli.entry import main
main(["demo"])
"""

UNPUBLISHED = re.compile(r"(?:pip|pipx|uv|uvx|uv tool|uv pip) (?:install|run|add)? ?['\"]?tokenbus\b(?![-/.])")
UNPUBLISHED_ON_NPM = re.compile(
    r"\b(?:npm (?:install|i|add)|npx|yarn add|pnpm add)\b[^`\n]*(?:@tokenbus/|\btokenbus\b)"
)
"""Match an instruction to install the name from an index, where anyone could register it."""

TEXTS = ("*.md", "docs/**/*.*", "deploy/**/*.md", "clients/*/README.md", "shared/**/*.py", "services/**/*.py")


def test_the_bare_command_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", _RUN], capture_output=True, text=True, check=False)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("error: ")
    assert "extra `services`" in line
    assert "'click' is not installed" in line


def test_no_text_names_an_unpublished_package_to_install() -> None:
    assert UNPUBLISHED.search("pip install 'tokenbus[embedded]'")
    assert UNPUBLISHED.search("uv add tokenbus")
    assert UNPUBLISHED_ON_NPM.search("npm install ws @tokenbus/client")
    telling = [
        path.relative_to(ROOT).as_posix()
        for glob in TEXTS
        for path in ROOT.glob(glob)
        if path.is_file()
        for pattern in (UNPUBLISHED, UNPUBLISHED_ON_NPM)
        if pattern.search(path.read_text(errors="replace"))
    ]
    assert not telling


def test_the_readme_of_an_index_page_has_no_link_that_dies_there() -> None:
    shown = for_index_page((ROOT / "README.md").read_text())
    assert not re.findall(r"\]\((?!https?:|#)", shown)
    assert for_index_page("See [the guide](docs/a.md), [b.md](b.md), [x](https://x.y).") == (
        "See the guide (`docs/a.md`), b.md, [x](https://x.y)."
    )
    assert for_index_page("One.\n\n![a picture](docs/a.png)\n\nTwo.") == "One.\n\nTwo."
