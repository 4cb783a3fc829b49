"""The gateway's scripts: admission counts against all limits or none, and what a run used is counted once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.gateway import (
    NANO,
    AdmissionLimits,
    AdmissionReply,
    HoldKeys,
    Reservation,
    RunUse,
    admit,
    count_use,
    hold_longer,
    put_key,
    release,
    renew_open,
)
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

LEASE_MS = 60_000
DAY_MS = 86_400_000


class Scene:
    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.keys = keys
        self.use = keys.gateway_use("ada")
        self.spend = keys.gateway_spend("ada")
        self.held = keys.gateway_held("ada")

    def hold(self, run: str) -> HoldKeys:
        return HoldKeys(self.keys.gateway_counted(run), self.held)

    async def admit(
        self,
        run: str = "r1",
        *,
        gateway: str = "g1",
        lease_ms: int = LEASE_MS,
        estimate: int = 0,
        hold_ms: int = LEASE_MS,
        client: str = "ada",
        above: Sequence[str] = (),
        **limits: Any,
    ) -> AdmissionReply:
        reserved = Reservation(client=client, estimate_nano=estimate, hold_ms=hold_ms, keep_ms=LEASE_MS)
        call = admit(
            *(self.use, self.spend, run, AdmissionLimits(**limits)),
            gateway=gateway,
            lease_ms=lease_ms,
            hold=self.hold(run),
            reserved=reserved,
            above=above,
        )
        reply = await run_script(self.server, call)
        return AdmissionReply(reply[0].decode(), *(int(one) for one in reply[1:]))

    async def count(self, seq: int, *, run: str = "r1", tpm: int = 0, **used: Any) -> int:
        counts = {"fresh": 0, "cache_read": 0, "cache_write": 0, "output": 0, **used}
        return await run_script(
            self.server,
            count_use(
                self.hold(run),
                run,
                spend=self.spend,
                use=self.use,
                tokens_per_minute=tpm,
                used=RunUse(seq=seq, **counts),
                keep_ms=LEASE_MS,
            ),
        )

    async def total(self, what: str = "cost") -> int:
        return int(await self.server.client.hget(self.spend, f"total:{what}") or 0)

    async def reserved(self) -> dict[str, int]:
        """What is held for each run. Its sum is in step."""
        stored = await self.server.client.hgetall(self.held)
        holds = {run.decode(): int(amount) for run, amount in stored.items()}
        assert holds.pop("", 0) == sum(holds.values())
        assert {run.decode() for run in await self.server.client.zrange(f"{self.held}:ends", 0, -1)} == holds.keys()
        return holds

    async def spent_on(self, days_ago: int, cost: int) -> None:
        now_us = await self.server.client.time()
        today = now_us[0] * 1000 // DAY_MS
        await self.server.client.hset(self.spend, f"{today - days_ago}:cost", cost)


@pytest.fixture
async def scene(server: Server, keys: Keys) -> Scene:
    return Scene(server, keys)


async def test_requests_beyond_the_minutes_worth_are_refused_with_a_time(scene: Scene) -> None:
    first, second, third = [await scene.admit(f"r{n}", requests_per_minute=2) for n in range(3)]
    assert (first.refused, second.refused, third.refused) == ("", "", "requests")
    assert (first.requests_left, second.requests_left) == (1, 0)
    assert 0 < third.retry_ms <= 30_000
    assert third.requests_full_ms > third.retry_ms


async def test_a_refused_request_takes_nothing(scene: Scene) -> None:
    await scene.admit("r1", concurrency=1, requests_per_minute=100)
    for _ in range(3):
        reply = await scene.admit("r2", concurrency=1, requests_per_minute=100)
        assert reply.refused == "concurrency"
    assert (await scene.admit("r1", concurrency=1, requests_per_minute=100)).requests_left >= 98


async def test_open_answers_are_counted_until_they_are_left_or_their_gateway_is_dead(scene: Scene) -> None:
    assert (await scene.admit("r1", concurrency=1)).refused == ""
    assert (await scene.admit("r1", concurrency=1)).refused == "", "the same run again takes no second place"
    assert (await scene.admit("r2", concurrency=1)).refused == "concurrency"
    await scene.server.client.zrem(f"{scene.use}:open", "r1 g1")
    assert (await scene.admit("r2", concurrency=1)).refused == ""
    await scene.server.client.zadd(f"{scene.use}:open", {"r2 g1": 1})
    assert (await scene.admit("r3", concurrency=1)).refused == ""


async def test_a_run_that_two_gateways_read_has_one_place_until_both_have_left(scene: Scene) -> None:
    for gateway in ("g1", "g2"):
        assert (await scene.admit("r1", gateway=gateway, concurrency=1)).refused == ""
    assert (await scene.admit("r2", concurrency=2)).refused == ""
    assert (await scene.admit("r3", concurrency=2)).refused == "concurrency"
    await scene.server.client.zrem(f"{scene.use}:open", "r1 g1")
    await run_script(scene.server, renew_open(scene.use, ["r1"], gateway="g2", lease_ms=LEASE_MS))
    assert (await scene.admit("r3", concurrency=2)).refused == "concurrency"
    await scene.server.client.zrem(f"{scene.use}:open", "r1 g2")
    assert (await scene.admit("r3", concurrency=2)).refused == ""


async def test_a_renewed_slot_lives_longer_and_a_released_one_stays_free(scene: Scene) -> None:
    await scene.admit("r1", concurrency=1, lease_ms=1000)
    before = await scene.server.client.zscore(f"{scene.use}:open", "r1 g1")
    await run_script(scene.server, renew_open(scene.use, ["r1", "gone"], gateway="g1", lease_ms=LEASE_MS))
    assert await scene.server.client.zscore(f"{scene.use}:open", "r1 g1") > before + 30_000
    assert await scene.server.client.zscore(f"{scene.use}:open", "gone g1") is None


async def test_reported_tokens_refuse_requests_until_they_are_made_up_for(scene: Scene) -> None:
    assert (await scene.admit(tokens_per_minute=1000)).tokens_left == 1000
    await scene.count(3, tpm=1000, fresh=1500, output=1000)
    reply = await scene.admit(tokens_per_minute=1000)
    assert reply.refused == "tokens"
    assert 60_000 < reply.retry_ms <= 90_060
    assert reply.tokens_left == 0


async def test_an_event_that_comes_again_or_late_is_not_counted(scene: Scene) -> None:
    price = (1000.0, 100.0, 2000.0, 5000.0)
    assert await scene.count(3, fresh=10, output=4, prices=price, price_name="p/m") == 1
    assert await scene.count(3, fresh=10, output=4, prices=price) == 0
    assert await scene.count(7, fresh=30, cache_read=5, output=6, prices=price, price_name="p/m", ended=True) == 1
    assert await scene.count(3, fresh=10, output=4, prices=price) == 0
    assert await scene.count(7, fresh=30, output=6, prices=price, ended=True) == 0
    assert await scene.total() == 30 * 1000 + 5 * 100 + 6 * 5000
    assert (await scene.total("input"), await scene.total("output"), await scene.total("runs")) == (35, 6, 1)
    assert int(await scene.server.client.hget(scene.spend, "price:p/m:cost")) == await scene.total()


async def test_each_part_of_a_run_is_counted_at_the_price_of_its_own_model(scene: Scene) -> None:
    await scene.count(3, output=10, prices=(0, 0, 0, 1000.0))
    await scene.count(9, output=30, prices=(0, 0, 0, 7000.0), ended=True)
    assert await scene.total() == 10 * 1000 + 20 * 7000


async def test_a_decreasing_sum_refunds_nothing(scene: Scene) -> None:
    await scene.count(3, output=10, prices=(0, 0, 0, 1000.0))
    await scene.count(5, output=4, prices=(0, 0, 0, 1000.0))
    await scene.count(6, output=12, prices=(0, 0, 0, 1000.0))
    assert await scene.total() == 12 * 1000


async def test_a_spent_budget_refuses_requests(scene: Scene) -> None:
    budget = NANO // 1000
    assert (await scene.admit(budget_nano=budget)).refused == ""
    await scene.count(1, output=1000, prices=(0, 0, 0, 1000.0))
    reply = await scene.admit(budget_nano=budget)
    assert (reply.refused, reply.spent_nano) == ("budget", 1_000_000)
    assert (await scene.admit(budget_nano=budget + 1)).refused == ""


PER_TOKEN = (0.0, 0.0, 0.0, 1.0)


async def test_a_budget_that_is_reserved_admits_no_more_than_one_run_beyond_it(scene: Scene) -> None:
    replies = [await scene.admit(f"r{n}", budget_nano=100, estimate=30) for n in range(6)]
    assert [reply.refused for reply in replies] == ["", "", "", "", "reserved", "reserved"]
    assert replies[-1].retry_ms > 0
    assert await scene.reserved() == {f"r{n}": 30 for n in range(4)}


async def test_the_end_of_a_run_gives_back_what_it_did_not_use_and_only_once(scene: Scene) -> None:
    for run in ("r1", "r2"):
        await scene.admit(run, budget_nano=100, estimate=60)
    assert (await scene.admit("r3", budget_nano=100, estimate=60)).refused == "reserved"
    for _ in range(2):
        await scene.count(5, output=10, ended=True, prices=PER_TOKEN)
        assert await scene.reserved() == {"r2": 60}
    assert (await scene.admit("r3", budget_nano=100, estimate=60)).refused == ""
    await scene.count(5, run="r2", output=50, ended=True, prices=PER_TOKEN)
    await scene.count(5, run="r3", output=50, ended=True, prices=PER_TOKEN)
    assert (await scene.reserved(), await scene.total()) == ({}, 110)
    assert (await scene.admit("r4", budget_nano=100, estimate=60)).refused == "budget"


async def test_each_turn_that_is_counted_is_no_longer_reserved(scene: Scene) -> None:
    await scene.admit(budget_nano=100, estimate=60)
    await scene.count(3, output=25, prices=PER_TOKEN)
    assert await scene.reserved() == {"r1": 35}
    await scene.count(3, output=25, prices=PER_TOKEN)
    assert await scene.reserved() == {"r1": 35}
    await scene.count(9, output=99, prices=PER_TOKEN)
    assert await scene.reserved() == {}


async def test_a_request_for_a_run_that_is_open_or_over_reserves_nothing_more(scene: Scene) -> None:
    for _ in range(3):
        assert (await scene.admit(budget_nano=100, estimate=120)).refused == ""
    assert await scene.reserved() == {"r1": 120}
    await scene.count(5, ended=True)
    assert (await scene.admit(budget_nano=100, estimate=120)).refused == ""
    assert await scene.reserved() == {}


async def test_a_run_of_another_client_is_not_reserved_for(scene: Scene) -> None:
    await scene.admit(budget_nano=100, estimate=10, client="bob")
    scene.held = scene.keys.gateway_held("eve")
    await scene.admit(budget_nano=100, estimate=10, client="eve")
    assert await scene.reserved() == {}


async def test_what_is_reserved_for_a_run_that_never_starts_expires(scene: Scene) -> None:
    await scene.admit("r1", budget_nano=100, estimate=200, hold_ms=0)
    assert (await scene.admit("r2", budget_nano=100, estimate=10)).refused == ""
    assert await scene.reserved() == {"r2": 10}


async def test_a_run_that_starts_gets_an_expired_reservation_back_but_not_after_its_end(scene: Scene) -> None:
    await scene.admit("r1", budget_nano=100, estimate=70, hold_ms=0)
    await scene.admit("r2", budget_nano=100, estimate=10)
    for _ in range(2):
        assert await run_script(scene.server, hold_longer(scene.hold("r1"), "r1", keep_ms=LEASE_MS)) == 1
        assert await scene.reserved() == {"r1": 70, "r2": 10}
    await scene.count(5, ended=True)
    assert await run_script(scene.server, hold_longer(scene.hold("r1"), "r1", keep_ms=LEASE_MS)) == 0
    assert await scene.reserved() == {"r2": 10}
    assert await run_script(scene.server, hold_longer(scene.hold("nobody"), "nobody", keep_ms=LEASE_MS)) == 0


@pytest.mark.parametrize("ended", [True, False])
async def test_a_run_that_was_not_published_is_not_reserved_for_unless_it_starts_after_all(
    scene: Scene, ended: bool
) -> None:
    await scene.admit("r1", budget_nano=100, estimate=70)
    for _ in range(2):
        await run_script(scene.server, release(scene.hold("r1"), "r1", ended=ended))
        assert await scene.reserved() == {}
    held = await run_script(scene.server, hold_longer(scene.hold("r1"), "r1", keep_ms=LEASE_MS))
    assert held == int(not ended)
    assert await scene.reserved() == ({} if ended else {"r1": 70})


@pytest.mark.parametrize("period", ["day", "week", "month"])
async def test_a_budget_of_a_period_counts_its_days_and_no_earlier_one(scene: Scene, period: str) -> None:
    seconds, _ = await scene.server.client.time()
    today = datetime.fromtimestamp(seconds, UTC)
    within = {"day": 0, "week": today.weekday(), "month": today.day - 1}[period]
    await scene.spent_on(within + 1, 5)
    assert (await scene.admit(budget_nano=5, period=period)).spent_nano == 0
    await scene.spent_on(within, 5)
    assert (await scene.admit(budget_nano=5, period=period)).refused == "budget"


async def test_days_of_more_than_a_year_ago_are_forgotten_on_a_new_day(scene: Scene) -> None:
    await scene.spent_on(400, 5)
    await scene.spent_on(300, 5)
    await scene.count(1, output=1)
    days = {field.partition(b":")[0] for field in await scene.server.client.hkeys(scene.spend)}
    assert len(days) == 3  # total, today, and the one within a year


async def test_an_entry_changes_only_if_it_is_still_what_was_read(scene: Scene) -> None:
    key = scene.keys.gateway_keys
    assert await run_script(scene.server, put_key(key, key_id="a", before=b"", entry=b"1")) == 1
    assert await run_script(scene.server, put_key(key, key_id="a", before=b"", entry=b"2")) == 0
    assert await run_script(scene.server, put_key(key, key_id="a", before=b"1", entry=b"3")) == 1
    assert await scene.server.client.hget(key, "a") == b"3"


async def test_admission_without_limits_costs_no_keys_of_rates(scene: Scene) -> None:
    began = time.time() * 1000 - 60_000
    await scene.admit()
    assert not await scene.server.client.exists(scene.use, f"{scene.use}:open")
    assert int(await scene.server.client.hget(scene.spend, "used")) > began


async def test_a_child_run_has_room_beside_the_runs_above_it_and_no_others(scene: Scene) -> None:
    assert (await scene.admit("top", budget_nano=100, estimate=150)).refused == ""
    assert (await scene.admit("other", budget_nano=100, estimate=10)).refused == "reserved"
    assert (await scene.admit("top~0", budget_nano=100, estimate=60, above=["top"])).refused == ""
    assert (await scene.admit("top~1", budget_nano=100, estimate=60, above=["top"])).refused == ""
    assert await scene.reserved() == {"top": 150, "top~0": 60, "top~1": 60}
    assert (await scene.admit("top~2", budget_nano=100, estimate=60, above=["top"])).refused == "reserved"
    assert (await scene.admit("top~0~0", budget_nano=100, estimate=5, above=["top~0", "top"])).refused == ""
    await scene.count(1, run="top~0", output=60, ended=True, prices=PER_TOKEN)
    await scene.count(1, run="top~1", output=60, ended=True, prices=PER_TOKEN)
    assert (await scene.admit("top~3", budget_nano=100, estimate=60, above=["top"])).refused == "budget"


@pytest.mark.parametrize("budget", [0, 100])
async def test_a_child_run_is_admitted_once_and_takes_one_request_of_the_minute(scene: Scene, budget: int) -> None:
    limits: dict[str, Any] = {"requests_per_minute": 2, "budget_nano": budget, "estimate": 60}
    for _ in range(4):
        assert (await scene.admit("top~0", above=["top"], **limits)).refused == ""
    assert (await scene.admit("top~1", above=["top"], **limits)).refused == ""
    assert (await scene.admit("top~2", above=["top"], **limits)).refused in ("requests", "reserved")
    assert (await scene.admit("top~0", above=["top"], **limits)).refused == ""
