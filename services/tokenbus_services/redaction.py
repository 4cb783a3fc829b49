"""Keeps the secrets of a process out of all that leaves it: the bus, logs, blobs, and what a model is told.

Only the process knows its secrets, so only it can look for them; once a provider has echoed a key onto the bus
(``Incorrect API key provided: sk-…``) nobody downstream can tell it from text.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import suppress
from urllib.parse import quote

from tokenbus.bus.url import parse_url
from tokenbus.errors import SettingsError
from tokenbus.providers import registry
from tokenbus_services.settings import HttpTool, McpHttp, Settings

MARK = "[redacted]"
_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SHORTEST = 6
"""A shorter value is no secret, and would be found in any text."""


class Redaction:
    """Replaces these values with `MARK`, in each spelling in which JSON or an url may hold them."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        spelled = {s for value in map(str.strip, values) if len(value) >= _SHORTEST for s in _spellings(value)}
        # The longest first, so that one inside another leaves no rest.
        self._spelled = sorted(spelled, key=len, reverse=True)
        self._text = re.compile("|".join(map(re.escape, self._spelled))) if spelled else None
        self._bytes = re.compile(_encode(self._text.pattern)) if self._text else None
        self._encoded = [_encode(s) for s in self._spelled]
        self._across_lines = any("\n" in s for s in self._spelled)

    def __call__(self, text: str) -> str:
        """The text without the secrets."""
        return self._text.sub(MARK, text) if self._text else text

    def data(self, data: bytes) -> bytes:
        """The bytes without the secrets."""
        if self._bytes is None or not self._bytes.search(data):
            return data  # as nearly always; to look costs a third of what to replace nothing does
        return self._bytes.sub(MARK.encode(), data)

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
        if self._bytes is None or (data.endswith(b"\n") and not self._across_lines):
            return self.data(data), b""
        cut = self._open_at(data)
        if cut < len(data):
            for whole in self._bytes.finditer(data):
                if whole.start() < cut < whole.end():
                    cut = whole.end() + self._open_at(data[whole.end() :])
        return self.data(data[:cut]), data[cut:]

    def _open_at(self, data: bytes) -> int:
        """Where the first secret begins that goes on beyond the end; the length of ``data`` where none does."""
        first = len(data)
        for secret in self._encoded:
            at = data.find(secret[:1], max(0, len(data) - len(secret) + 1))
            while 0 <= at < first:
                if secret.startswith(data[at:]):
                    first = at
                else:
                    at = data.find(secret[:1], at + 1)
        return first


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
        return self._redaction.data(held)


def secrets_of(settings: Settings, env: Mapping[str, str]) -> set[str]:
    """All that a process with these settings must never let out: provider keys, what goes into headers of tools and MCP
    servers, what variables are called secret, and the server's password."""
    names = [
        registry.get(p.api).default_key_env if p.api_key_env is None else p.api_key_env
        for p in settings.providers.values()
    ]
    for asked in (*settings.tools.values(), *settings.mcp.values()):
        if isinstance(asked, HttpTool | McpHttp):
            names += asked.header_env.values()
    values = named_secret(env) | {env.get(name, "") for name in names}
    for url in filter(None, (settings.redis_url, env.get("TOKENBUS_REDIS_URL"))):
        with suppress(SettingsError):  # whoever connects says what is wrong with it
            values.add(parse_url(url).password or "")
    return values


def named_secret(env: Mapping[str, str]) -> set[str]:
    """The values of all variables whose name says secret."""
    return {value for name, value in env.items() if _SECRET_NAME.search(name)}


def _spellings(value: str) -> set[str]:
    escaped = json.dumps(value)[1:-1]
    plain = json.dumps(value, ensure_ascii=False)[1:-1]
    return {value, escaped, plain, escaped.replace("/", "\\/"), quote(_encode(value), safe="")}


def _encode(text: str) -> bytes:
    # What of the environment is no UTF-8 comes as half surrogate pairs, and goes back as it was.
    return text.encode(errors="surrogateescape")
