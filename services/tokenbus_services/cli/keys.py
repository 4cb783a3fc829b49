"""`tokenbus keys` and `tokenbus spend`: makes, lists, rotates and revokes keys of the gateway, and sums their spend."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import msgspec

from tokenbus.errors import SettingsError
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli.audit import noted_apart
from tokenbus_services.cli.render import output
from tokenbus_services.gateway.budgets.spend import read_spend, today
from tokenbus_services.gateway.callers import has_keys
from tokenbus_services.gateway.keys.directory import KeySummary, entry_of, summary
from tokenbus_services.gateway.keys.key import NewKey, new_key
from tokenbus_services.gateway.keys.store import KeyStore
from tokenbus_services.settings import Settings
from tokenbus_services.settings.tables.gateway import KeyRules


def rules_from(options: dict[str, Any]) -> KeyRules:
    """The rules of these options; what was not given is left out. Raises SettingsError."""
    given = {name: value for name, value in options.items() if value not in (None, (), False)}
    try:
        return msgspec.convert(given, KeyRules)
    except msgspec.ValidationError as e:
        raise SettingsError("options", "keys create", str(e)) from None


async def create(rules: KeyRules, *, name: str, lifetime_s: float | None, as_json: bool) -> None:
    """Make a key and print it, the only time that it is seen."""
    async with _store() as (store, settings):
        made = await store.create(rules, name=name, lifetime_s=lifetime_s)
        await noted_apart("keys.create", key=made.id, name=name)
    _print_key(made, as_json)
    if not has_keys(settings):
        print(
            "note: these settings do not ask for keys; set `require_keys = true` in [gateway] of the gateway",
            file=sys.stderr,
        )


def for_settings(name: str, rules: KeyRules) -> None:
    """Make a key and print the table for the settings, which holds its hash alone."""
    made = new_key()
    print(f"# {made.text}   (keep this; the settings have only its hash)")
    print(f"[gateway.keys.{name}]")
    print(f'sha256 = "{made.sha256}"')
    for field, value in msgspec.to_builtins(rules).items():
        print(f"{field} = {msgspec.json.encode(value).decode()}")


async def rotate(key_id: str, *, grace_s: float, lifetime_s: float | None, as_json: bool) -> None:
    """Make a further key for a client and print it. Raises KeyNotFound."""
    async with _store() as (store, _):
        made = await store.rotate(key_id, grace_s=grace_s, lifetime_s=lifetime_s)
        await noted_apart("keys.rotate", key=key_id)
    _print_key(made, as_json)


async def revoke(key_id: str, *, as_json: bool) -> None:
    """Refuse a key from now on. Raises KeyNotFound."""
    async with _store() as (store, _):
        entry = await store.revoke(key_id)
        await noted_apart("keys.revoke", key=key_id)
        now = await store.now_ms()
    if as_json:
        output.print_json(summary(entry, source="redis", now_ms=now))
    else:
        print(f"{entry.id} is revoked; gateways refuse it within 10 s")


async def listing(*, as_json: bool) -> None:
    """Show all keys: those of the settings and those of Redis."""
    async with _store() as (store, settings):
        now = await store.now_ms()
        fixed = settings.gateway.keys if settings.gateway else {}
        found = [summary(entry_of(name, key), source="settings", now_ms=now) for name, key in fixed.items()]
        found += [summary(entry, source="redis", now_ms=now) for entry in await store.all()]
    if not found and not as_json:
        print("no keys", file=sys.stderr)
    for one in found:
        if as_json:
            output.print_json(one)
        else:
            print(output.safe("  ".join(_words(one))))


def _words(one: KeySummary) -> list[str]:
    words = [one.id, one.state, one.source, one.name or "-", f"tenant {one.rules.tenant or one.id}"]
    if one.expires:
        words.append(f"expires {one.expires}")
    if one.rules.max_budget is not None:
        words.append(f"budget {one.rules.max_budget:g} per {one.rules.budget_duration or 'life'}")
    return words


def _print_key(made: NewKey, as_json: bool) -> None:
    if as_json:
        output.print_json({"id": made.id, "key": made.text})
    else:
        print(made.text)


@asynccontextmanager
async def _store() -> AsyncGenerator[tuple[KeyStore, Settings]]:
    async with reaching.deployment() as (settings, server, keys):
        yield KeyStore(server, keys), settings


async def show(*, key_id: str | None, days: int, as_json: bool) -> None:
    """Show the spend of one key, or of all, in the last ``days`` days and in all. Raises SettingsError."""
    async with reaching.deployment() as (settings, server, keys):
        store = KeyStore(server, keys)
        fixed = list(settings.gateway.keys) if settings.gateway else []
        ids = [key_id] if key_id else [*fixed, *(entry.id for entry in await store.all())]
        found = await read_spend(server, keys, ids)
        spent_nothing = [one for one in found if one.last_used is None]
        if key_id and spent_nothing and key_id not in fixed and await store.find(key_id) is None:
            problem = f"nothing is known of {key_id!r}: no key has this id, and none spent under it"
            raise SettingsError("options", "KEY", f"{problem}; `tokenbus keys list` shows the ids")
        first = today(await store.now_ms()) - timedelta(days=days - 1)
    if not found and not as_json:
        print("no keys", file=sys.stderr)
    for one in found:
        if as_json:
            output.print_json(one)
            continue
        lately = one.since(first)
        words = (
            one.key,
            f"{days} days: {lately.cost:.6f}",
            f"in all: {one.total.cost:.6f}",
            f"{one.total.runs} runs",
            f"{one.total.input} tokens in, {one.total.output} out",
            f"last used {one.last_used or 'never'}",
        )
        print(output.safe("  ".join(words)))
