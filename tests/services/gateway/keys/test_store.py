"""Keys: made, found, rotated, revoked; their texts are kept nowhere."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import SettingsError
from tokenbus_services.gateway.keys.directory import CACHE_S, KeyDirectory, check_keys, summary
from tokenbus_services.gateway.keys.key import digest, id_of, new_key
from tokenbus_services.gateway.keys.store import KeyNotFound, KeyStore
from tokenbus_services.settings.tables.gateway import KeyRules, KeySettings


class Clock:
    """The directory's clock, moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(server: Server, keys: Keys) -> KeyStore:
    return KeyStore(server, keys)


def directory(store: KeyStore, clock: Clock | None = None, **settings: KeySettings) -> KeyDirectory:
    return KeyDirectory(settings, store, clock=clock or Clock())


async def test_a_key_is_found_by_its_text_alone(store: KeyStore) -> None:
    made = await store.create(KeyRules(tenant="ada"), name="web")
    found = await directory(store).find(made.text)
    assert found is not None
    assert (found.id, found.name, found.rules.tenant) == (made.id, "web", "ada")
    assert id_of(made.text) == made.id


async def test_what_is_stored_of_a_key_does_not_admit_anyone(store: KeyStore, server: Server, keys: Keys) -> None:
    made = await store.create(KeyRules(tenant="ada"))
    secret = made.text.removeprefix(f"tb-{made.id}-")
    kept = await server.client.hget(keys.gateway_keys, made.id)
    assert kept is not None
    assert secret.encode() not in kept
    assert made.text.encode() not in kept
    shown = msgspec.json.encode(summary(await _entry(store, made.id), source="redis", now_ms=0))
    assert digest(made.text).encode() not in shown


async def _entry(store: KeyStore, key_id: str):
    entry = await store.find(key_id)
    assert entry is not None
    return entry


@pytest.mark.parametrize("text", ["", "tb-", "sk-123", "tb-aaaaaaaa-short", "tb-" + "a" * 60, "\udce4", "x" * 10_000])
async def test_an_invalid_key_has_no_owner(store: KeyStore, text: str) -> None:
    assert await directory(store).find(text) is None


async def test_a_wrong_secret_and_an_unknown_id_are_both_nobodys(store: KeyStore) -> None:
    made = await store.create(KeyRules())
    lookup = directory(store)
    assert await lookup.find(new_key(made.id).text) is None
    assert await lookup.find(new_key().text) is None


async def test_a_revoked_key_is_refused_within_ten_seconds_on_a_gateway_that_knew_it(store: KeyStore) -> None:
    clock = Clock()
    lookup = directory(store, clock)
    made = await store.create(KeyRules())
    assert await lookup.find(made.text)
    await store.revoke(made.id)
    clock.now += CACHE_S
    assert await lookup.find(made.text) is None
    assert CACHE_S < 10
    entry = await _entry(store, made.id)
    assert (await store.revoke(made.id)).revoked_ms == entry.revoked_ms


async def test_a_new_key_is_found_by_a_gateway_that_has_just_missed_it(store: KeyStore) -> None:
    clock = Clock()
    lookup = directory(store, clock)
    guessed = new_key()
    assert await lookup.find(guessed.text) is None
    made = await store.create(KeyRules())
    clock.now += CACHE_S
    assert await lookup.find(made.text)


async def test_rotation_leaves_both_keys_valid_and_then_the_new_one(store: KeyStore) -> None:
    clock = Clock()
    lookup = directory(store, clock)
    old = await store.create(KeyRules(tenant="ada"), lifetime_s=3600)
    new = await store.rotate(old.id, grace_s=3600)
    assert new.id == old.id
    assert new.text != old.text
    for text in (old.text, new.text):
        found = await lookup.find(text)
        assert found is not None
        assert found.rules.tenant == "ada"
    newest = await store.rotate(old.id, grace_s=0.001)
    clock.now += CACHE_S

    async def only_the_newest() -> bool:
        found = [await lookup.find(one.text) is not None for one in (old, new, newest)]
        return found == [False, False, True]

    await eventually(only_the_newest)


async def test_an_expired_key_is_refused(store: KeyStore) -> None:
    made = await store.create(KeyRules(), lifetime_s=0.001)

    async def refused() -> bool:
        return await directory(store).find(made.text) is None

    await eventually(refused)


async def test_two_changes_at_once_lose_neither(store: KeyStore) -> None:
    made = await store.create(KeyRules())
    await asyncio.gather(*(store.rotate(made.id, grace_s=3600) for _ in range(5)))
    assert len((await _entry(store, made.id)).secrets) == 6


async def test_a_key_that_does_not_exist_cannot_be_changed(store: KeyStore) -> None:
    with pytest.raises(KeyNotFound, match="no key 'aaaaaaaa'"):
        await store.revoke("aaaaaaaa")


async def test_keys_of_the_settings_are_found_by_any_of_their_hashes_until_they_expire(store: KeyStore) -> None:
    old, new, gone = new_key(), new_key(), new_key()
    lookup = directory(
        store,
        web=KeySettings(sha256=(old.sha256, new.sha256), tenant="ada"),
        late=KeySettings(sha256=gone.sha256, expires=datetime.now(UTC) - timedelta(seconds=1)),
    )
    for text in (old.text, new.text):
        found = await lookup.find(text)
        assert found is not None
        assert (found.id, found.rules) == ("web", KeyRules(tenant="ada"))
    assert await lookup.find(gone.text) is None
    assert await lookup.rules_of("web") == KeyRules(tenant="ada")


def test_keys_of_the_settings_need_hashes_of_their_own() -> None:
    one = new_key().sha256
    with pytest.raises(SettingsError, match=r"gateway\.keys\.b\.sha256: the same key as gateway\.keys\.a"):
        check_keys({"a": KeySettings(sha256=one), "b": KeySettings(sha256=(new_key().sha256, one))})
    with pytest.raises(SettingsError, match=r"gateway\.keys\.a\.sha256: no hash"):
        check_keys({"a": KeySettings()})
