"""The README as an index page shows it. Run by hatchling when a wheel or an sdist is built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")
"""A link to a file of the repository."""
_PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)\s]+\)\n*")
"""A picture of the repository, on lines of its own."""


def for_index_page(readme: str) -> str:
    """The text with each link into the repository as its words and the file's path, and without pictures: an index
    page has no such file."""
    readme = _PICTURE.sub("", readme)
    return _LINK.sub(lambda link: link[1] if link[1] == link[2] else f"{link[1]} (`{link[2]}`)", readme)


class ReadmeHook(MetadataHookInterface):
    """Sets `project.readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index_page(readme)}
