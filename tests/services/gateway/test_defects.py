"""A background task of a gateway that only fails does no work: it ends, and the gateway with it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tests.waiting import eventually
from tokenbus.bus.liveness import MAX_DEFECTS, Liveness, LongTask
from tokenbus.bus.server.server import Server
from tokenbus_services.gateway.budgets import counter
from tokenbus_services.gateway.budgets.counter import SpendCounter
from tokenbus_services.gateway.keys import access
from tokenbus_services.gateway.keys.access import KeyAccess
from tokenbus_services.settings import Settings


async def test_a_count_of_spend_that_always_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter, "RETRY_S", 0.0)
    tries: list[int] = []

    class Broken:
        def subscribe(self, *_: Any, **__: Any) -> Any:
            tries.append(1)
            raise RuntimeError("a defect")

    counting = SpendCounter(
        cast("Any", None),
        cast("Any", Broken()),
        cast("Any", None),
        prices=cast("Any", None),
        apis={},
        rules_of=cast("Any", None),
        keep_ms=1,
    )
    with pytest.raises(RuntimeError, match="a defect"):
        await asyncio.wait_for(counting.run(), timeout=20)
    assert len(tries) == MAX_DEFECTS


async def test_a_renewal_of_places_that_always_fails_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "RENEW_S", 0.0)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(access, "renew_open", broken)
    nothing: Any = None
    keyed = KeyAccess(Settings(), server, directory=nothing, rules=nothing, aliases=nothing, prices=nothing)
    keyed._open["ada"] = {"run": 1}
    liveness, ended = Liveness(), list[LongTask]()
    liveness.ended = ended.append
    await keyed.open(liveness)
    await eventually(lambda: bool(ended))
    assert isinstance(ended[0].task.exception(), RuntimeError)
