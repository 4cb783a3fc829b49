"""What is erased is in no key of the server and no blob, what is of others stays, and the audit says who did it."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.chaos.observer import keys_with
from tests.e2e.conftest import Send
from tests.e2e.fleet import ended
from tests.e2e.media.test_media import PNG, message_with, upload, with_store
from tests.services.cli.process import run
from tests.services.webhooks.test_receiver import AWAY, OLD
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.erase import erase_runs
from tokenbus.bus.keys import Keys
from tokenbus.bus.records import newest_records
from tokenbus.bus.server.server import Server
from tokenbus.bus.webhooks import Deliveries
from tokenbus.events.waits import WaitFate
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Turn

OURS, THEIRS, FORGOTTEN = "swordfish", "halibut", "mackerel"
SCRIPTS = [
    Script(name=word, turns=(Turn(says=Reply(text=f"It is {word} again.")),) * 4) for word in (OURS, THEIRS, FORGOTTEN)
]
TABLES = f"[records]\nsample = 1.0\n[gateway]\n{AWAY}"


async def keys_of_content(server: Server, keys: Keys, word: str) -> set[str]:
    """Every key with this word, but for the names of models that were silent lately, as on a busy machine."""
    return {key for key in await keys_with(server.client, keys.prefix, word) if ":{activity}:" not in key}


async def told_of(server: Server, keys: Keys, count: int) -> bool:
    """Whether so many deliveries wait."""
    return await Deliveries(server, keys, "away").waiting() == count


async def delete_a_session(http: httpx.AsyncClient, server: Server, keys: Keys) -> None:
    """What a session and its runs said, and who wrote to it by which protocol, is nowhere after DELETE."""
    events = "/sessions/gone/events"
    request = {"model": f"anthropic/{FORGOTTEN}"}
    made = await http.post(events, json={"item": {"type": "configure", "request": request}})
    assert made.status_code == 200, made.text
    said = await http.post(events, json={"item": {"type": "message", "content": "hello"}})
    await ended(server.client, keys, [said.json()["fate"]["run"]])
    producer = {"producer-id": f"the {FORGOTTEN} producer", "producer-epoch": "0", "producer-seq": "0"}
    written = await http.post("/v1/stream/sessions/gone", json="hello", headers=producer)
    assert written.status_code == 200, written.text
    await eventually(lambda: told_of(server, keys, 3))
    message = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": f"hello {FORGOTTEN}"}]}
    chat = {"id": "gone", "model": f"anthropic/{FORGOTTEN}", "messages": [message]}
    told = await http.post("/api/chat", json=chat)
    assert told.status_code == 200, told.text
    await eventually(lambda: told_of(server, keys, 4))
    assert await keys_of_content(server, keys, FORGOTTEN)
    kept = await server.client.keys(f"{keys.prefix}:{{gateway}}:*")
    assert {key.split(b":")[2] for key in kept} >= {b"answers", b"chat", b"writers"}
    assert (await http.delete("/sessions/gone")).status_code == 204
    assert await keys_of_content(server, keys, FORGOTTEN) == set()
    kept = await server.client.keys(f"{keys.prefix}:{{gateway}}:*")
    assert not {key.split(b":")[2] for key in kept} & {b"answers", b"chat", b"writers"}


async def test_who_decided_is_forgotten_with_the_run_and_stays_with_an_open_one(server: Server, keys: Keys) -> None:
    for name, status in (("over", "completed"), ("open", "open")):
        fate = WaitFate(wait="1.0", id="d1", decision="allow", by="ann", door="http", at_ms=1)
        fields = {"status": status, "fate:1.0": msgspec.json.encode(fate)}
        await server.client.hset(keys.run(name), mapping=fields)
        await server.client.expire(keys.run(name), 60)
        await server.client.set(keys.decision(name, "d1"), msgspec.json.encode({"fate": fate}), ex=60)
    erased = await erase_runs(server, keys, ["over", "open"])
    assert erased.open == ["open"]
    assert await server.client.exists(keys.decision("over", "d1")) == 0
    assert await server.client.exists(keys.decision("open", "d1")) == 1


async def test_what_is_erased_is_nowhere_and_what_is_anothers_stays(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", OLD)
    async with (
        MockProvider(SCRIPTS) as provider,
        with_store(tmp_path, server_url, keys, provider.url, TABLES) as (fleet, blobs),
    ):
        *_, gateway = await fleet.start("recorder", "webhooks", "gateway")
        env = {"TOKENBUS_CONFIG": str(tmp_path / "bus" / "tokenbus.toml")}
        private, shared = [await upload(blobs.url, PNG + name) for name in (b"private", b"shared")]
        ours = await send(OURS, metadata={"tenant": "acme"}, messages=message_with(private, shared))
        theirs = await send(THEIRS, metadata={"tenant": "other"}, messages=message_with(shared))
        async with Client(server_url, prefix=keys.prefix) as bus:
            session = bus.session("talk", tenant="acme")
            await session.configure({"provider": "anthropic", "model": OURS})
            await session.send(f"about {OURS}")
            await ended(server.client, keys, [ours, theirs])

            async def all_recorded() -> bool:
                states = [info.state async for info in bus.runs(tenant="acme")]
                return states == ["completed"] * 2 and len([1 async for _ in newest_records(server, keys)]) == 3

            await eventually(all_recorded)
            await eventually(lambda: told_of(server, keys, 3))
        assert await keys_of_content(server, keys, OURS)

        shown = json.loads((await run("erase", "--tenant", "acme", "--dry-run", "--json", **env)).out)
        assert (shown["runs"], shown["sessions"]) == (2, 1)
        assert all(shown["found"][place] for place in ("runs", "events", "records", "webhooks"))
        erased = await run("erase", "--tenant", "acme", "--yes", "--json", **env)
        said = json.loads(erased.out)
        assert (said["left"], said["open"], said["blobs_left"]) == ({}, [], 0)
        assert said["still"]
        assert erased.code == 0
        assert await keys_of_content(server, keys, OURS) == set()
        assert await server.client.xlen(keys.log(theirs)) > 0
        assert await keys_of_content(server, keys, THEIRS)
        async with httpx.AsyncClient(base_url=blobs.url, timeout=60) as http:
            statuses = [(await http.get(f"/blobs/{one['blob_id']}")).status_code for one in (private, shared)]
        assert statuses == [404, 200]

        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            asked = {"model": f"anthropic/{FORGOTTEN}", "input": "hello"}
            response = (await http.post("/v1/responses", json=asked)).json()
            assert await keys_of_content(server, keys, FORGOTTEN)
            await eventually(lambda: told_of(server, keys, 2))  # that of the other tenant, and this
            path = f"/v1/responses/{response['id']}"
            deleted = (await http.delete(path)).json()
            assert deleted == {"id": response["id"], "object": "response", "deleted": True}
            assert (await http.get(path)).status_code == 404
            assert await keys_of_content(server, keys, FORGOTTEN) == set()
            unknown = await http.delete(path)
            assert unknown.status_code == 404
            await delete_a_session(http, server, keys)

        entries = [json.loads(line) for line in (await run("audit", "--json", **env)).out.splitlines()]
        assert [entry["action"] for entry in entries] == ["session.delete", "session.configure", "erase", "erase"]
        assert entries[2]["facts"]["run"] in response["id"]
        assert entries[3]["facts"]["tenant"] == "acme"
        assert "@" in entries[3]["by"]
