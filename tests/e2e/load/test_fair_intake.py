"""However much one tenant has waiting: a cancel overtakes it, and the first run of another does not wait behind it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.e2e.conftest import Deploy
from tests.e2e.fleet import PIPELINE, ended
from tests.waiting import eventually
from tokenbus.bus.keys import Keys, order_keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key
from tokenbus_services.mock_provider import Delivery, Reply, Script, Turn

QUICK = Script(name="quick", turns=(Turn(says=Reply(text="done")),))
ENDLESS = Script(name="endless", turns=(Turn(says=Reply(text="word " * 3000), delivery=Delivery(pace=5)),))
FLOOD = 1_500


def generate(run: str, model: str, tenant: str) -> dict[str, bytes]:
    """An entry of the inbound stream, as any plain client writes it."""
    message = {"role": "user", "content": run}
    request = {"type": "generate", "id": run, "provider": "anthropic", "model": model, "messages": [message]}
    return {"__data__": msgspec.json.encode({**request, "metadata": {"tenant": tenant}})}


def cancel(run: str) -> dict[str, bytes]:
    return {"__data__": msgspec.json.encode({"type": "cancel", "run": run})}


async def put(server: Server, keys: Keys, *entries: dict[str, bytes]) -> None:
    """All at once, in this order."""
    pipe: Any = server.client.pipeline(transaction=False)
    for entry in entries:
        pipe.xadd(keys.requests, entry)
    await pipe.execute()


async def drop_waiting(server: Server, keys: Keys) -> None:
    """Delete requests that intake has not read: the test is over."""
    await server.client.delete(keys.requests, *order_keys(keys.requests))


@pytest.mark.leaves_pending
async def test_a_cancel_on_the_inbound_stream_overtakes_the_requests_before_it(
    server: Server, keys: Keys, deployed: Deploy
) -> None:
    async with deployed([QUICK, ENDLESS], PIPELINE) as (provider, _):
        await put(server, keys, generate("running", "endless", "x"))
        await provider.until(lambda: any(exchange.reads_sent for exchange in provider.requests))
        flood = [generate(f"flood-{n}", "quick", "big") for n in range(FLOOD)]
        await put(server, keys, *flood, cancel("running"))
        await provider.disconnected(provider.requests[0])
        assert await server.client.xlen(keys.requests) > FLOOD / 3
        log = (await ended(server.client, keys, ["running"]))["running"]
        assert log[-1]["type"] == "cancelled"
        await drop_waiting(server, keys)


@pytest.mark.leaves_pending
async def test_a_cancel_that_overtook_its_own_request_waits_for_it(
    server: Server, keys: Keys, deployed: Deploy
) -> None:
    async with deployed([QUICK, ENDLESS], PIPELINE) as (provider, running):
        flood = [generate(f"flood-{n}", "quick", "big") for n in range(100)]
        await running.workers[0].stop()
        await put(server, keys, *flood, generate("own", "endless", "big"), cancel("own"))
        await running.start(PIPELINE[0])
        logs = await ended(server.client, keys, ["own", "flood-99"])
        assert logs["own"][-1]["type"] == "cancelled"
        assert logs["flood-99"][-1]["type"] == "completed"
        assert "own" not in [exchange.request.user_text for exchange in provider.requests if exchange.request]


@pytest.mark.leaves_pending
async def test_a_tenants_first_run_begins_while_anothers_flood_waits_at_intake(
    server: Server, keys: Keys, deployed: Deploy
) -> None:
    async with deployed([QUICK], PIPELINE):
        flood = [generate(f"flood-{n}", "quick", "big") for n in range(FLOOD)]
        await put(server, keys, *flood, generate("first", "quick", "small"))
        logs = await ended(server.client, keys, ["first"])
        assert logs["first"][-1]["type"] == "completed"
        await drop_waiting(server, keys)
        began = await starts(server, keys)
        before = [run for run, at in began.items() if at < began["first"]]
        assert len(before) < FLOOD * 2 / 3


async def starts(server: Server, keys: Keys) -> dict[str, tuple[int, int]]:
    """When each run was published as started, by the server's clock."""
    found: dict[str, tuple[int, int]] = {}
    for partition in range(keys.partitions):
        for entry, fields in await server.client.xrange(keys.topic(partition, "runs")):
            event = msgspec.json.decode(fields[b"__data__"])
            if event["type"] == "started":
                found[event["run"]] = id_key(entry.decode())
    return found


async def test_a_tenants_first_run_begins_while_anothers_flood_waits_for_calls(
    server: Server, keys: Keys, deployed: Deploy
) -> None:
    """Intake is past; behind it the fetcher has few slots and few places, and long calls in all of them."""
    toml = "[limits]\nruns_per_fetcher = 4\nwaiting_per_fetcher = 8\n"
    slow = Script(name="slow", turns=(Turn(says=Reply(text="one two three four"), delivery=Delivery(pace=20)),))
    async with deployed([QUICK, slow], PIPELINE, toml):
        flood = [f"flood-{n}" for n in range(FLOOD // 3)]
        await put(server, keys, *(generate(run, "slow", "big") for run in flood))

        async def taken_in() -> bool:
            return await server.client.xlen(keys.requests) == 0

        await eventually(taken_in, timeout=120)
        await put(server, keys, generate("first", "quick", "small"))
        await ended(server.client, keys, ["first"])
        turns = [await server.client.xlen(keys.topic(p, "turns")) for p in range(keys.partitions)]
        assert sum(turns) > len(flood) / 3
        await put(server, keys, *(cancel(run) for run in flood))
        logs = await ended(server.client, keys, flood)
        assert {log[-1]["type"] for log in logs.values()} <= {"completed", "cancelled"}

        async def nothing_waits() -> bool:
            return not any([await server.client.xlen(keys.topic(p, "turns")) for p in range(keys.partitions)])

        await eventually(nothing_waits, timeout=60)  # the entries of runs that are over go as their turn comes
