"""Keeps the secrets of a process out of all that leaves it: the bus, logs, blobs, and what a model is told.

Only the process knows its secrets, so only it can look for them; once a provider has echoed a key onto the bus
(``Incorrect API key provided: sk-…``) nobody downstream can tell it from text.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from tokenbus.bus.server.url import parse_url
from tokenbus.errors import SettingsError
from tokenbus.providers import registry
from tokenbus_services.redaction.heads import heads_of
from tokenbus_services.redaction.spellings import LONGEST_ESCAPE, Layers, marks, needles, open_escape
from tokenbus_services.settings import HttpTool, McpHttp, McpStdio, Settings

MARK = "[redacted]"
_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SHORTEST = 6
"""A shorter value is no secret, and would be found in any text."""
_MOST_LEARNED = 16
"""Of the keys and tokens that follow one another so many are remembered: an answer may tell one that was replaced."""
_TELLING_CHARS, _TELLING_PART = 12, 0.5
"""The beginning of a secret that is so long is not let out either, where its rest does not come."""


class Redaction:
    """Replaces these values with `MARK`, in every spelling in which JSON, an URL, HTML or base64 may hold them (see
    `redaction.spellings`).

    Data without an escape of one of their characters costs a search for a few fixed texts.
    """

    def __init__(self, values: Iterable[str] = (), *, most_learned: int = _MOST_LEARNED) -> None:
        self._own = _secrets_among(values)
        self._learned: dict[str, None] = {}
        self._most_learned = most_learned
        self._look_for({*self._own})

    def learn(self, values: Iterable[str]) -> None:
        """Look for these too, from now on; streams that are open as well. Of those learned the last ones count."""
        if new := [value for value in _secrets_among(values) if value not in self._own and value not in self._learned]:
            self._learned.update(dict.fromkeys(new))
            while len(self._learned) > self._most_learned:
                del self._learned[next(iter(self._learned))]
            self._look_for({*self._own, *self._learned})

    def _look_for(self, secrets: set[str]) -> None:
        # The longest first, so that one inside another leaves no rest.
        self._needles = sorted((n for secret in secrets for n in needles(secret)), key=len, reverse=True)
        self._any = re.compile(b"|".join(map(re.escape, self._needles)) or b"(?!)")  # of none it would match everywhere
        self._leads, self._marks = marks(self._needles)
        self._longest = max(map(len, self._needles), default=0)
        self.heads = heads_of(self._needles)
        """See `redaction.heads`."""
        self._across_lines = any("\n" in secret for secret in secrets)

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._needles)

    def __call__(self, text: str) -> str:
        """The text without the secrets."""
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
        """The bytes without the secrets."""
        if not (self._needles and self._may_hold(data)):
            return data  # as nearly always
        clean = bytearray()
        done = 0
        for begin, end in self.found(data):
            clean += data[done:begin]
            clean += MARK.encode()
            done = end
        return bytes(clean) + data[done:] if done else data

    def stream(self) -> RedactedStream:
        """For bytes that come in pieces, cut anywhere."""
        return RedactedStream(self)

    async def chunks(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """These chunks without the secrets. Raises what ``chunks`` raises."""
        stream = self.stream()
        async for chunk in chunks:
            if clean := stream.feed(chunk):
                yield clean
        if rest := stream.end():
            yield rest

    def split(self, data: bytes) -> tuple[bytes, bytes]:
        """What of ``data`` can go on, without the secrets; and its end as it came, where a secret may begin there that
        it does not hold whole."""
        if not self._needles or (data.endswith(b"\n") and not self._across_lines):
            return self.data(data), b""
        cut = self.open_at(data)
        if cut < len(data) and self._may_hold(data):
            for begin, end in self.found(data):
                if begin < cut < end:
                    cut = end + self.open_at(data[end:])
        return self.data(data[:cut]), data[cut:]

    def open_at(self, data: bytes) -> int:
        """Where the first secret begins that goes on beyond the end; the length of ``data`` where none does."""
        return self.opened(data)[0]

    def opened(self, data: bytes) -> tuple[int, int, bool]:
        """The same; how many characters of a secret are there at the most; and whether those alone must not be seen."""
        first, chars, part = self._begun(data)
        window = max(0, len(data) - self._longest * LONGEST_ESCAPE)
        if open_escape(data) < len(data) or self._marks.search(data, window):
            layers = Layers(data[window:])
            for text in layers:
                whole = open_escape(text)
                begun, chars_here, part_here = self._begun(text[:whole])
                if begun < len(text):
                    first = min(first, window + layers.begin(begun))
                    chars, part = max(chars, chars_here), max(part, part_here)
                layers.text = text[:whole]  # half an escape would be undone to something else
        return first, chars, chars >= _TELLING_CHARS and part >= _TELLING_PART

    def _begun(self, text: bytes) -> tuple[int, int, float]:
        """For text without escapes: where it begins, and how much of it is there."""
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
        """Whether an escape is there that may stand for a character of a secret."""
        end = len(data) if end is None else end
        for lead in self._leads:
            if data.find(lead, begin, end) >= 0:
                return self._marks.search(data, begin, end) is not None
        return False

    def _may_hold(self, data: bytes) -> bool:
        for needle in self._needles:
            if needle in data:
                return True
        return self.may_be_escaped(data)

    def found(self, data: bytes) -> list[tuple[int, int]]:
        """Where in the data the secrets are, in order, none inside another."""
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
    """Holds back only what may be the beginning of a secret. No secret that a header carries has a line end in it, so
    an event of a provider's stream, which ends in one, never waits."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What of it, and of what was held back, can go on; it may be nothing."""
        clean, self._held = self._redaction.split(self._held + data if self._held else data)
        return clean

    def end(self) -> bytes:
        """The rest, after which nothing comes."""
        held, self._held = self._held, b""
        at, _, telling = self._redaction.opened(held)
        return self._redaction.data(held[:at]) + MARK.encode() if telling else self._redaction.data(held)


def _secrets_among(values: Iterable[str]) -> list[str]:
    return [value for value in dict.fromkeys(map(str.strip, values)) if len(value) >= _SHORTEST]


def secrets_of(settings: Settings, env: Mapping[str, str]) -> set[str]:
    """All that a process with these settings must never let out: provider keys, what goes into headers of tools and MCP
    servers, what variables are called secret, and the server's password."""
    names = provider_key_variables(settings)
    for asked in (*settings.tools.values(), *settings.mcp.values()):
        if isinstance(asked, HttpTool | McpHttp):
            names |= {*asked.header_env.values()}
    values = named_secret(env) | {env.get(name, "") for name in names}
    for provider in settings.providers.values():
        variable = registry.get(provider.api).default_key_env if provider.api_key_env is None else provider.api_key_env
        values.update(key_in_file(provider.api_key_file or (env.get(f"{variable}_FILE") if variable else None)))
    for url in filter(None, (settings.redis_url, env.get("TOKENBUS_REDIS_URL"))):
        with suppress(SettingsError):  # whoever connects says what is wrong with it
            values.add(parse_url(url).password or "")
    return values


def key_in_file(path: str | None) -> list[str]:
    """The key in a file as it is now; whoever needs it says what is wrong with it."""
    try:
        return [Path(path).read_text(encoding="utf-8").strip()] if path else []
    except (OSError, UnicodeDecodeError):
        return []


def provider_key_variables(settings: Settings) -> frozenset[str]:
    """The variables that hold the keys of providers."""
    return frozenset(
        registry.get(p.api).default_key_env if p.api_key_env is None else p.api_key_env
        for p in settings.providers.values()
    ) - {""}


def tool_variables(settings: Settings) -> frozenset[str]:
    """The variables that HTTP tools and MCP servers are given by name."""
    names: set[str] = set()
    for asked in (*settings.tools.values(), *settings.mcp.values()):
        match asked:
            case HttpTool() | McpHttp():
                names |= {*asked.header_env.values()}
            case McpStdio():
                names |= {*asked.env_pass}
            case _:
                pass
    return frozenset(names)


def named_secret(env: Mapping[str, str]) -> set[str]:
    """The values of all variables whose name says secret."""
    return {value for name, value in env.items() if _SECRET_NAME.search(name)}


LEARNED = Redaction(most_learned=64)
"""What this process learned after its start, of all its providers: for its logs."""
