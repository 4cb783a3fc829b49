"""`tokenbus keys` and `tokenbus spend` against a server."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from tests.services.cli.process import run, settings_file
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.scripts.gateway import HoldKeys, RunUse, count_use
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus_services.gateway.keys.key import digest, id_of
from tokenbus_services.gateway.keys.store import KeyStore
from tokenbus_services.settings.tables.gateway import KeySettings


@pytest.fixture
async def config(server: Server, server_url: str, keys: Keys, tmp_path: Path) -> str:
    """Settings of a deployment that has begun, with one key. For TOKENBUS_CONFIG."""
    await join_deployment(server, keys)
    begin = f'redis_url = "{server_url}"\nprefix = "{keys.prefix}"\npartitions = {keys.partitions}'
    return settings_file(tmp_path, f'{begin}\n[gateway.keys.fixed]\nsha256 = "{"a" * 64}"\n')


async def test_a_key_is_made_listed_rotated_and_revoked(config: str, server: Server, keys: Keys) -> None:
    made = await run(
        *("keys", "create", "web", "--tenant", "acme", "--model", "anthropic/*", "--rpm", "60"),
        *("--budget", "50", "--per", "month", "--days", "30", "--json"),
        TOKENBUS_CONFIG=config,
    )
    assert made.code == 0, made.err
    printed = json.loads(made.out)
    store = KeyStore(server, keys)
    entry = await store.find(printed["id"])
    assert entry is not None
    assert entry.secrets[0].sha256 == digest(printed["key"])
    assert (entry.name, entry.rules.tenant, entry.rules.models, entry.rules.rpm_limit) == (
        *("web", "acme", ("anthropic/*",), 60),
    )
    rotated = await run("keys", "rotate", printed["id"], TOKENBUS_CONFIG=config)
    assert id_of(rotated.out.strip()) == printed["id"]
    listed = await run("keys", "list", TOKENBUS_CONFIG=config)
    assert [line.split()[:3] for line in listed.out.splitlines()] == [
        ["fixed", "active", "settings"],
        [printed["id"], "active", "redis"],
    ]
    assert printed["key"] not in listed.out
    revoked = await run("keys", "revoke", printed["id"], "--json", TOKENBUS_CONFIG=config)
    assert json.loads(revoked.out)["state"] == "revoked"
    audited = await run("audit", "--json", TOKENBUS_CONFIG=config)
    noted = [(entry["action"], entry["facts"]["key"]) for entry in map(json.loads, audited.out.splitlines())]
    assert noted == [(action, printed["id"]) for action in ("keys.revoke", "keys.rotate", "keys.create")]
    assert printed["key"] not in audited.out


async def test_a_key_for_the_settings_is_printed_with_its_hash_and_not_stored(
    config: str, server: Server, keys: Keys
) -> None:
    made = await run(*("keys", "create", "web", "--settings", "--tenant", "acme", "--operator"), TOKENBUS_CONFIG=config)
    table = tomllib.loads(made.out)["gateway"]["keys"]["web"]
    key = made.out.split()[1]
    assert msgspec.convert(table, KeySettings) == KeySettings(sha256=digest(key), tenant="acme", operator=True)
    assert await KeyStore(server, keys).all() == []


async def test_a_key_that_does_not_exist_and_wrong_rules_are_errors_that_name_them(config: str) -> None:
    missing = await run("keys", "revoke", "nobody", TOKENBUS_CONFIG=config)
    assert missing.code != 0
    assert "'nobody'" in missing.error
    wrong = await run("keys", "create", "web", "--surface", "telnet", TOKENBUS_CONFIG=config)
    assert wrong.code != 0
    assert "surfaces" in wrong.error


async def test_spend_is_shown_by_key(config: str, server: Server, keys: Keys) -> None:
    used = RunUse(
        seq=1,
        fresh=1000,
        cache_read=0,
        cache_write=0,
        output=500,
        prices=(3000, 0, 0, 15000),
        price_name="p/",
        ended=True,
    )
    call = count_use(
        HoldKeys(keys.gateway_counted("r1"), keys.gateway_held("fixed")),
        "r1",
        spend=keys.gateway_spend("fixed"),
        use=keys.gateway_use("fixed"),
        tokens_per_minute=0,
        used=used,
        keep_ms=60_000,
    )
    await run_script(server, call)
    shown = await run("spend", TOKENBUS_CONFIG=config)
    assert "fixed  30 days: 0.010500  in all: 0.010500  1 runs  1000 tokens in, 500 out" in shown.out
    exact = json.loads((await run("spend", "fixed", "--json", TOKENBUS_CONFIG=config)).out)
    assert exact["by_price"] == {"p/": 0.0105}


async def test_of_a_name_that_no_key_has_nothing_is_known_and_a_new_key_has_spent_nothing(
    config: str, server: Server, keys: Keys
) -> None:
    unknown = await run("spend", "fixd", TOKENBUS_CONFIG=config)
    assert (unknown.code, unknown.out) == (2, "")
    assert "nothing is known of 'fixd'" in unknown.error
    unused = await run("spend", "fixed", TOKENBUS_CONFIG=config)
    assert (unused.code, "last used never" in unused.out) == (0, True)
