"""Reads what clients spent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.gateway import DAY_MS, NANO
from tokenbus.bus.server.server import Server, translated

_EPOCH = date(1970, 1, 1)


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What was used in a span of days."""

    cost: float = 0.0
    input: int = 0
    output: int = 0
    runs: int = 0


class ClientSpend(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    total: Spent
    days: dict[str, Spent]
    """By day (UTC), the newest first."""
    by_price: dict[str, float]
    """Cost of all time by the name of the price."""
    last_used: str | None = None
    reserved: float = 0.0
    """What its budget holds back for open runs, as of the last request."""

    def since(self, first: date) -> Spent:
        """The sum from this day on."""
        spans = [spent for day, spent in self.days.items() if date.fromisoformat(day) >= first]
        return Spent(
            cost=sum(one.cost for one in spans),
            input=sum(one.input for one in spans),
            output=sum(one.output for one in spans),
            runs=sum(one.runs for one in spans),
        )


async def read_spend(server: Server, keys: Keys, ids: Sequence[str]) -> list[ClientSpend]:
    found: list[ClientSpend] = []
    for key_id in ids:
        with translated(server, keys.gateway_spend(key_id)):
            fields: dict[bytes, bytes] = await server.client.hgetall(keys.gateway_spend(key_id))
            held: bytes | None = await server.client.hget(keys.gateway_held(key_id), "")
        found.append(_spend(key_id, {name.decode(): value.decode() for name, value in fields.items()}, int(held or 0)))
    return found


def _spend(key_id: str, fields: dict[str, str], held: int) -> ClientSpend:
    spans: dict[str, dict[str, int]] = {}
    prices: dict[str, float] = {}
    for name, value in fields.items():
        span, _, what = name.rpartition(":")
        if span.startswith("price:"):
            prices[span.removeprefix("price:")] = int(value) / NANO
        elif span:
            spans.setdefault(span, {})[what] = int(value)
    total = _spent(spans.pop("total", {}))
    days = {(_EPOCH + timedelta(days=int(day))).isoformat(): _spent(span) for day, span in spans.items()}
    used = fields.get("used")
    return ClientSpend(
        key=key_id,
        total=total,
        days=dict(sorted(days.items(), reverse=True)),
        by_price=dict(sorted(prices.items(), key=lambda one: -one[1])),
        reserved=held / NANO,
        last_used=None if used is None else datetime.fromtimestamp(int(used) / 1000, UTC).isoformat(timespec="seconds"),
    )


def _spent(span: dict[str, Any]) -> Spent:
    return Spent(
        cost=span.get("cost", 0) / NANO,
        input=span.get("input", 0),
        output=span.get("output", 0),
        runs=span.get("runs", 0),
    )


def today(now_ms: int) -> date:
    """The day of a server time (UTC)."""
    return _EPOCH + timedelta(days=now_ms // DAY_MS)
