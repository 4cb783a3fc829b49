"""Text from elsewhere, made fit for a terminal."""

from __future__ import annotations

import re
import unicodedata

_OVERRIDES = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""They reorder what is shown, beyond the text that they are in (https://trojansource.codes)."""
_SAFE = str.maketrans(
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys((*range(128, 160), 0x2028, 0x2029, *_OVERRIDES), "�")
)
_HIDDEN = ("Cf", "Zl", "Zp")
"""Categories of characters that are not seen, and change how others are shown."""
_C1 = re.compile(rb"\xc2([\x80-\x9f])")


def safe(text: str) -> str:
    """The text without control characters but for line ends and tabs: a model, or a stranger through it, must not be
    able to move the cursor, change the title, reorder a line or type into the terminal. They are shown as symbols.
    """
    return text.translate(_SAFE)


def visible(text: str) -> str:
    """The text with characters that hide or reorder others written as in JSON, so that what is read is what runs."""
    return "".join(_escaped(each) if unicodedata.category(each) in _HIDDEN else each for each in text)


def in_one_line(text: str) -> str:
    """As `visible`, with line ends and tabs as in JSON: a text makes no rows of its own in a table."""
    return visible(text).replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")


def safe_json(data: bytes) -> bytes:
    """The same JSON without control characters of a terminal, which JSON allows in strings from U+0080 on."""
    return _C1.sub(lambda found: b"\\u00%02x" % ord(found[1]), data)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
