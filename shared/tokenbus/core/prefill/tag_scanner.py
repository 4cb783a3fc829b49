"""Find tags in streamed text: complete ones, and prefixes that may become one.

A tag is ``<name attributes>``, ``<name attributes/>`` or ``</name>``, of at most `MAX_TAG` characters; attributes are
``name="value"`` or ``name='value'``, the value without ``<`` and ``>``; whitespace may precede the ``>``. A tag never
contains a second ``<``, so only the last ``<`` of a text can start an incomplete one. Every search is linear: the
quantifiers are possessive, and no match extends past the next ``<``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from tokenbus.providers.request.participants import PREFIX

BLANKS = " \t\r\n"
MAX_TAG = 256
"""Maximum characters of a tag, and so of held-back text."""

_BLANK = r"[ \t\r\n]"
_NAME = r"[A-Za-z_:][A-Za-z0-9_:.-]*+"
_ATTRIBUTE = rf"""{_BLANK}++{_NAME}=(?:"[^"<>]*+"|'[^'<>]*+')"""
_BEGUN_ATTRIBUTE = rf"""{_BLANK}++(?:{_NAME}(?:=(?:"[^"<>]*+|'[^'<>]*+)?)?)?"""
_attribute = re.compile(rf"""{_BLANK}++({_NAME})=(?:"([^"<>]*+)"|'([^'<>]*+)')""")


def both(*names: str) -> tuple[str, ...]:
    """Each name with and without the prefix."""
    return tuple(spelling for name in names for spelling in (name, PREFIX + name))


def plain(spelling: str) -> str:
    """The name without its prefix."""
    return spelling.removeprefix(PREFIX)


def attribute(attributes: str, name: str) -> str | None:
    """Value of the first attribute with this name."""
    for found in _attribute.finditer(attributes):
        if found[1] == name:
            return found[2] if found[2] is not None else found[3]
    return None


class Tag:
    """A tag and its position: either ``opens`` or ``closes`` is set, to its name as spelled."""

    __slots__ = ("alone", "attributes", "closes", "end", "opens", "start")

    def __init__(self, found: re.Match[str]) -> None:
        self.start, self.end = found.span()
        self.opens: str = found[1] or ""
        self.attributes: str = found[2] or ""
        self.alone: bool = found[3] == "/"
        """``<name/>``: opens and closes."""
        self.closes: str = found[4] or ""


class TagMarks:
    """The tags that are markup at one place of the grammar; anything else there is content."""

    def __init__(self, opens: Iterable[str], closes: Iterable[str]) -> None:
        opening, closing = _any_of(opens), _any_of(closes)
        self._tag = re.compile(rf"<(?:({opening})((?:{_ATTRIBUTE})*+){_BLANK}*+(/?)|/({closing}){_BLANK}*+)>")
        self._begun = re.compile(
            rf"<(?:(?:{opening})(?:{_ATTRIBUTE})*+(?:{_BEGUN_ATTRIBUTE}|{_BLANK}*+/)?|/(?:{closing}){_BLANK}*+)"
        )
        whole = [*(f"<{name}" for name in opens), *(f"</{name}" for name in closes)]
        self._beginnings = {name[:size] for name in whole for size in range(1, len(name) + 1)}

    def find(self, text: str, start: int) -> Tag | None:
        """The first complete tag from ``start``; tags longer than `MAX_TAG` are ignored."""
        while found := self._tag.search(text, start):
            if found.end() - found.start() <= MAX_TAG:
                return Tag(found)
            start = found.end()
        return None

    def held_from(self, text: str, start: int) -> int:
        """Where an incomplete tag at the end of the text begins; the text's length if there is no such tag."""
        at = text.rfind("<", start)
        if at < 0 or len(text) - at >= MAX_TAG:
            return len(text)
        tail = text[at:]
        return at if tail in self._beginnings or self._begun.fullmatch(tail) else len(text)


@lru_cache(256)
def marks(opens: tuple[str, ...], closes: tuple[str, ...]) -> TagMarks:
    """The marks for these spellings (cached)."""
    return TagMarks(opens, closes)


def _any_of(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in names) or "(?!)"
