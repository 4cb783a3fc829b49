"""A backup of the server and of the object store, restored after both are lost: as docs/operate/backup.md says."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import sender
from tests.e2e.fleet import PIPELINE, TERMINAL, Fleet, Worker, ended, fleet, log_of
from tests.servers import binary, save
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import ARCHIVE
from tokenbus.bus.server.server import Server
from tokenbus.errors import RunIncomplete
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer

SCRIPTS = [
    Script(name="quick", turns=(Turn(says=Reply(text="one two three")),)),
    Script(name="slow", turns=(Turn(says=Reply(text="one two three"), first=(Stall(after_text="two"),)),)),
]
SETTINGS = "[archive]\n[retry]\nmax_losses = 5\n"


def kill_all(*fleets: Fleet) -> None:
    for worker in [worker for each in fleets for worker in each.workers]:
        worker.kill()


async def says(server: Server, keys: Keys, run: str, text: str) -> bool:
    log = await log_of(server.client, keys, run)
    return text in "".join(str(event.get("text", "")) for event in log)


async def archived(server: Server, keys: Keys, *runs: str) -> bool:
    return not any([await server.client.hexists(keys.run(run), ARCHIVE) for run in runs])


async def test_what_was_ended_is_followed_what_was_open_goes_on_and_nothing_is_doubled(tmp_path: Path) -> None:
    keys = Keys("restored", 2)
    lost, safe, new = (tmp_path / name for name in ("lost", "safe", "new"))
    for path in (lost / "server", lost / "store", lost / "bus", safe, new / "bus"):
        path.mkdir(parents=True)
    async with MockProvider(SCRIPTS) as provider:
        with EmbeddedServer(lost / "server", binary=binary(), appendonly=True) as process:
            async with (
                Server(process.url) as server,
                fleet(lost / "store", process.url, keys, provider.url, ["blobs"], SETTINGS) as store,
            ):
                toml = f'[blobs]\nservice_url = "{store.workers[0].url}"\n{SETTINGS}'
                async with fleet(lost / "bus", process.url, keys, provider.url, [*PIPELINE, "recorder"], toml) as bus:
                    send = sender(server, keys)
                    before = await send("quick")
                    await ended(server.client, keys, [before])
                    open_run, done_later = await send("slow", on_failure="restart"), await send("slow", "hi")
                    for run in (open_run, done_later):
                        await eventually(lambda run=run: says(server, keys, run, "two"))
                    await eventually(lambda: archived(server, keys, before))
                    log_before = await log_of(server.client, keys, before)

                    # The backup: first the server's snapshot, then what is in the object store.
                    await save(server.client)
                    shutil.copy(lost / "server" / "dump.rdb", safe / "dump.rdb")
                    await server.client.xadd(keys.requests, {"__data__": cancel_of(done_later)})
                    after = await send("quick")
                    await ended(server.client, keys, [done_later, after])
                    await eventually(lambda: archived(server, keys, done_later, after))
                    shutil.copytree(lost / "store" / "blobs", safe / "blobs")
                    never = await send("quick")
                    await ended(server.client, keys, [never])
                    kill_all(bus, store)  # both machines burn down
                    await provider_left(bus, store)

        shutil.rmtree(lost)
        (new / "server").mkdir()
        shutil.copy(safe / "dump.rdb", new / "server" / "dump.rdb")
        shutil.copytree(safe / "blobs", new / "store" / "blobs")
        with EmbeddedServer(new / "server", binary=binary()) as process:
            async with (
                Server(process.url) as server,
                fleet(new / "store", process.url, keys, provider.url, ["blobs"], SETTINGS) as store,
            ):
                [blobs] = store.workers
                toml = f'[blobs]\nservice_url = "{blobs.url}"\n{SETTINGS}'
                async with fleet(new / "bus", process.url, keys, provider.url, [*PIPELINE, "recorder"], toml):
                    logs = await ended(server.client, keys, [open_run, done_later])
                    assert await log_of(server.client, keys, before) == log_before
                    await eventually(lambda: archived(server, keys, open_run, done_later))
                    for log in logs.values():
                        assert [event["seq"] for event in log] == list(range(len(log)))
                        assert [event["type"] in TERMINAL for event in log] == [False] * (len(log) - 1) + [True]
                    async with Client(process.url, prefix=keys.prefix, blobs=blobs.url) as client:
                        assert (await client.result(open_run)).text == "one two three"
                        with pytest.raises(RunIncomplete, match="the fetcher was lost"):
                            await client.result(done_later)
                        # The store knows it, and the server does not.
                        assert (await client.result(after)).text == "one two three"
                        listed = [info.run async for info in client.runs(archived=True)]
                        assert sorted(listed) == sorted([before, open_run, done_later, after])
                    assert sorted(await archive_of(blobs)) == sorted([before, open_run, done_later, after])


def cancel_of(run: str) -> str:
    return f'{{"type": "cancel", "run": "{run}"}}'


async def provider_left(*fleets: Fleet) -> None:
    for worker in [worker for each in fleets for worker in each.workers]:
        await worker.process.wait()


async def archive_of(blobs: Worker) -> list[str]:
    async with httpx.AsyncClient(base_url=blobs.url, timeout=60) as http:
        return [info["run"] for info in (await http.get("/archive/runs")).json()["runs"]]
