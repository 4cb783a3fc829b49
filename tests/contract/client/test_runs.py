"""`Client.runs` and `Client.describe`: which runs are listed, in which order, and at what cost."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.contract.client.listed import Listed
from tests.waiting import eventually
from tokenbus import Client, RunInfo
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server
from tokenbus.client import run_list
from tokenbus.sync import Client as SyncClient

ABOUT = ("provider", "anthropic", "model", "claude")


@pytest.fixture
def listed(server: Server, keys: Keys) -> Listed:
    return Listed(server, keys)


async def names(bus: Client, **how: Any) -> list[str]:
    return [info.run async for info in bus.runs(**how)]


async def test_open_and_ended_runs_of_all_partitions_come_the_newest_first(bus: Client, listed: Listed) -> None:
    for n in range(40):
        await listed.accept(f"r{n}", 1000 + n)
    for n in range(0, 40, 10):
        await listed.end(f"r{n}")
    opened = [f"r{n}" for n in reversed(range(40)) if n % 10]
    ended = [f"r{n}" for n in (30, 20, 10, 0)]
    assert sorted((await names(bus))[:4]) == sorted(ended)
    assert (await names(bus))[4:] == opened
    assert await names(bus, state="open", limit=3) == opened[:3]
    assert await names(bus, state="open", oldest_first=True) == opened[::-1]
    assert sorted(await names(bus, state="ended")) == sorted(ended)


async def test_runs_of_one_moment_come_each_once_however_small_the_pages(
    bus: Client, listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_list, "ONE_READ", 1)
    monkeypatch.setattr(run_list, "LEAST_PAGE", 1)
    monkeypatch.setattr(run_list, "BATCH", 2)
    for n in range(30):
        await listed.accept(f"r{n:02}", 1000 + n // 12)
    for oldest_first in (False, True):
        found = await names(bus, oldest_first=oldest_first)
        assert found == sorted(found, reverse=not oldest_first)
        assert len(found) == 30


async def test_a_summary_has_tenant_provider_and_outcome(bus: Client, listed: Listed) -> None:
    await listed.accept("a", 1000, *ABOUT, "tenant", "acme", "deadline", 5000)
    await listed.client.hset(listed.keys.run("a"), mapping={"raw": 2, "seq": 7, "turn": 1, "attempt": 3})
    await listed.accept("b", 2000, *ABOUT)
    ended_ms = await listed.end("b", "failed", "finish", "error", "error", "auth")
    assert await bus.describe(["a", "b", "c"]) == {
        "a": RunInfo(
            run="a",
            state="running",
            accepted_ms=1000,
            provider="anthropic",
            model="claude",
            tenant="acme",
            turn=1,
            attempt=3,
            events=7,
            deadline_ms=5000,
        ),
        "b": RunInfo(
            run="b",
            state="failed",
            accepted_ms=2000,
            provider="anthropic",
            model="claude",
            ended_ms=ended_ms,
            finish="error",
            error="auth",
        ),
    }


async def test_runs_are_filtered_by_state_tenant_provider_age_and_prefix(bus: Client, listed: Listed) -> None:
    now_ms = await listed.server.client.time()
    now = now_ms[0] * 1000
    await listed.accept("queued", now - 500_000, "provider", "openai", "tenant", "acme")
    await listed.accept("running", now - 10_000, *ABOUT)
    await listed.client.hset(listed.keys.run("running"), "raw", 1)
    await listed.accept("failed", now - 900_000, *ABOUT)
    await listed.end("failed", "failed")
    assert await names(bus, state="queued") == ["queued"]
    assert await names(bus, state=["running", "failed"]) == ["failed", "running"]
    assert await names(bus, tenant="acme") == ["queued"]
    assert await names(bus, provider="anthropic", state="open") == ["running"]
    assert await names(bus, older_than=60) == ["queued"]
    assert await names(bus, older_than=timedelta(days=1)) == []
    assert await names(bus, prefix="run") == ["running"]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"state": "fialed"}, "state: unknown 'fialed': did you mean 'failed'?"),
        ({"state": []}, "state: no state is named"),
        ({"tenant": ""}, "tenant: '' is not a text, or empty"),
        ({"older_than": -1}, "older_than: -1 is neither a number of seconds from 0 nor a timedelta"),
        ({"limit": "5"}, "limit: '5' is not a whole number from 0"),
    ],
)
def test_a_wrong_filter_is_named(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match="^" + problem.replace("?", r"\?")):
        Client("redis://localhost").runs(**wrong)


async def test_a_run_whose_records_are_gone_is_left_out(bus: Client, listed: Listed) -> None:
    await listed.accept("gone", 1000)
    await listed.accept("here", 1001)
    await listed.client.delete(listed.keys.run("gone"))
    assert await names(bus) == ["here"]
    await listed.client.delete(listed.keys.run("here"))
    await listed.client.set(listed.keys.run("here"), "another program's")
    assert await names(bus) == []
    await listed.client.delete(listed.keys.run("here"))


@pytest.fixture
def pipes(bus: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many commands each pipeline of the client has."""
    client: Any = bus._deployment.server.client  # pyright: ignore[reportPrivateUsage]
    sent: list[int] = []
    pipeline = client.pipeline

    def counted(**how: Any) -> Any:
        pipe = pipeline(**how)
        execute = pipe.execute

        async def executed(**more: Any) -> Any:
            sent.append(len(pipe.command_stack))
            return await execute(**more)

        pipe.execute = executed
        return pipe

    monkeypatch.setattr(client, "pipeline", counted)
    return sent


async def test_a_page_costs_two_round_trips_for_any_number_of_runs(
    bus: Client, listed: Listed, pipes: list[int]
) -> None:
    for n in range(400):
        await listed.accept(f"r{n}", 1000 + n)
    assert len(await names(bus, state="open", limit=100)) == 100
    assert pipes == [listed.keys.partitions, 100]


async def test_a_tenants_runs_cost_no_look_at_those_of_others(bus: Client, listed: Listed, pipes: list[int]) -> None:
    for n in range(400):
        await listed.accept(f"r{n}", 1000 + n, "tenant", "acme: {1}" if n % 100 == 50 else "other")
    await listed.end("r50")
    assert sorted(await names(bus, tenant="acme: {1}")) == ["r150", "r250", "r350", "r50"]
    assert pipes == [2 * listed.keys.partitions, 4]
    pipes.clear()
    assert await names(bus, tenant="acme: {1}", state="ended") == ["r50"]
    assert await names(bus, tenant="nobody") == []
    assert sum(pipes) == 3 * listed.keys.partitions + 1


async def test_the_synchronous_client_lists_runs_too(server_url: str, listed: Listed, bus: Client) -> None:
    await listed.accept("a", 1000, *ABOUT)
    with SyncClient(server_url, prefix=listed.keys.prefix, partitions=listed.keys.partitions) as sync:
        assert [info.run for info in sync.runs(state="open")] == ["a"]
        assert sync.describe(["a"])["a"].model == "claude"


async def test_runs_are_found_where_an_earlier_number_of_partitions_placed_them(
    server: Server, server_url: str, keys: Keys, listed: Listed
) -> None:
    await join_deployment(server, keys)
    names_of_runs = [f"r{n}" for n in range(12)]
    async with Client(server_url, prefix=keys.prefix) as bus:  # before the change
        for n, run in enumerate(names_of_runs[:6]):
            await listed.accept(run, 1000 + n)
        changed = {"partitions": 7, "numbers": "7,4", "ever": "7,4", "spread": 7, "epoch": 2, "wire_version": 2}
        await server.client.hset(keys.meta, mapping=changed)
        later = Listed(server, Keys(keys.prefix, 7))
        for n, run in enumerate(names_of_runs[6:]):
            await later.accept(run, 2000 + n)

        async def all_listed() -> bool:
            return await names(bus, oldest_first=True) == names_of_runs

        await eventually(all_listed)  # a client asks for the number once a second
        assert set(await bus.describe(names_of_runs)) == set(names_of_runs)
