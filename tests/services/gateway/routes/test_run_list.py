"""A page of `GET /runs`: a caller's own runs alone, and a bounded cost however few of them there are."""

from __future__ import annotations

import pytest

from tests.contract.client.listed import Listed
from tests.services.gateway.rules import rules
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.client import run_list as listing
from tokenbus.client.deployment import Deployment
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.routes import run_list
from tokenbus_services.gateway.routes.run_list import RunQuery, page_of

ACME = Caller(rules=rules(), tenant="acme")
NO_TENANT = Caller(rules=rules())
OPERATOR = Caller(rules=rules(), operator=True)


async def pages(server: Server, keys: Keys, caller: Caller, **parameters: str) -> list[list[str]]:
    """All pages, as a client reads them."""
    deployment = Deployment(server, keys.prefix, keys.partitions)
    found: list[list[str]] = []
    while True:
        page = await page_of(deployment, RunQuery.of(parameters.items()), caller)
        found.append([info.run for info in page.runs])
        if page.next is None:
            return found
        parameters["after"] = page.next


async def test_a_caller_sees_only_its_own_tenants_runs_through_any_endpoint(server: Server, keys: Keys) -> None:
    listed = Listed(server, keys)
    await listed.accept("ours", 1000, "tenant", "acme")
    await listed.accept("theirs", 1001, "tenant", "other")
    await listed.accept("nobodys", 1002)
    assert await pages(server, keys, ACME) == [["ours"]]
    assert await pages(server, keys, ACME, tenant="other") == [[]]
    assert await pages(server, keys, ACME, prefix="the") == [[]]
    assert await pages(server, keys, NO_TENANT) == [["nobodys"]]
    assert await pages(server, keys, OPERATOR, tenant="other") == [["theirs"]]
    assert await pages(server, keys, OPERATOR, oldest_first="true") == [["ours", "theirs", "nobodys"]]


async def test_an_answer_examines_a_bounded_number_of_runs_and_has_a_cursor_to_continue(
    server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_list, "MOST_READS", 2)
    monkeypatch.setattr(listing, "BATCH", 4)
    listed = Listed(server, keys)
    await listed.accept("a-first", 1000, "tenant", "acme")
    for n in range(20):
        await listed.accept(f"r{n}", 1001 + n, "tenant", "acme")
    await listed.accept("a-last", 2000, "tenant", "acme")
    found = await pages(server, keys, ACME, prefix="a-")
    assert [run for page in found for run in page] == ["a-last", "a-first"]
    assert len(found) >= 3
    assert [] in found
