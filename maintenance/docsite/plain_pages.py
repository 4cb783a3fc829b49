"""The site for machines: each page as Markdown beside its HTML, and `llms.txt`, which lists them (llmstxt.org)."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SKIPPED = re.compile(r"#|```|~~~|\||<|!\[|- |\d+\. |---")
"""Begins of paragraphs that are no sentence about the page."""
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def write_plain_pages(config: Path, pages: Path, site: Path) -> None:
    """Copy the pages that the navigation lists into the site, and list them in its `llms.txt`."""
    project = tomllib.loads(config.read_text(encoding="utf-8"))["project"]
    text = f"# {project['site_name']}\n\n> {project['site_description']}\n"
    for section, entries in _sections(project["nav"]):
        text += f"\n## {section}\n\n"
        for title, name in entries:
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(pages / name, site / name)
            text += f"- [{title}]({name}): {first_sentence((pages / name).read_text(encoding='utf-8'))}\n"
    (site / "llms.txt").write_text(text, encoding="utf-8")


def first_sentence(page: str) -> str:
    """What the page says first of itself, on one line and without links."""
    for paragraph in page.split("\n\n"):
        if not _SKIPPED.match(paragraph.strip()) and paragraph.strip():
            said = _LINK.sub(r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.!?])\s", said, maxsplit=1)[0].rstrip(":")
    raise ValueError(f"a page without a sentence: {page[:80]!r}")


def _sections(nav: list[dict[str, Any]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The parts of the navigation, each with the titles and files of its pages."""
    for entry in nav:
        for section, content in entry.items():
            yield section, [(section, content)] if isinstance(content, str) else list(_pages(content))


def _pages(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        for title, content in entry.items():
            if isinstance(content, str):
                yield title, content
            else:
                yield from _pages(content)
