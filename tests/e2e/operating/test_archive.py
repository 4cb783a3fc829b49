"""Ended runs in the archive: followed, listed and shown once the server has forgotten them, sealed, and erased."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Send
from tests.e2e.fleet import PIPELINE, Fleet, Worker, ended, fleet
from tests.e2e.media.test_media import PNG, message_with, upload
from tests.services.cli.process import run
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import ARCHIVE
from tokenbus.bus.server.server import Server
from tokenbus.errors import CursorAhead, RunNotFound
from tokenbus_services.mock_provider import MockProvider, Reply, Script, ToolCall, Turn

OURS, THEIRS = "swordfish", "halibut"
SCRIPTS = [Script(name=word, turns=(Turn(says=Reply(text=f"It is {word} again.")),)) for word in (OURS, THEIRS)]
KEY = "k" * 40
CONSOLE = '[gateway]\n[console]\nroles_without_keys = ["see_runs", "see_content"]\n'


@asynccontextmanager
async def with_archive(
    directory: Path, server_url: str, keys: Keys, provider_url: str, *, more: str = "", keys_in: Path | None = None
) -> AsyncIterator[tuple[Fleet, Worker]]:
    """The pipeline, a recorder, and a blob service with an archive."""
    for name in ("store", "bus"):
        (directory / name).mkdir()
    sealing = f'[archive]\nkeys = "{keys_in}"\n' if keys_in else "[archive]\n"
    async with fleet(directory / "store", server_url, keys, provider_url, ["blobs"], sealing) as store:
        [blobs] = store.workers
        toml = f'\n[blobs]\nservice_url = "{blobs.url}"\n{sealing}{more}'
        async with fleet(directory / "bus", server_url, keys, provider_url, [*PIPELINE, "recorder"], toml) as bus:
            yield bus, blobs


async def forget(server: Server, keys: Keys, runs: list[str]) -> None:
    """Wait until the runs are archived; then let the server forget them, as their expiry does."""

    async def archived() -> bool:
        return not any([await server.client.hexists(keys.run(name), ARCHIVE) for name in runs])

    await eventually(archived, timeout=120)
    for name in runs:
        await server.client.unlink(*keys.kept_of(name))
        async for key in server.client.scan_iter(match=f"{keys.prefix}:*index:ended*"):
            await server.client.zrem(key, name)


async def test_each_run_of_a_tree_is_followed_from_the_archive_and_the_order_of_the_tree_is_not(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    asks = Reply(tool_calls=(ToolCall(name="helper", arguments={"task": "go"}),))
    root = Script(name="asks", turns=(Turn(says=asks), Turn(says=Reply(text="Thanks."))))
    helper = f'[tools.helper]\nkind = "run"\nprovider = "anthropic"\nmodel = "{OURS}"\n'
    async with (
        MockProvider([*SCRIPTS, root]) as provider,
        with_archive(tmp_path, server_url, keys, provider.url, more=helper) as (bus, blobs),
        Client(server_url, prefix=keys.prefix, blobs=blobs.url) as client,
    ):
        await bus.start("tools")
        run = await send("asks", tools=[{"name": "helper"}])
        tree, alone = [run, f"{run}~0"], await send(THEIRS)
        await ended(server.client, keys, [*tree, alone])
        before = {name: [event async for event in client.follow(name)] for name in (*tree, alone)}
        await forget(server, keys, [*tree, alone])
        for name in (*tree, alone):
            assert [event async for event in client.follow(name)] == before[name]
        with pytest.raises(RunNotFound):
            _ = [step async for step in client.follow_tree(run)]
        assert [step.event async for step in client.follow_tree(alone)] == before[alone], "a tree of one has no order"


async def test_what_the_server_forgot_is_followed_listed_and_shown(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with (
        MockProvider(SCRIPTS) as provider,
        with_archive(tmp_path, server_url, keys, provider.url, more=CONSOLE) as (bus, blobs),
    ):
        [gateway] = await bus.start("gateway")
        image = await upload(blobs.url, PNG)
        ours = await send(OURS, metadata={"tenant": "acme"}, messages=message_with(image))
        await ended(server.client, keys, [ours])
        theirs = await send(THEIRS)
        async with Client(server_url, prefix=keys.prefix, blobs=blobs.url) as client:
            await ended(server.client, keys, [theirs])
            before = [event async for event in client.follow(ours)]
            [info] = (await client.describe([ours])).values()
            await forget(server, keys, [ours, theirs])

            assert [event async for event in client.follow(ours)] == before
            middle = before[2].seq
            assert [event async for event in client.follow(ours, after=middle)] == before[3:]
            assert [event async for event in client.follow(ours, after=before[-1].seq)] == []
            with pytest.raises(CursorAhead):
                _ = [event async for event in client.follow(ours, after=1000)]
            assert (await client.result(ours)).text == f"It is {OURS} again."
            with pytest.raises(RunNotFound):
                _ = [event async for event in client.follow("never", wait_s=0.1)]
            listed = [found async for found in client.runs(archived=True)]
            assert [found.run for found in listed] == [theirs, ours]
            assert listed[1] == info
            assert [found.run async for found in client.runs(archived=True, oldest_first=True)] == [ours, theirs]
            assert [found.run async for found in client.runs(archived=True, tenant="acme")] == [ours]
            assert [found async for found in client.runs(archived=True, state="open")] == []
            assert [found async for found in client.runs()] == []

        await seen_at_the_gateway(gateway, ours, theirs, [event.seq for event in before])
        env = {"TOKENBUS_CONFIG": str(tmp_path / "bus" / "tokenbus.toml")}
        said = [json.loads(line) for line in (await run("runs", "--archived", "--json", **env)).out.splitlines()]
        assert [found["run"] for found in said] == [theirs, ours]

        shown = json.loads((await run("erase", "--tenant", "acme", "--dry-run", "--json", **env)).out)
        assert (shown["runs"], shown["found"]["archived logs"]) == (1, 1)
        erased = await run("erase", "--tenant", "acme", "--yes", "--json", **env)
        proof = json.loads(erased.out)
        assert (erased.code, proof["erased"]["archived logs"], proof["erased"]["blobs"], proof["left"]) == (0, 1, 1, {})
        assert [found["run"] for found in await archived_runs(blobs)] == [theirs]
        assert not any(ours in str(path) for path in objects(tmp_path) if "gone" not in path.parts)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            assert (await http.get(f"/runs/{ours}")).status_code == 404
            assert (await http.get(f"/runs/{theirs}")).status_code == 200
        entries = [json.loads(line) for line in (await run("audit", "--json", **env)).out.splitlines()]
        assert entries[0]["facts"]["erased"]["archived logs"] == 1


async def seen_at_the_gateway(gateway: Worker, ours: str, theirs: str, numbers: list[int]) -> None:
    """The archived runs over HTTP and at the console. ``numbers``: seqs of the events of ``ours``."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        whole = (await http.get(f"/runs/{ours}")).json()
        assert (whole["text"], whole["status"]) == (f"It is {OURS} again.", "completed")
        stream = (await http.get(f"/runs/{ours}/events", params={"after": numbers[2]})).text
        ids = [int(line.removeprefix("id: ")) for line in stream.splitlines() if line.startswith("id: ")]
        assert ids == numbers[3:]
        page = (await http.get("/runs", params={"archived": "true", "limit": 1})).json()
        then = (await http.get("/runs", params={"archived": "true", "limit": 1, "after": page["next"]})).json()
        assert [found["run"] for found in page["runs"] + then["runs"]] == [theirs, ours]
        history = (await http.get("/console/api/history")).json()["rows"]
        assert [row["info"]["run"] for row in history] == [theirs, ours]
        assert history[1]["metadata"]["tenant"] == "acme"
        found = (await http.get("/console/api/history", params={"words": OURS})).json()["rows"]
        assert [row["info"]["run"] for row in found] == [ours]
        shown = (await http.get(f"/console/api/runs/{ours}")).json()
        assert (shown["row"]["state"], shown["last_seq"]) == ("completed", numbers[-1])
        assert shown["attempts"]
        assert OURS in (await http.get(f"/console/api/runs/{ours}/events")).text
        assert (await http.get(f"/console/api/runs/{ours}/state")).json()["state"] == "completed"


async def test_a_deleted_key_erases_what_it_sealed(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    secrets = tmp_path / "keys"
    secrets.mkdir()
    (secrets / "acme%2Feu.key").write_text(KEY)
    async with (
        MockProvider(SCRIPTS) as provider,
        with_archive(tmp_path, server_url, keys, provider.url, keys_in=secrets) as (_, blobs),
    ):
        ours, theirs = await send(OURS, metadata={"tenant": "acme/eu"}), await send(THEIRS)
        await ended(server.client, keys, [ours, theirs])
        await forget(server, keys, [ours, theirs])
        stored = {path.name.partition("-")[2]: path.read_bytes() for path in objects(tmp_path) if "logs" in path.parts}
        assert set(stored) == {ours, theirs}
        async with Client(server_url, prefix=keys.prefix, blobs=blobs.url) as client:
            assert (await client.result(ours)).text == f"It is {OURS} again."
            (secrets / "acme%2Feu.key").write_text(f"{'n' * 40}\n{KEY}\n")  # a new key; the old one opens
            assert (await client.result(ours)).text == f"It is {OURS} again."
            (secrets / "acme%2Feu.key").unlink()
            with pytest.raises(RunNotFound):
                await client.result(ours, wait_s=0.1)
            assert [found["run"] for found in await archived_runs(blobs)] == [theirs]
            assert (await client.result(theirs)).text == f"It is {THEIRS} again."


async def test_a_recorder_that_is_killed_at_any_time_archives_each_run_once(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with (
        MockProvider(SCRIPTS) as provider,
        with_archive(tmp_path, server_url, keys, provider.url) as (bus, blobs),
    ):
        names: list[str] = []
        for _ in range(4):
            names += [await send(OURS) for _ in range(5)]
            recorder = bus.workers[-1]
            await ended(server.client, keys, names)  # its work begins
            recorder.kill()
            await bus.start("recorder")
        await forget(server, keys, names)
        found = await archived_runs(blobs)
        assert sorted(each["run"] for each in found) == sorted(names)
        async with Client(server_url, prefix=keys.prefix, blobs=blobs.url) as client:
            for name in names:
                assert (await client.result(name)).text == f"It is {OURS} again."


async def archived_runs(blobs: Worker) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=blobs.url, timeout=60) as http:
        return (await http.get("/archive/runs")).json()["runs"]


def objects(directory: Path) -> list[Path]:
    """The files of the archive."""
    return [path for path in (directory / "store").rglob("archive/**/*") if path.is_file()]
