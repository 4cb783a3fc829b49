"""The pages of the reference that follow from the code. They are written at each build and are in no commit."""

from __future__ import annotations

from maintenance.docsite.reference import commands, errors, library


def generated() -> dict[str, str]:
    """Each generated page by its place in the site."""
    return {
        **{f"reference/{name}.md": text for name, text in library.pages().items()},
        "reference/commands.md": commands.page(),
        "reference/errors.md": errors.page(),
    }
