"""How the site is built: links of pages are carried over, every page is in the navigation, broken links are found."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maintenance.docsite.links import problems
from maintenance.docsite.pages import OUTSIDE, BrokenLink, gather, with_links
from maintenance.docsite.plain_pages import write_plain_pages
from maintenance.docsite.reference import generated
from tests.unit.docs.pages import ROOT


def page(links: str) -> str:
    return f'<html><body><h1 id="top">Hi</h1>{links}</body></html>'


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<a href="other.html#there">', None),
        ('<a href="#top">', None),
        ('<a href="folder/">', None),
        ('<a href="https://example.org/nowhere">', None),
        ('<link rel="canonical" href="https://example.org/">', None),
        ('<a href="gone.html">', "gone.html: no such page or file"),
        ('<a href="other.html#gone">', "other.html#gone: no such anchor"),
        ('<a href="#gone">', "#gone: no such anchor"),
        ('<img src="gone.png">', "gone.png: no such page or file"),
        (
            '<script src="https://cdn.example.org/x.js"></script>',
            "loads https://cdn.example.org/x.js from another site",
        ),
        ('<link rel="stylesheet" href="//fonts.example.org/f">', "loads //fonts.example.org/f from another site"),
    ],
)
def test_a_broken_link_and_a_foreign_file_are_found(tmp_path: Path, html: str, problem: str | None) -> None:
    (tmp_path / "index.html").write_text(page(html))
    (tmp_path / "other.html").write_text(page('<p id="there">'))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "index.html").write_text(page(""))
    assert problems(tmp_path) == ([f"index.html: {problem}"] if problem else [])


def test_links_are_carried_over_and_code_is_not() -> None:
    text = "[a](x.md) [`b`](y.md#z) `[c](x.md)` [d](https://e.org) [e](#here)\n```\n[f](x.md)\n```\n[g](x.md)\n"
    moved = (
        "[a](to/x.md) [`b`](to/y.md#z) `[c](x.md)` [d](https://e.org) [e](#here)\n```\n[f](x.md)\n```\n[g](to/x.md)\n"
    )
    assert with_links(text, lambda link: f"to/{link}") == moved


def test_a_page_that_links_to_nothing_is_an_error(tmp_path: Path) -> None:
    for name in OUTSIDE:
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / name).write_text("")
    (tmp_path / "from" / "docs").mkdir()
    (tmp_path / "from" / "docs" / "index.md").write_text("[gone](gone.md)")
    with pytest.raises(BrokenLink, match=r"docs/index\.md: gone\.md"):
        gather(tmp_path / "from", tmp_path / "to")


def navigation(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from navigation(target)


def test_every_page_is_in_the_navigation_once() -> None:
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages = {name for name in written if not name.startswith("examples/")} | set(OUTSIDE.values()) | set(generated())
    listed = list(navigation(tomllib.loads((ROOT / "maintenance/docsite/zensical.toml").read_text())["project"]["nav"]))
    assert sorted(listed) == sorted(pages)


def test_machines_get_each_page_as_markdown_and_a_list_of_them_all(tmp_path: Path) -> None:
    config = ROOT / "maintenance/docsite/zensical.toml"
    listed = list(navigation(tomllib.loads(config.read_text())["project"]["nav"]))
    for name in listed:
        (tmp_path / "pages" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pages" / name).write_text("# Title\n\n![picture](a.png)\n\nWhat [it](b.md) does.\nMore.\n")
    write_plain_pages(config, tmp_path / "pages", tmp_path / "site")
    text = (tmp_path / "site" / "llms.txt").read_text()
    assert re.findall(r"^- \[.+\]\((.+)\): What it does\.$", text, re.M) == listed
    assert all((tmp_path / "site" / name).is_file() for name in listed)


def test_no_generated_page_shows_an_object_by_its_address() -> None:
    assert {name for name, text in generated().items() if " at 0x" in text} == set()
