"""Keeps a process's secrets out of everything that leaves it: the bus, logs, blobs and model input.

Only the process knows its secrets, so only it can find them. Once a provider has echoed a key onto the bus (``Incorrect
API key provided: sk-…``), nothing downstream can distinguish it from text.
"""

from __future__ import annotations

import re
from base64 import b64encode
from bisect import bisect_right
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Iterator
from html.entities import html5

# Spellings of a secret: verbatim or in capitals; in JSON, URLs or HTML with any of its characters escaped; in
# hexadecimal; and in base64.
#
# JSON may escape any character (System.Text.Json escapes `+`), a URL any byte, and HTML any character by number or
# name. Escapes are nested if JSON is put into JSON. So escapes are decoded layer by layer, and every layer is searched.
# Base64, as in `Basic` authorization, has three variants of a secret, depending on the number of bytes before it. In a
# MIME body it is folded into lines.

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
_LINE_ENDS = (b"\\n", b"\\r", b"\n", b"\r")
"""Each alone: data may be cut between a carriage return and its line feed."""
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
    for byte in sorted(chars | {*b"\r\n"}):  # base64 may be folded by escaped line ends
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


MARK = "[redacted]"
_SHORTEST = 6
"""Shorter values are not treated as secrets; they would match ordinary text."""
_MOST_LEARNED = 16
"""How many rotated keys and tokens to remember: a response may contain one that was just replaced."""
_TELLING_CHARS, _TELLING_PART = 12, 0.5
"""A prefix of at least this length and fraction is redacted too, even if the rest never arrives."""


class Redaction:
    """Replaces secrets with `MARK` in every spelling that JSON, URLs, HTML or base64 may use (see
    `heads_of`).

    Data without escapes of a secret's characters costs only a search for a few fixed strings.
    """

    def __init__(self, values: Iterable[str] = (), *, most_learned: int = _MOST_LEARNED) -> None:
        self._own = _secrets_among(values)
        self._learned: dict[str, None] = {}
        self._most_learned = most_learned
        self._look_for({*self._own})

    def learn(self, values: Iterable[str]) -> None:
        """Add secrets, also for streams already open. Only the latest ones learned are kept."""
        if new := [value for value in _secrets_among(values) if value not in self._own and value not in self._learned]:
            self._learned.update(dict.fromkeys(new))
            while len(self._learned) > self._most_learned:
                del self._learned[next(iter(self._learned))]
            self._look_for({*self._own, *self._learned})

    def _look_for(self, secrets: set[str]) -> None:
        # Longest first, so that a secret inside another leaves nothing behind.
        self._needles = sorted((n for secret in secrets for n in needles(secret)), key=len, reverse=True)
        # an empty pattern would match everywhere
        self._any = re.compile(b"|".join(map(re.escape, self._needles)) or b"(?!)")
        self._leads, self._marks = marks(self._needles)
        self._longest = max(map(len, self._needles), default=0)
        self.heads = heads_of(self._needles)
        """Matches where a secret may begin (`heads_of`)."""
        self._folded_heads = folded_heads_of(part for secret in secrets for part in base64_of(secret))
        self._across_lines = any("\n" in secret for secret in secrets)

    def __bool__(self) -> bool:
        """Whether there are any secrets."""
        return bool(self._needles)

    def __call__(self, text: str) -> str:
        """Remove the secrets from a text."""
        if not self._needles:
            return text
        errors = "surrogateescape"
        try:
            data = text.encode(errors=errors)
        except UnicodeEncodeError:
            errors = "surrogatepass"
            data = text.encode(errors=errors)
        clean = self.data(data)
        return text if clean is data else clean.decode(errors=errors)

    def data(self, data: bytes) -> bytes:
        """Remove the secrets from bytes."""
        if not (self._needles and self._may_hold(data)):
            return data  # the usual case
        clean = bytearray()
        done = 0
        for begin, end in self.found(data):
            clean += data[done:begin]
            clean += MARK.encode()
            done = end
        return bytes(clean) + data[done:] if done else data

    def stream(self) -> RedactedStream:
        """For bytes that arrive in arbitrary chunks."""
        return RedactedStream(self)

    async def chunks(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """Remove the secrets from chunks. Raises any exception of ``chunks``."""
        stream = self.stream()
        async for chunk in chunks:
            if clean := stream.feed(chunk):
                yield clean
        if rest := stream.end():
            yield rest

    def split(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the redacted part of ``data`` that can be emitted, and the raw end that may be an incomplete
        secret.
        """
        if not self._needles:
            return data, b""
        if data.endswith(b"\n") and not self._across_lines and not ends_in_fold(data):
            return self.data(data), b""
        cut = self.open_at(data)
        if cut < len(data) and self._may_hold(data):
            for begin, end in self.found(data):
                if begin < cut < end:
                    cut = end + self.open_at(data[end:])
        return self.data(data[:cut]), data[cut:]

    def open_at(self, data: bytes) -> int:
        """Offset of the first secret that continues beyond the end; the length of ``data`` if there is none."""
        return self.opened(data)[0]

    def opened(self, data: bytes) -> tuple[int, int, bool]:
        """Like `open_at`; also the number of secret characters present, and whether that part alone must be
        redacted.
        """
        first, chars, part = self._begun(data)
        window = max(0, len(data) - self._longest * LONGEST_ESCAPE)
        if open_escape(data) < len(data) or self.may_be_escaped(data, window):
            layers = Layers(data[window:])
            for text in layers:
                whole = open_escape(text)
                begun, chars_here, part_here = self._begun(text[:whole])
                # An open escape may be a secret's first character; a line end may only follow it.
                if begun < (whole if text[whole : whole + 1] in (b"\r", b"\n") else len(text)):
                    first = min(first, window + layers.begin(begun))
                    chars, part = max(chars, chars_here), max(part, part_here)
                layers.text = text[:whole]  # half an escape would decode to something else
        return first, chars, chars >= _TELLING_CHARS and part >= _TELLING_PART

    def _begun(self, text: bytes) -> tuple[int, int, float]:
        """For text without escapes: offset and matched fraction of an incomplete secret at the end."""
        first = len(text)
        part = 0.0
        for needle in self._needles:
            head = needle[:1]
            at = text.find(head, max(0, len(text) - len(needle) + 1))
            while at >= 0:
                if needle.startswith(text[at:]):
                    first = min(first, at)
                    part = max(part, (len(text) - at) / len(needle))
                    break
                at = text.find(head, at + 1)
        return first, len(text) - first, part

    def may_be_escaped(self, data: bytes, begin: int = 0, end: int | None = None) -> bool:
        """Whether there is an escape that may encode a character of a secret."""
        end = len(data) if end is None else end
        for lead in self._leads:
            if data.find(lead, begin, end) >= 0:
                if self._marks.search(data, begin, end):
                    return True
                break
        while end > begin and data[end - 1] in b"\r\n":
            end -= 1
        if all(data.find(line_end, begin, end) < 0 for line_end in _LINE_ENDS):
            return False  # none within
        return any(data.find(head, begin, end) >= 0 for head in self._folded_heads)

    def _may_hold(self, data: bytes) -> bool:
        if self.heads.search(data):
            for needle in self._needles:
                if needle in data:
                    return True
        return self.may_be_escaped(data)

    def found(self, data: bytes) -> list[tuple[int, int]]:
        """Spans of the secrets in the data, in order and without overlap."""
        layers = Layers(data)
        found: list[tuple[int, int]] = []
        for text in layers:
            found += [(layers.begin(match.start()), layers.end(match.end())) for match in self._any.finditer(text)]
        joined: list[tuple[int, int]] = []
        for begin, end in sorted(found):
            if joined and begin < joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((begin, end))
        return joined


class RedactedStream:
    """Redacts a stream, holding back only a possible beginning of a secret.

    Secrets sent in headers contain no line end, so a provider event, which ends in one, is never held back.
    """

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Add data. Return what can be emitted, which may be empty."""
        clean, self._held = self._redaction.split(self._held + data if self._held else data)
        return clean

    def end(self) -> bytes:
        held, self._held = self._held, b""
        at, _, telling = self._redaction.opened(held)
        return self._redaction.data(held[:at]) + MARK.encode() if telling else self._redaction.data(held)


def _secrets_among(values: Iterable[str]) -> list[str]:
    return [value for value in dict.fromkeys(map(str.strip, values)) if len(value) >= _SHORTEST]


LEARNED = Redaction(most_learned=64)
"""Secrets learned by this process after its start, of all providers; used for its logs."""
