"""The keys that commands and the admin API make: one hash in Redis, an entry as JSON per key id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.gateway import put_key
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import TokenbusError
from tokenbus_services.gateway.keys.key import KeyEntry, KeySecret, NewKey, new_key
from tokenbus_services.settings.tables.gateway import KeyRules

_TRIES = 20
MAX_SECRETS = 8
"""Per entry; the oldest is dropped."""


class KeyNotFound(TokenbusError):
    code = "key_not_found"

    def __init__(self, key_id: str) -> None:
        super().__init__(
            f"no key {key_id!r} was made by a command or the admin API; those of the settings are changed there"
        )
        self.key_id = key_id


class KeyStore:
    """Reads and writes key entries. Every change compares and swaps, so that two at once lose nothing."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._key = keys.gateway_keys

    async def find(self, key_id: str) -> KeyEntry | None:
        """The entry with this id, revoked ones too."""
        stored = await self._raw(key_id)
        return None if stored is None else msgspec.json.decode(stored, type=KeyEntry)

    async def all(self) -> list[KeyEntry]:
        """All entries, oldest first."""
        with translated(self._server, self._key):
            stored: dict[bytes, bytes] = await self._server.client.hgetall(self._key)
        found = [msgspec.json.decode(one, type=KeyEntry) for one in stored.values()]
        return sorted(found, key=lambda entry: (entry.created_ms or 0, entry.id))

    async def create(self, rules: KeyRules, *, name: str = "", lifetime_s: float | None = None) -> NewKey:
        """Make a key. Its text is returned, and kept nowhere."""
        now = await self.now_ms()
        for _ in range(_TRIES):
            made = new_key()
            expires = None if lifetime_s is None else now + round(lifetime_s * 1000)
            secrets = (KeySecret(sha256=made.sha256, expires_ms=expires),)
            entry = KeyEntry(id=made.id, name=name, rules=rules, secrets=secrets, created_ms=now)
            if await self._swap(made.id, b"", entry):
                return made
        raise AssertionError("no free id among 36**8")

    async def rotate(self, key_id: str, *, grace_s: float, lifetime_s: float | None = None) -> NewKey:
        """Make a further key for an entry. The earlier ones are valid for ``grace_s`` more. Raises KeyNotFound."""
        made, now = new_key(key_id), await self.now_ms()
        last = now + round(grace_s * 1000)
        expires = None if lifetime_s is None else now + round(lifetime_s * 1000)

        def rotated(entry: KeyEntry) -> KeyEntry:
            kept = [one for one in entry.secrets if one.is_valid(now)]
            old = [msgspec.structs.replace(one, expires_ms=min(last, one.expires_ms or last)) for one in kept]
            secrets = (*old, KeySecret(sha256=made.sha256, expires_ms=expires))
            return msgspec.structs.replace(entry, secrets=secrets[-MAX_SECRETS:])

        await self.change(key_id, rotated)
        return made

    async def revoke(self, key_id: str) -> KeyEntry:
        """Refuse the key from now on; gateways notice within 10 s. Raises KeyNotFound."""
        now = await self.now_ms()
        return await self.change(
            key_id, lambda entry: msgspec.structs.replace(entry, revoked_ms=entry.revoked_ms or now)
        )

    async def change(self, key_id: str, change: Callable[[KeyEntry], KeyEntry]) -> KeyEntry:
        """Replace an entry. Raises KeyNotFound."""
        for _ in range(_TRIES):
            stored = await self._raw(key_id)
            if stored is None:
                raise KeyNotFound(key_id)
            entry = change(msgspec.json.decode(stored, type=KeyEntry))
            if await self._swap(key_id, stored, entry):
                return entry
        raise AssertionError("others kept changing the entry at the same time")

    async def now_ms(self) -> int:
        """The server's time."""
        with translated(self._server):
            await self._server.clock.measure()
        return self._server.clock.now_ms()

    async def _raw(self, key_id: str) -> bytes | None:
        with translated(self._server, self._key):
            return await self._server.client.hget(self._key, key_id)

    async def _swap(self, key_id: str, before: bytes, entry: KeyEntry) -> bool:
        with translated(self._server, self._key):
            call = put_key(self._key, key_id=key_id, before=before, entry=msgspec.json.encode(entry))
            done: Any = await run_script(self._server, call)
        return bool(done)
