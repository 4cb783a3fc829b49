"""Finds the client behind a key: in the settings, or in Redis through a short-lived cache."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import msgspec

from tokenbus.errors import SettingsError
from tokenbus_services.gateway.keys.key import NO_ENTRY, KeyEntry, KeySecret, digest, id_of
from tokenbus_services.gateway.keys.store import KeyStore
from tokenbus_services.settings.tables.gateway import KeyRules, KeySettings

CACHE_S = 5.0
"""How long an entry of Redis is believed. A revoked key is refused within 10 s, also if the server answers slowly."""
MAX_CACHED = 10_000


class KeyDirectory:
    """The clients of a gateway."""

    def __init__(
        self, settings: Mapping[str, KeySettings], store: KeyStore, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = {name: entry_of(name, key) for name, key in settings.items()}
        self._by_digest = {secret.sha256: entry for entry in self._settings.values() for secret in entry.secrets}
        self._store = store
        self._clock = clock
        self._cache: OrderedDict[str, tuple[float, KeyEntry | None]] = OrderedDict()
        """Entries by id, with the time of reading; None for an id without an entry."""

    async def find(self, text: str) -> KeyEntry | None:
        """The client with this key; None if it is unknown, wrong, expired, revoked or no key at all.

        Raises ServerError if the key may be in Redis and the server is unavailable.
        """
        entry = self._by_digest.get(digest(text))
        if entry is None and (key_id := id_of(text)) is not None:
            entry = await self._stored(key_id)
        now_ms = time.time_ns() // 1_000_000
        return entry if (entry or NO_ENTRY).opens(text, now_ms) else None

    async def rules_of(self, key_id: str) -> KeyRules | None:
        """The rules of the client with this id, revoked or not; None if it does not exist."""
        entry = self._settings.get(key_id) or await self._stored(key_id)
        return entry and entry.rules

    async def entry(self, key_id: str) -> KeyEntry | None:
        """The client with this id, revoked or not; None if it does not exist."""
        return self._settings.get(key_id) or await self._stored(key_id)

    async def valid_rules(self, key_id: str) -> KeyRules | None:
        """The rules of the client with this id; None if none of its keys is valid.

        A client may have been let in long ago: a WebSocket sends its key once.
        """
        entry = self._settings.get(key_id) or await self._stored(key_id)
        now_ms = time.time_ns() // 1_000_000
        if entry is None or entry.revoked_ms is not None or not any(one.is_valid(now_ms) for one in entry.secrets):
            return None
        return entry.rules

    async def _stored(self, key_id: str) -> KeyEntry | None:
        asked_at = self._clock()
        if (cached := self._cache.get(key_id)) and asked_at - cached[0] < CACHE_S:
            return cached[1]
        entry = await self._store.find(key_id)
        self._cache[key_id] = asked_at, entry
        self._cache.move_to_end(key_id)
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return entry


def entry_of(name: str, settings: KeySettings) -> KeyEntry:
    hashes = (settings.sha256,) if isinstance(settings.sha256, str) else settings.sha256
    expires = settings.expires
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    expires_ms = None if expires is None else round(expires.timestamp() * 1000)
    rules = KeyRules(**{field: getattr(settings, field) for field in KeyRules.__struct_fields__})
    return KeyEntry(
        id=name, name=name, rules=rules, secrets=tuple(KeySecret(sha256=one, expires_ms=expires_ms) for one in hashes)
    )


def check_keys(settings: Mapping[str, KeySettings]) -> None:
    """Raise SettingsError for a key without a hash, and for two clients with the same one."""
    seen: dict[str, str] = {}
    for name, key in settings.items():
        entry = entry_of(name, key)
        where = f"gateway.keys.{name}"
        if not entry.secrets:
            raise SettingsError("settings", f"{where}.sha256", "no hash; `tokenbus keys create --settings` makes one")
        for secret in entry.secrets:
            if other := seen.get(secret.sha256):
                raise SettingsError("settings", f"{where}.sha256", f"the same key as gateway.keys.{other}")
            seen[secret.sha256] = name


def moment(ms: int | None) -> str | None:
    """A time of an entry as people read it."""
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")


class KeySummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What may be shown of a key: never its hash."""

    id: str
    name: str
    rules: KeyRules
    source: str
    state: str
    """``active``, ``blocked``, ``expired`` or ``revoked``."""
    keys: int
    """Key texts that are valid now."""
    created: str | None = None
    expires: str | None = None
    """Of the newest key text."""
    revoked: str | None = None


def summary(entry: KeyEntry, *, source: str, now_ms: int) -> KeySummary:
    """What may be shown of an entry."""
    valid = [secret for secret in entry.secrets if secret.is_valid(now_ms)]
    state = "revoked" if entry.revoked_ms is not None else "blocked" if entry.rules.blocked else "active"
    return KeySummary(
        id=entry.id,
        name=entry.name,
        rules=entry.rules,
        source=source,
        state=state if valid or state == "revoked" else "expired",
        keys=0 if entry.revoked_ms is not None else len(valid),
        created=moment(entry.created_ms),
        expires=moment(entry.secrets[-1].expires_ms) if entry.secrets else None,
        revoked=moment(entry.revoked_ms),
    )
