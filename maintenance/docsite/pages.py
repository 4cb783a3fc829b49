"""Gathers the pages of the site: docs/, and pages that live beside what they describe.

Links between pages are relative to the repository, so that they work in a checkout. A linked file that is no page (an
example, a settings file) is copied into the site, under `files/`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "operate/security.md",
    "clients/typescript/README.md": "guides/node.md",
    "deploy/README.md": "operate/deploy.md",
    "deploy/acl/README.md": "operate/acl.md",
    "deploy/kubernetes/README.md": "operate/kubernetes.md",
    "deploy/observability/README.md": "operate/observability.md",
}
"""Pages outside docs/, and where they stand in the site."""
INSTEAD = {"README.md": "index.md", "docs": "index.md"}
"""What the site has another page for."""
_FENCE = re.compile(r"^\s*(```|~~~)")
_LINK = re.compile(r"(?<=\])\(([^)\s]+)\)")
_CODE = re.compile(r"(`+[^`]*`+)")
_ELSEWHERE = re.compile(r"[a-z]+:|#|//")


class BrokenLink(Exception):
    """A page links to something that is not in the repository."""


def gather(root: Path, to: Path) -> None:
    """Copy every page of the repository to its place in the site. Raises BrokenLink."""
    pages = {path.relative_to(root).as_posix(): path for path in sorted((root / "docs").rglob("*.md"))}
    places = {name: name.removeprefix("docs/") for name in pages} | OUTSIDE
    for source, place in places.items():
        target = to / place
        target.parent.mkdir(parents=True, exist_ok=True)
        text = with_links((root / source).read_text(encoding="utf-8"), _Placing(root, to, places, source))
        target.write_text(text, encoding="utf-8")


def with_links(text: str, place: Callable[[str], str]) -> str:
    """The page with each relative link replaced by what `place` gives for it. Code stays as it is."""
    lines: list[str] = []
    fenced = False
    for line in text.splitlines(keepends=True):
        if _FENCE.match(line):
            fenced = not fenced
        lines.append(line if fenced else _in_line(line, place))
    return "".join(lines)


def _in_line(line: str, place: Callable[[str], str]) -> str:
    def link(match: re.Match[str]) -> str:
        return match[0] if _ELSEWHERE.match(match[1]) else f"({place(match[1])})"

    # Links may have code as their text, so code is put aside, and not what stands between.
    codes: list[str] = []

    def aside(match: re.Match[str]) -> str:
        codes.append(match[0])
        return f"\0{len(codes) - 1}\0"

    return re.sub(r"\0(\d+)\0", lambda m: codes[int(m[1])], _LINK.sub(link, _CODE.sub(aside, line)))


class _Placing:
    """Where the links of one page lead in the site."""

    def __init__(self, root: Path, to: Path, places: dict[str, str], source: str) -> None:
        self._root, self._to, self._places, self._source = root, to, places, source

    def __call__(self, link: str) -> str:
        path, mark, anchor = link.partition("#")
        name = os.path.normpath(os.path.join(os.path.dirname(self._source), path)).replace(os.sep, "/")
        place = self._places.get(name) or self._places.get(f"{name}/README.md") or INSTEAD.get(name)
        if place is None and name.startswith("docs/reference/") and name.endswith(".md"):
            place = name.removeprefix("docs/")  # written by `reference`; the check of the built site finds a wrong one
        if place is None:
            place = self._copied(name)
        if place is None:
            raise BrokenLink(f"{self._source}: {link}: no such page or file")
        here = os.path.dirname(self._places[self._source])
        return os.path.relpath(place, here or ".").replace(os.sep, "/") + mark + anchor

    def _copied(self, name: str) -> str | None:
        """The place of a file that is no page, or of a page that lists the files of a folder."""
        path = self._root / name
        if path.is_file():
            place = f"files/{name}"
            (self._to / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self._to / place)
            return place
        if not path.is_dir():
            return None
        files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if _is_source(file))
        for file in files:
            self._copied(f"{name}/{file}")
        page = self._to / "files" / name / "index.md"
        page.write_text(f"# {name}\n\n" + "".join(f"- [{file}]({file})\n" for file in files), encoding="utf-8")
        return f"files/{name}/index.md"


def _is_source(file: Path) -> bool:
    return file.is_file() and not {"__pycache__", "node_modules"}.intersection(file.parts)
