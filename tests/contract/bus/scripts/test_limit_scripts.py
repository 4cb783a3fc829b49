"""Limits in one step: what a call takes of all its scopes, who goes first, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.bus.state import everything
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import limits
from tokenbus.bus.scripts.limits import Kind, Scope
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

LEASE_MS = 60_000
HOUR_RATE = 1 / 3600
"""Requests a second so few that none comes back while a test runs."""
SLOW_TOKENS = 60
"""Tokens a minute: one comes back each second."""


class Scene:
    """One deployment's limits."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.keys = keys

    def scope(self, kind: Kind = "provider", name: str = "p", **rates: Any) -> Scope:
        return Scope(kind, self.keys.limit(f"{kind}:{name}"), **rates)

    async def reserve(
        self, *scopes: Scope, call: str = "run/1", worker: str = "w1", tokens: int = 0, lease_ms: int = LEASE_MS
    ) -> list[Any]:
        return await run_script(
            self.server, limits.reserve(scopes, member=call, worker=worker, tokens=tokens, lease_ms=lease_ms)
        )

    async def settle(self, *scopes: Scope, reply: list[Any], call: str = "run/1", left: int = 0) -> None:
        taken = [int(until) for until in reply[1:]]
        await run_script(self.server, limits.refund(scopes, member=call, left=left, taken=taken))


@pytest.fixture
def scene(server: Server, keys: Keys) -> Scene:
    return Scene(server, keys)


async def test_calls_at_once_are_bounded_and_a_settled_one_makes_room(scene: Scene) -> None:
    scope = scene.scope(concurrency=2)
    first = await scene.reserve(scope, call="a")
    assert first[0] == (await scene.reserve(scope, call="b"))[0] == b"ok"
    assert (await scene.reserve(scope, call="c"))[:2] == [b"wait", 1]
    await scene.settle(scope, reply=first, call="a")
    assert (await scene.reserve(scope, call="c"))[0] == b"ok"


async def test_a_dead_fetchers_slot_is_free_after_its_lease(scene: Scene) -> None:
    scope = scene.scope(concurrency=1)
    await scene.reserve(scope, call="a", worker="dead", lease_ms=1)

    async def free() -> bool:
        return (await scene.reserve(scope, call="b"))[0] == b"ok"

    await eventually(free)


async def test_a_renewed_slot_outlives_its_first_lease(scene: Scene) -> None:
    scope = scene.scope(concurrency=1)
    await scene.reserve(scope, call="a", lease_ms=200)
    first = await scene.server.client.zscore(scope.held, "a")
    await run_script(scene.server, limits.renew(scope.held, lease_ms=LEASE_MS, members=["a"]))
    assert await scene.server.client.zscore(scope.held, "a") > first + 1_000_000
    assert (await scene.reserve(scope, call="b"))[0] == b"wait"


async def test_requests_beyond_a_seconds_worth_hear_when_to_come_again(scene: Scene) -> None:
    scope = scene.scope(requests_per_second=HOUR_RATE)
    assert (await scene.reserve(scope))[0] == b"ok", "one request at least may come at once"
    verdict, which, ms = await scene.reserve(scope)
    assert (verdict, which) == (b"wait", 1)
    assert 3_500_000 < ms <= 3_600_000


async def test_a_second_of_requests_may_come_at_once(scene: Scene) -> None:
    scope = scene.scope(requests_per_second=5.0)
    replies = [(await scene.reserve(scope, call=str(n)))[0] for n in range(5)]
    assert replies == [b"ok"] * 5


async def test_tokens_are_reserved_before_the_call_and_what_was_not_used_comes_back(scene: Scene) -> None:
    scope = scene.scope(tokens_per_minute=SLOW_TOKENS)
    reply = await scene.reserve(scope, tokens=60)
    verdict, _, ms = await scene.reserve(scope, tokens=30)
    assert verdict == b"wait"
    assert 25_000 < ms <= 30_000
    await scene.settle(scope, reply=reply, left=50)
    assert (await scene.reserve(scope, tokens=30))[0] == b"ok"


async def test_a_call_that_used_more_than_it_reserved_pays_for_it(scene: Scene) -> None:
    scope = scene.scope(tokens_per_minute=SLOW_TOKENS)
    reply = await scene.reserve(scope, tokens=10)
    await scene.settle(scope, reply=reply, left=-50)
    assert (await scene.reserve(scope, tokens=10))[0] == b"wait"


async def test_what_time_gave_back_already_is_not_given_back_again(scene: Scene) -> None:
    scope = scene.scope(tokens_per_minute=SLOW_TOKENS)
    reply = await scene.reserve(scope, tokens=40)
    drained = [b"ok", b"0"]  # as if all of that had flowed back by now
    await scene.settle(scope, reply=drained, left=40)
    assert int(await scene.server.client.hget(scope.key, "tokens")) == int(reply[1])


async def test_a_request_larger_than_the_bucket_is_sent_when_the_bucket_is_full(scene: Scene) -> None:
    scope = scene.scope(tokens_per_minute=SLOW_TOKENS)
    assert (await scene.reserve(scope, tokens=600))[0] == b"ok"
    verdict, _, ms = await scene.reserve(scope, call="next", tokens=1)
    assert verdict == b"wait"
    assert ms > 500_000, "the debt is paid first"


async def test_no_scope_is_charged_if_another_scope_refuses(scene: Scene) -> None:
    free = scene.scope("provider", "free", requests_per_second=100.0, tokens_per_minute=10**6, concurrency=9)
    busy = scene.scope("tenant", "busy", concurrency=1)
    await scene.reserve(busy, call="other")
    before = await everything(scene.server, scene.keys)
    assert (await scene.reserve(free, busy, tokens=5))[:2] == [b"wait", 2]
    after = await everything(scene.server, scene.keys)
    assert {key for key in after if key not in before} == {busy.key.encode()}, (
        "only a place in the queue of who refused"
    )


async def test_a_refused_run_is_served_before_later_ones(scene: Scene) -> None:
    scope = scene.scope(concurrency=1)
    running = await scene.reserve(scope, call="a", worker="w1")
    assert (await scene.reserve(scope, call="b", worker="w2"))[0] == b"wait"
    await scene.settle(scope, reply=running, call="a")
    assert (await scene.reserve(scope, call="c", worker="w1"))[0] == b"wait", "w2 waits already"
    assert (await scene.reserve(scope, call="b", worker="w2"))[0] == b"ok"


async def test_small_requests_do_not_starve_a_large_one(scene: Scene) -> None:
    scope = scene.scope(tokens_per_minute=SLOW_TOKENS)
    await scene.reserve(scope, call="first", tokens=30)
    assert (await scene.reserve(scope, call="large", worker="w1", tokens=50))[0] == b"wait"
    assert (await scene.reserve(scope, call="small", worker="w2", tokens=5))[0] == b"wait", "it fits, but it is later"


async def test_a_worker_that_stops_asking_loses_its_place_in_the_queue(scene: Scene) -> None:
    scope = scene.scope(concurrency=1)
    running = await scene.reserve(scope, call="a", worker="w1")
    await scene.reserve(scope, call="b", worker="gone")
    await scene.settle(scope, reply=running, call="a")

    async def mine() -> bool:
        return (await scene.reserve(scope, call="c", worker="w1"))[0] == b"ok"

    await eventually(mine)


async def test_a_reservation_whose_reply_was_lost_is_not_made_twice(scene: Scene) -> None:
    scope = scene.scope(tokens_per_minute=SLOW_TOKENS, concurrency=3)
    await scene.reserve(scope, call="a", tokens=10)
    before = await everything(scene.server, scene.keys)
    assert (await scene.reserve(scope, call="a", tokens=10))[0] == b"already"
    assert await everything(scene.server, scene.keys) == before


async def test_a_call_whose_reservation_was_answered_only_the_second_time_gives_back_what_it_did_not_use(
    scene: Scene,
) -> None:
    scope = scene.scope(tokens_per_minute=60, concurrency=2)
    await scene.reserve(scope, call="a", tokens=50)
    again = await scene.reserve(scope, call="a", tokens=50)
    assert again[0] == b"already"
    assert (await scene.reserve(scope, call="b", tokens=50))[0] == b"wait"
    await scene.settle(scope, call="a", reply=again, left=50)
    assert (await scene.reserve(scope, call="b", tokens=50))[0] == b"ok"


async def test_a_renewal_that_arrives_after_its_call_ended_takes_no_slot(scene: Scene) -> None:
    scope = scene.scope(concurrency=1)
    reply = await scene.reserve(scope, call="a")
    await scene.settle(scope, call="a", reply=reply, left=0)
    await run_script(scene.server, limits.renew(scope.held, lease_ms=LEASE_MS, members=["a"]))
    assert (await scene.reserve(scope, call="b"))[0] == b"ok"


async def test_a_pause_delays_all_callers_and_a_shorter_one_does_not_end_it(scene: Scene) -> None:
    scope = scene.scope("model", "p/m")
    await run_script(scene.server, limits.pause(scope.key, ms=60_000))
    await run_script(scene.server, limits.pause(scope.key, ms=10))
    verdict, _, ms = await scene.reserve(scope)
    assert verdict == b"wait"
    assert 50_000 < ms <= 60_000


async def test_a_full_pipeline_of_limits_leaves_nothing_that_stays_for_ever(scene: Scene) -> None:
    scope = scene.scope(requests_per_second=5.0, tokens_per_minute=600, concurrency=4)
    reply = await scene.reserve(scope, tokens=100)
    await scene.reserve(scope, call="b", worker="w2", tokens=10**6)
    await run_script(scene.server, limits.pause(scope.key, ms=500))
    await scene.settle(scope, reply=reply, left=40)
    client = scene.server.client
    lives = [await client.pttl(key) async for key in client.scan_iter(match=f"{scene.keys.prefix}:*")]
    assert lives
    assert all(0 < ms < 120_000 for ms in lives)


async def test_a_tenants_name_may_be_anything(scene: Scene) -> None:
    scope = scene.scope("tenant", "a}b{c:held\n' or 1", concurrency=1)
    assert (await scene.reserve(scope))[0] == b"ok"
    assert (await scene.reserve(scope, call="b"))[0] == b"wait"
