"""The audit of a deployment, on a server."""

from __future__ import annotations

import pytest

from tokenbus.bus import audit
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server


async def test_what_clients_do_displaces_nothing_that_operators_did(
    server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "AUDIT_ENTRIES", 100)
    monkeypatch.setattr(audit, "PAGE", 64)
    await audit.audit(server, keys, "erase", by="ann@host", door="cli", run=None, runs=3)
    for n in range(500):
        await audit.audit(server, keys, "cancel", by="web", door="native", run=f"r{n}")
    await audit.audit(server, keys, "keys.revoke", by="ann@host", door="cli", key="web")
    found = await audit.newest_audited(server, keys, most=1000)
    assert len(found) < 400
    # The two streams have no order within a millisecond.
    assert next(each for each in found if each.action == "cancel").facts["run"] == "r499"
    assert [each.action for each in found if each.action != "cancel"] == ["keys.revoke", "erase"]
    assert found[-1].action == "erase"
    assert found[-1].facts == {"runs": 3}
    assert found[0].at_ms >= found[-1].at_ms > 0
    assert await audit.newest_audited(server, keys, most=2) == found[:2]
