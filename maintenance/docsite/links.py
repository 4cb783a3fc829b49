"""Checks a built site: every link and anchor inside it leads somewhere, and no page loads anything from elsewhere.

zensical warns about pages and anchors that Markdown links name. This also covers files, the navigation and what
templates write. Addresses of other sites are not fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
"""Where a page names what a browser loads by itself."""
PASSIVE = {"canonical", "prev", "next", "alternate"}
"""Relations of a `link` that a browser does not load."""


class _Page(HTMLParser):
    """The links, anchors and loaded files of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        for name in ("href", "src"):
            if name not in values:
                continue
            self.links.append(values[name])
            if (tag, name) in LOADS and values.get("rel") not in PASSIVE:
                self.loads.append(values[name])


def problems(site: Path) -> list[str]:
    """One line for each link that leads nowhere and each file of another site that a page loads."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    return [
        f"{path.relative_to(site.resolve())}: {problem}"
        for path, page in pages.items()
        if path.name != "404.html"  # its links begin at the root of a server
        for problem in _of_page(path, page, pages)
    ]


def _of_page(path: Path, page: _Page, pages: dict[Path, _Page]) -> Iterator[str]:
    for link in page.loads:
        if urlsplit(link).netloc:
            yield f"loads {link} from another site"
    for link in dict.fromkeys(page.links):
        at = urlsplit(link)
        if at.scheme or at.netloc:
            continue
        target = (path.parent / unquote(at.path)).resolve() if at.path else path
        if target.is_dir():
            target /= "index.html"
        if not target.is_file():
            yield f"{link}: no such page or file"
        elif at.fragment and target in pages and unquote(at.fragment) not in pages[target].anchors | {"__top"}:
            yield f"{link}: no such anchor"
