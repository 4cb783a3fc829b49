"""Limits through the running services: shared by all fetchers, fair to tenants, and released by cancelled runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import PIPELINE, ended, fleet, provider_table
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.usage import Usage
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Stall, Status, Turn
from tokenbus_services.mock_provider.request_log import Exchange

HELD = Script(name="held", turns=(Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")),))
PACED = Script(name="paced", turns=(Turn(says=Reply(text="one two three"), delivery=Delivery(pace=100)),))
QUICK = Script(name="quick", turns=(Turn(says=Reply(text="done")),))
TWO_FETCHERS = ("fetcher", *PIPELINE)


def most_at_once(exchanges: Sequence[Exchange]) -> int:
    """How many of these calls ran at one moment."""
    begun = [(exchange.received_at, 1) for exchange in exchanges]
    over = [(exchange.ended_at or exchange.received_at, -1) for exchange in exchanges]
    running = most = 0
    for _, change in sorted(begun + over):
        running += change
        most = max(most, running)
    return most


def tenants(provider: MockProvider) -> list[str]:
    """Whose calls came, in order: each user's text is its tenant."""
    return [exchange.request.user_text for exchange in provider.requests if exchange.request]


async def statuses(server: Server, keys: Keys, runs: Sequence[str]) -> list[bytes | None]:
    return [await server.client.hget(keys.run(run), "status") for run in runs]


async def accepted(server: Server, keys: Keys, runs: Sequence[str]) -> None:
    """All of them are runs, and handed out to a fetcher."""

    async def so() -> bool:
        if any(status != b"open" for status in await statuses(server, keys, runs)):
            return False
        groups = [await server.client.xinfo_groups(keys.topic(p, "turns")) for p in range(keys.partitions)]
        return sum(group["pending"] for [group] in groups) >= len(runs)

    await eventually(so)


async def wait_unbegun(server: Server, keys: Keys, count: int) -> bool:
    """Whether a fetcher has claimed this many items that it has not begun."""
    streams = [keys.topic(p, "turns") for p in range(keys.partitions)]
    pending = [e for s in streams for e in await server.client.xpending_range(s, "fetcher", "-", "+", count=1000)]
    return [entry["times_delivered"] for entry in pending].count(0) == count


async def is_running(server: Server, keys: Keys, run: str) -> bool:
    """Whether a fetcher has found the run in its queue, however many are before it."""
    stream = keys.topic(keys.partition_of(run), "turns")
    pending = await server.client.xpending_range(stream, "fetcher", "-", "+", count=1000)
    held = {entry["message_id"] for entry in pending}
    return any(run.encode() in fields and entry in held for entry, fields in await server.client.xrange(stream))


async def test_calls_at_once_are_bounded_over_all_fetchers_and_all_of_them_get_through(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = "[limits.providers.anthropic]\nconcurrency = 2\n"
    async with deployed([PACED], TWO_FETCHERS, toml) as (provider, _):
        runs = [await send("paced") for _ in range(12)]
        logs = await ended(server.client, keys, runs)
        assert most_at_once(provider.requests) <= 2
    assert {judge.text(log) for log in logs.values()} == {"one two three"}  # pyright: ignore[reportArgumentType]
    assert await server.client.zcard(keys.limit("provider:anthropic") + ":held") == 0


async def test_a_provider_that_never_closes_its_body_holds_no_place_after_its_last_event(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    left_open = Script(name="open", turns=(Turn(says=Reply(text="one two"), fault=Stall(after_text="message_stop")),))
    async with MockProvider([left_open]) as provider:
        toml = provider_table("patient", "anthropic", provider.url, "idle_timeout_s = 3600\n")
        toml += "[limits.providers.patient]\nconcurrency = 1\n"
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, toml):
            runs = [await send("open", provider="patient") for _ in range(3)]
            logs = await ended(server.client, keys, runs)  # of which the second and the third need the one place
            for exchange in provider.requests:
                await provider.disconnected(exchange)
    assert [log[-1]["type"] for log in logs.values()] == ["completed"] * 3


async def test_a_killed_fetchers_places_free_themselves(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = "[limits.providers.anthropic]\nconcurrency = 1\n"
    async with deployed([HELD, QUICK], PIPELINE, toml) as (provider, services):
        lost = await send("held", on_failure="fail")
        await provider.requested()
        services.worker_of("fetcher").kill()
        await services.start(PIPELINE[0])
        waiting = await send("quick")
        logs = await ended(server.client, keys, [lost, waiting])
    assert logs[waiting][-1]["type"] == "completed"
    assert logs[lost][-1]["type"] == "incomplete"


async def test_a_single_run_does_not_wait_behind_another_tenants_flood(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    # The flood is far deeper than what may wait at the fetcher.
    toml = "[limits]\nwaiting_per_fetcher = 8\nruns_per_fetcher = 1\n"
    async with deployed([PACED], PIPELINE, toml) as (provider, _):
        flood = [await send("paced", "flood", metadata={"tenant": "flood"}) for _ in range(60)]
        await provider.requested()
        await eventually(lambda: server.client.hget(keys.run(flood[-1]), "status"))
        single = await send("paced", "single", metadata={"tenant": "single"})
        await eventually(lambda: is_running(server, keys, single))
        before = len(provider.requests)
        logs = await ended(server.client, keys, [single, *flood])
        assert "single" in tenants(provider)[: before + 3], "it came after two of the others at the most"
    assert all(log[-1]["type"] == "completed" for log in logs.values())


async def test_a_tenants_own_limit_does_not_hold_back_others(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = "[limits.tenants.slow]\nconcurrency = 1\n"
    async with deployed([HELD, QUICK], TWO_FETCHERS, toml) as (provider, _):
        slow = [await send("held", "slow", metadata={"tenant": "slow"}) for _ in range(20)]
        await accepted(server, keys, slow)
        await provider.requested()
        others = [await send("quick", "other", metadata={"tenant": f"t{n}"}) for n in range(3)]
        await ended(server.client, keys, [*others, await send("quick", "nobody")])
        assert tenants(provider).count("slow") == 1
        for run in slow:
            await server.client.xadd(keys.requests, {"__data__": f'{{"type":"cancel","run":"{run}"}}'})
        logs = await ended(server.client, keys, slow)
    assert {log[-1]["type"] for log in logs.values()} == {"cancelled"}


async def test_a_deadline_ends_a_run_that_waits_for_its_limit(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = '[limits.providers.anthropic.models."he*"]\nconcurrency = 1\n'
    async with deployed([HELD], PIPELINE, toml) as (provider, _):
        first = await send("held")
        await provider.requested()
        late = await send("held", deadline_s=0.5)
        end: Any = (await ended(server.client, keys, [late]))[late][-1]
        assert len(provider.requests) == 1, "it was never called"
        await server.client.xadd(keys.requests, {"__data__": f'{{"type":"cancel","run":"{first}"}}'})
        await ended(server.client, keys, [first])
    assert (end["type"], end["error"]["code"]) == ("failed", "deadline")


async def test_a_wait_longer_than_allowed_ends_with_its_own_error(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = "[limits]\nlongest_wait_s = 0.2\n[limits.tenant]\nrequests_per_second = 0.001\n"
    async with deployed([QUICK], PIPELINE, toml):
        first = await send("quick")
        await ended(server.client, keys, [first])
        second = await send("quick")
        end: Any = (await ended(server.client, keys, [second]))[second][-1]
    assert (end["type"], end["error"]["code"]) == ("failed", "limit_wait")


async def test_a_providers_retry_after_holds_for_all_fetchers_and_all_runs_of_the_model(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    busy = Script(
        name="busy", turns=(Turn(says=Reply(text="well"), first=(Status(status=429, headers={"retry-after": "4"}),)),)
    )
    async with deployed([busy, QUICK], TWO_FETCHERS, "[limits.providers.anthropic]\n") as (provider, _):
        first = await send("busy")
        requests = await provider.requested()
        await eventually(lambda: server.client.hget(keys.limit("model:anthropic/busy"), "paused"))
        others = [await send("busy", f"other {n}") for n in range(4)]
        free = await send("quick")
        await ended(server.client, keys, [first, *others, free])
    begun = [(e.received_at - requests.received_at, e.request.model) for e in provider.requests[1:] if e.request]
    assert all(seconds > 3.5 for seconds, model in begun if model == "busy"), begun
    assert begun[0][1] == "quick", "another model continues"


async def test_tokens_are_reserved_for_the_call_and_settled_by_its_usage(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    script = Script(name="m", turns=(Turn(says=Reply(text="hi", usage=Usage(input=20, output=30))),))
    toml = "[limits.providers.anthropic]\ntokens_per_minute = 60_000\n"
    key = keys.limit("provider:anthropic")
    async with deployed([script], PIPELINE, toml):
        before = await now_us(server)
        run = await send("m", max_tokens=30_000)
        await ended(server.client, keys, [run])

        async def taken() -> int:
            return int(await server.client.hget(key, "tokens") or 0)

        # 50 tokens are 50 ms of a bucket of a thousand a second; 30,000 would be half a minute.
        await eventually(lambda: _less(taken, before + 25_000_000))
        assert await taken() > before


async def _less(value: Any, bound: int) -> bool:
    return 0 < await value() < bound


async def now_us(server: Server) -> int:
    seconds, micros = await server.client.time()
    return seconds * 1_000_000 + micros


@pytest.mark.parametrize("how", ["stops", "is killed", "stands still"])
async def test_waiting_runs_go_to_another_fetcher_untouched_when_theirs(
    server: Server, keys: Keys, send: Send, how: str, deployed: Deploy
) -> None:
    toml = "[limits.providers.anthropic]\nconcurrency = 1\n[stages]\ndrain_s = 0.1\n"
    async with deployed([HELD, QUICK], PIPELINE, toml) as (provider, services):
        running = await send("held", on_failure="fail")
        held = await provider.requested()
        waiting = [await send("quick") for _ in range(5)]
        await accepted(server, keys, [running, *waiting])
        await eventually(lambda: wait_unbegun(server, keys, len(waiting)))
        fetcher = services.worker_of("fetcher")
        match how:
            case "stops":
                await fetcher.stop()
            case "is killed":
                fetcher.kill()
            case _:
                fetcher.freeze()
        await services.start(PIPELINE[0])
        logs = await ended(server.client, keys, waiting)
        if how == "stands still":
            fetcher.thaw()
            await provider.disconnected(held)  # it has seen that it was taken for dead
    assert len(provider.requests) == 1 + len(waiting), "none of them was called twice"
    attempts = {event["attempt"] for log in logs.values() for event in log}
    assert attempts == {1}, "none of them was tried and lost"
