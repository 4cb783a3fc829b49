"""`tokenbus spend`: what the gateway's keys spent."""

from __future__ import annotations

import sys
from datetime import timedelta

import msgspec

from tokenbus.errors import SettingsError
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli.render import output
from tokenbus_services.gateway.budgets.spend import read_spend, today
from tokenbus_services.gateway.keys.store import KeyStore


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
            sys.stdout.buffer.write(msgspec.json.encode(one) + b"\n")
            sys.stdout.buffer.flush()
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
