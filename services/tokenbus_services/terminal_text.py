"""Text from elsewhere, made fit for a terminal."""

from __future__ import annotations

_VISIBLE = str.maketrans(
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys(range(128, 160), "�")
)


def safe(text: str) -> str:
    """The text without control characters but for line ends and tabs: a model, or a stranger through it, must not be
    able to move the cursor, change the title or type into the terminal. They are shown as symbols."""
    return text.translate(_VISIBLE)
