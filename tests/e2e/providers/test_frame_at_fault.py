"""What one attempt says breaks the connection that carries it, each time: its run ends, and the others continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.censoring import FORBIDDEN, UPSTREAM_FAILURE, censoring
from tests.e2e.conftest import Send
from tests.e2e.fleet import PIPELINE, Kind, ended, fleet, only_separate
from tests.e2e.policies.test_policy_stage import policy
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn

BESIDE = 6
FINE = Script(name="fine", turns=(Turn(says=Reply(text="A word. " * 60), delivery=Delivery(pace=40)),))
BAD = Script(name="bad", turns=(Turn(says=Reply(text=f"Words. {FORBIDDEN.decode()} " + "more " * 20)),))


async def test_a_raw_frame_that_breaks_every_connection_ends_only_its_run(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send
) -> None:
    async with (
        censoring(server_url) as url,
        MockProvider([FINE, BAD]) as provider,
        fleet(tmp_path, url, keys, provider.url, PIPELINE),
    ):
        beside = [await send("fine") for _ in range(BESIDE)]
        bad = await send("bad")
        beside += [await send("fine") for _ in range(BESIDE)]
        logs = await ended(server.client, keys, [*beside, bad])
        later = await send("fine")
        logs |= await ended(server.client, keys, [later])
    assert [logs[run][-1]["type"] for run in (*beside, later)] == ["completed"] * (2 * BESIDE + 1)
    [(_, dead)] = await server.client.xrange(keys.dead)
    last: Any = logs[bad][-1]
    assert (last["type"], last["error"]["code"]) == ("failed", "poison"), last
    assert "FramesRefused" in msgspec.json.decode(dead[b"__data__"])["reason"]


@only_separate("between the stages of a pipeline worker nothing crosses the server")
@pytest.mark.parametrize(
    ("stage", "instead"),
    [("normalizer", b""), ("parser", UPSTREAM_FAILURE)],
    ids=["normalizer, connection broken", "parser, error reply"],
)
async def test_an_entry_that_a_stage_cannot_read_ends_its_run_alone(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send, stage: Kind, instead: bytes
) -> None:
    """Its writer's connection works: only connections of the stage that reads it break.

    Both stages read by the same code, and `test_unreadable_entry` meets both faults there.
    """
    others: list[Kind] = [kind for kind in PIPELINE if kind != stage]
    direct, proxied = tmp_path / "direct", tmp_path / "proxied"
    direct.mkdir()
    proxied.mkdir()
    async with (
        censoring(server_url, instead=instead) as url,
        MockProvider([FINE, BAD]) as provider,
        fleet(direct, server_url, keys, provider.url, others),
        fleet(proxied, url, keys, provider.url, [stage]),
    ):
        beside = [await send("fine") for _ in range(BESIDE)]
        bad = await send("bad")
        beside += [await send("fine") for _ in range(BESIDE)]
        logs = await ended(server.client, keys, [*beside, bad], timeout=60)
        later = [await send("fine") for _ in range(keys.partitions * 2)]
        logs |= await ended(server.client, keys, later, timeout=60)
        await eventually(lambda: _nothing_lags(server, keys))
    assert [logs[run][-1]["type"] for run in (*beside, *later)] == ["completed"] * (len(beside) + len(later))
    last: Any = logs[bad][-1]
    assert (last["type"], last["error"]["code"]) == ("failed", "poison"), last
    assert "cannot be read" in last["error"]["message"]


async def test_drafts_that_the_policy_stage_cannot_read_end_their_run_alone(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send
) -> None:
    direct, proxied = tmp_path / "direct", tmp_path / "proxied"
    direct.mkdir()
    proxied.mkdir()
    good = policy("good", "Replace", word="word", by="WORD")
    async with (
        censoring(server_url) as url,
        MockProvider([FINE, BAD]) as provider,
        fleet(direct, server_url, keys, provider.url, PIPELINE, good),
        fleet(proxied, url, keys, provider.url, ["policy"], good),
    ):
        beside = [await send("fine", policies=["good"]) for _ in range(BESIDE)]
        bad = await send("bad", policies=["good"])
        beside += [await send("fine", policies=["good"]) for _ in range(BESIDE)]
        logs = await ended(server.client, keys, [*beside, bad], timeout=120)
        later = [await send("fine", policies=["good"]) for _ in range(keys.partitions * 2)]
        logs |= await ended(server.client, keys, later, timeout=60)
    assert [logs[run][-1]["type"] for run in (*beside, *later)] == ["completed"] * (len(beside) + len(later))
    last: Any = logs[bad][-1]
    assert last["type"] in ("failed", "incomplete"), last
    assert last["error"]["code"] in ("poison", "policy_terminated", "policy_silent"), last
    assert FORBIDDEN.decode() not in json.dumps(logs[bad])


async def _nothing_lags(server: Server, keys: Keys) -> bool:
    """Whether each stage has done as many bytes as arrived for it."""
    for partition in range(keys.partitions):
        for group in ("normalizer", "parser"):
            arrived, done = await server.client.hmget(keys.lease(partition, group), ["arrived", "done"])
            if int(arrived or 0) != int(done or 0):
                return False
    return True


async def test_a_request_that_breaks_every_connection_becomes_a_failed_run(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send
) -> None:
    """Its publisher could write it: only the connections of the workers break."""
    async with (
        censoring(server_url) as url,
        MockProvider([FINE]) as provider,
        fleet(tmp_path, url, keys, provider.url, PIPELINE),
    ):
        beside = [await send("fine") for _ in range(BESIDE)]
        bad = await send("fine", text=FORBIDDEN.decode(), id="follow-me")
        beside += [await send("fine") for _ in range(BESIDE)]
        logs = await ended(server.client, keys, [*beside, bad], timeout=60)
        assert [logs[run][-1]["type"] for run in beside] == ["completed"] * len(beside)
        last: Any = logs[bad][-1]
        assert (last["type"], last["error"]["code"]) == ("failed", "poison"), last
        assert "cannot be read" in last["error"]["message"]
        [(_, dead)] = await server.client.xrange(keys.dead)
        assert json.loads(dead[b"__data__"])["run"] == bad
