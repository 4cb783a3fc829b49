"""Keeps a process's secrets out of everything that leaves it: the bus, logs, blobs and model input.

Only the process knows its secrets, so only it can find them. Once a provider has echoed a key onto the bus (``Incorrect
API key provided: sk-…``), nothing downstream can distinguish it from text.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from tokenbus.bus.server.url import URL_FILE_ENV, parse_url
from tokenbus.errors import SettingsError
from tokenbus.providers import registry
from tokenbus.secret_env import FILE
from tokenbus_services.redaction.spellings import (
    LONGEST_ESCAPE,
    Layers,
    base64_of,
    ends_in_fold,
    folded_heads_of,
    heads_of,
    marks,
    needles,
    open_escape,
)
from tokenbus_services.settings import HttpTool, McpHttp, McpStdio, Settings

MARK = "[redacted]"
_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SHORTEST = 6
"""Shorter values are not treated as secrets; they would match ordinary text."""
_LONGEST_IN_FILE = 4096
"""A longer file, or one of several lines, is a certificate or the like, which nothing repeats."""
_MOST_LEARNED = 16
"""How many rotated keys and tokens to remember: a response may contain one that was just replaced."""
_TELLING_CHARS, _TELLING_PART = 12, 0.5
"""A prefix of at least this length and fraction is redacted too, even if the rest never arrives."""


class Redaction:
    """Replaces secrets with `MARK` in every spelling that JSON, URLs, HTML or base64 may use (see
    `redaction.spellings`).

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
        """Matches where a secret may begin (`spellings.heads_of`)."""
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
        if data.find(b"\\n", begin, end) < 0 and not -1 < data.find(b"\n", begin, end) < end - 2:
            return False  # no line end within
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
        """Return the rest at the end of the stream."""
        held, self._held = self._held, b""
        at, _, telling = self._redaction.opened(held)
        return self._redaction.data(held[:at]) + MARK.encode() if telling else self._redaction.data(held)


def _secrets_among(values: Iterable[str]) -> list[str]:
    return [value for value in dict.fromkeys(map(str.strip, values)) if len(value) >= _SHORTEST]


def secrets_of(settings: Settings, env: Mapping[str, str]) -> set[str]:
    """All secrets of a process with these settings: provider keys, header values of tools and MCP servers, variables
    with secret names, and the server's password.
    """
    names = provider_key_variables(settings)
    for tool in (*settings.tools.values(), *settings.mcp.values()):
        if isinstance(tool, HttpTool | McpHttp):
            names |= {*tool.header_env.values()}
        if isinstance(tool, HttpTool) and tool.signing_env:
            names |= {tool.signing_env}
    values = named_secret(env) | {env.get(name, "") for name in names}
    for name in names:
        values.update(key_in_file(env.get(f"{name}{FILE}")))
    for provider in settings.providers.values():
        variable = registry.get(provider.api).default_key_env if provider.api_key_env is None else provider.api_key_env
        values.update(key_in_file(provider.api_key_file or (env.get(f"{variable}{FILE}") if variable else None)))
    values.update(key_in_file(env.get(URL_FILE_ENV)))
    for url in filter(None, (settings.redis_url, env.get("TOKENBUS_REDIS_URL"))):
        with suppress(SettingsError):  # reported when connecting
            values.add(parse_url(url).password or "")
    return values


def key_in_file(path: str | None) -> list[str]:
    """The current key in a file; empty if unreadable, which is reported where the key is needed."""
    try:
        return [Path(path).read_text(encoding="utf-8").strip()] if path else []
    except (OSError, UnicodeDecodeError):
        return []


def provider_key_variables(settings: Settings) -> frozenset[str]:
    """The environment variables that hold provider keys."""
    return frozenset(
        registry.get(p.api).default_key_env if p.api_key_env is None else p.api_key_env
        for p in settings.providers.values()
    ) - {""}


def tool_variables(settings: Settings) -> frozenset[str]:
    """The environment variables passed by name to HTTP tools and MCP servers."""
    names: set[str] = set()
    for tool in (*settings.tools.values(), *settings.mcp.values()):
        match tool:
            case HttpTool():
                names |= {*tool.header_env.values(), *filter(None, [tool.signing_env])}
            case McpHttp():
                names |= {*tool.header_env.values()}
            case McpStdio():
                names |= {*tool.env_pass}
            case _:
                pass
    return frozenset(names)


def named_secret(env: Mapping[str, str]) -> set[str]:
    """The values of all variables with a secret-sounding name; of one that ends in `_FILE`, what its file holds."""
    names = {name for name in env if _SECRET_NAME.search(name)}
    values = {env[name] for name in names if not name.endswith(FILE)}
    for name in names:
        if name.endswith(FILE):
            values.update(v for v in key_in_file(env[name]) if len(v) <= _LONGEST_IN_FILE and "\n" not in v)
    return values


LEARNED = Redaction(most_learned=64)
"""Secrets learned by this process after its start, of all providers; used for its logs."""
