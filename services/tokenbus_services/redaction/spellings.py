"""Spellings of a secret: verbatim or in capitals; in JSON, URLs or HTML with any of its characters escaped; in
hexadecimal; and in base64.

JSON may escape any character (System.Text.Json escapes `+`), a URL any byte, and HTML any character by number or name.
Escapes are nested if JSON is put into JSON. So escapes are decoded layer by layer, and every layer is searched. Base64,
as in `Basic` authorization, has three variants of a secret, depending on the number of bytes before it. In a MIME body
it is folded into lines.
"""

from __future__ import annotations

import re
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from html.entities import html5

LAYERS = 6
"""Maximum levels of nested escapes to decode."""
LONGEST_ESCAPE = 40
HELD_CHARS = 4
"""This many characters of a secret may be emitted: they reveal nothing, and a lower limit would delay all text."""
VALUE_ENDS = rb'"(?!\s*:)'
_FOLDED = rb"(?<=[A-Za-z0-9+/_-])(?:\r\n?|\n)[ \t]{0,8}(?=[A-Za-z0-9+/=_-])"
"""A line end inside base64. Lines of PEM have 64 characters and those of MIME 76, but data may be cut anywhere."""

_ESCAPE = re.compile(
    rb"(?P<run>\\{2,})|\\u(?P<unit>[0-9a-fA-F]{4})|\\x(?P<byte>[0-9a-fA-F]{2})|\\(?P<short>[\"/bfnrt])"
    rb"|%(?P<percent>[0-9a-fA-F]{2})"
    rb"|&(?:\#0{0,12}(?P<number>[0-9]{1,7})|\#[xX]0{0,12}(?P<hex>[0-9a-fA-F]{1,6})|(?P<name>[A-Za-z]{2,24}));?"
    rb"|(?P<fold>" + _FOLDED + rb")"
)
_FOLD_AT_END = re.compile(rb"[A-Za-z0-9+/_-]\r?\n\Z")
_OPEN_ESCAPE = re.compile(
    rb"(?:\\{1,16}(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?|%[0-9a-fA-F]?|&(?:\#[xX]?[0-9a-fA-F]{0,19}|[A-Za-z]{0,24})"
    rb"|(?<=[A-Za-z0-9+/_-])(?:\r|\r?\n[ \t]{0,8}))\Z"
)
_SHORT = {b'"': b'"', b"/": b"/", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def encode(text: str) -> bytes:
    """Encode as in the environment: bytes that are not UTF-8 appear there as lone surrogates and round-trip."""
    return text.encode(errors="surrogateescape")


def needles(secret: str) -> set[bytes]:
    """The byte strings to search for after decoding escapes: the secret, its hexadecimal and its base64."""
    raw = encode(secret)
    return {raw, raw.upper(), raw.lower(), raw.hex().encode(), raw.hex().upper().encode()} | base64_of(secret)


def base64_of(secret: str) -> set[bytes]:
    """The part of the secret's base64 that does not depend on what is before and after it, in its three variants."""
    raw, found = encode(secret), set[bytes]()
    for before in range(3):
        whole = b64encode(bytes(before) + raw)
        inside = whole[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6]
        found |= {inside, inside.translate(bytes.maketrans(b"+/", b"-_"))}
    return found


def marks(needles: Collection[bytes]) -> tuple[list[bytes], re.Pattern[bytes]]:
    """A quick test for escaped secrets: literals of which one must be present, and a pattern that decides."""
    chars = {byte for needle in needles for byte in needle} | set(b"&%\\#")
    digits: dict[str, str] = {}
    for byte in sorted(chars):
        high, low = f"{byte:02x}"
        digits[high] = digits.get(high, "") + low + low.upper()
    pairs = "|".join(f"{high if high.isdigit() else f'[{high}{high.upper()}]'}[{low}]" for high, low in digits.items())
    unit = r"u" if max(chars) >= 0x80 else rf"u00(?:{pairs})"
    short = "".join(key.decode() for key, value in _SHORT.items() if value[0] in chars)
    short += r"\\" if any(b"\\" in needle for needle in needles) else ""
    leads = [b"\\u" if max(chars) >= 0x80 else b"\\u00", b"\\x", b"%", b"&"]
    leads += [b"\\" + key for key, value in _SHORT.items() if value[0] in chars]
    leads += [b"\\\\"] if r"\\" in short else []
    escapes = rf"\\(?:{unit}|x(?:{pairs})|[{short}/])|%(?:{pairs})|&[#A-Za-z]"
    return leads, re.compile(escapes.encode())


def folded_heads_of(needles: Iterable[bytes]) -> list[bytes]:
    """Of two parts of each needle, one is whole also if the needle is folded, because a line is longer than both."""
    return sorted({needle[at : at + HELD_CHARS] for needle in needles for at in (0, HELD_CHARS)})


def heads_of(needles: Iterable[bytes]) -> re.Pattern[bytes]:
    """Matches the end of a string value that may begin one of these, or the beginning of one anywhere."""
    heads = {needle[:HELD_CHARS] for needle in needles}
    return re.compile(_begun(heads) if heads else rb"(?!)")  # literals come first, which makes the search fast


def _begun(heads: set[bytes]) -> bytes:
    """The pattern of one of these, complete or cut off by the end of a value."""
    branches: list[bytes] = []
    for first in sorted({head[:1] for head in heads}):
        rests = {head[1:] for head in heads if head[:1] == first} - {b""}
        more = b"(?:" + _begun(rests) + b"|" + VALUE_ENDS + b")" if rests else b""
        branches.append(re.escape(first) + more)
    return b"|".join(branches)


class Layers:
    """Data with its escapes decoded repeatedly. Each layer can map its offsets back to the original data."""

    def __init__(self, data: bytes) -> None:
        self.text = data
        self._escapes: list[tuple[list[int], list[tuple[int, int, int]]]] = []
        """For each layer: the offsets of its decoded characters; and for each escape its begin and end in the layer
        below, and the end of its character.
        """

    def __iter__(self) -> Iterator[bytes]:
        """Yield the data, then each layer, while there are escapes."""
        for _ in range(LAYERS):
            yield self.text
            if not self._undo():
                return
        yield self.text

    def begin(self, at: int) -> int:
        """Map the begin of a byte in the current layer to an offset in the data."""
        for begins, escapes in reversed(self._escapes):
            if n := bisect_right(begins, at):
                begin, end, end_here = escapes[n - 1]
                at = begin if at < end_here else end + at - end_here
        return at

    def end(self, at: int) -> int:
        """Map the end of the byte before this offset to an offset in the data."""
        for begins, escapes in reversed(self._escapes):
            if n := bisect_right(begins, at - 1):
                _, end, end_here = escapes[n - 1]
                at = end + max(0, at - end_here)
        return at

    def _undo(self) -> bool:
        begins: list[int] = []
        escapes: list[tuple[int, int, int]] = []
        pieces: list[bytes] = []
        done = size = 0
        for found in _ESCAPE.finditer(self.text):
            if (char := _undone(found)) is None:
                continue
            pieces += (self.text[done : found.start()], char)
            begins.append(size + found.start() - done)
            size = begins[-1] + len(char)
            done = found.end()
            escapes.append((found.start(), done, size))
        if not escapes:
            return False
        self.text = b"".join((*pieces, self.text[done:]))
        self._escapes.append((begins, escapes))
        return True


def open_escape(text: bytes) -> int:
    """Offset of an escape that continues beyond the end of the text; the text's length if there is none."""
    tail = max(0, len(text) - LONGEST_ESCAPE)
    found = _OPEN_ESCAPE.search(text, tail)
    return found.start() if found else len(text)


def ends_in_fold(data: bytes) -> bool:
    """Whether a line end that base64 may continue after is at the end of the data."""
    return _FOLD_AT_END.search(data, max(0, len(data) - 3)) is not None


def _undone(escape: re.Match[bytes]) -> bytes | None:
    """The bytes encoded by an escape; None if it is not a valid one."""
    digits = escape[escape.lastgroup or 0]
    match escape.lastgroup:
        case "fold":
            return b""
        case "run":
            return b"\\"
        case "byte" | "percent":
            return bytes.fromhex(digits.decode())
        case "short":
            return _SHORT[digits]
        case "name":
            char = html5.get(f"{digits.decode()};")
            return char.encode() if char else None
        case kind:
            number = int(digits, 10 if kind == "number" else 16)
            return chr(number).encode(errors="surrogatepass") if 0 < number < 0x110000 else None
