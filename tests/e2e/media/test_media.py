"""Media by reference through the running services: to the provider in full, over the bus as a name."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import PIPELINE, Fleet, Worker, ended, fleet
from tests.e2e.tools.test_tool_images import DRAW, SPOKEN, TOOL, WRITTEN
from tests.services.tools.sample_tools import draw
from tokenbus import Client
from tokenbus.blobs import blob_id_of
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import BlobCorrupt
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Turn

MB = 2**20
PNG = b"\x89PNG\r\n\x1a\n"
OWN_STORE = '\n[blobs]\nloader = "tests.e2e.media.own_store:create"\n'
SEES = Script(name="sees", turns=(Turn(says=Reply(text="I see.")),))


@asynccontextmanager
async def with_store(
    directory: Path, server_url: str, keys: Keys, provider_url: str, more: str = ""
) -> AsyncIterator[tuple[Fleet, Worker]]:
    """The pipeline and a blob service."""
    for name in ("store", "bus"):
        (directory / name).mkdir()
    async with fleet(directory / "store", server_url, keys, provider_url, ["blobs"]) as store:
        [blobs] = store.workers
        toml = f'\n[blobs]\nservice_url = "{blobs.url}"\n{more}'
        async with fleet(directory / "bus", server_url, keys, provider_url, PIPELINE, toml) as bus:
            yield bus, blobs


async def upload(url: str, content: bytes, media_type: str = "image/png") -> dict[str, str]:
    """As any client would do it; returns the source of a message's image."""
    async with httpx.AsyncClient(timeout=60) as http:
        answer = (await http.post(f"{url}/blobs", content=content, headers={"content-type": media_type})).json()
    return {"type": "blob", "blob_id": answer["blob_id"], "media_type": media_type}


def message_with(*sources: dict[str, str]) -> list[dict[str, Any]]:
    images = [{"type": "image", "source": source} for source in sources]
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *images]}]


async def bus_bytes(server: Server, keys: Keys) -> int:
    """What the server holds of this deployment."""
    return sum(
        [await server.client.memory_usage(key, samples=0) async for key in server.client.scan_iter(f"{keys.prefix}:*")]
    )


def most_memory(worker: Worker) -> int:
    """Bytes of a process's memory, at its highest."""
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


async def test_20_mb_of_image_by_reference_leave_bus_and_fetcher_flat(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    image = PNG + bytes(range(256)) * (20 * MB // 256)
    async with (
        MockProvider([SEES]) as provider,
        with_store(tmp_path, server_url, keys, provider.url) as (bus, blobs),
    ):
        await ended(server.client, keys, [await send("sees", provider="openai-responses", id="first")])
        source = await upload(blobs.url, image)
        fetcher = bus.worker_of("fetcher")
        before, fetcher_before = await bus_bytes(server, keys), most_memory(fetcher)
        run = await send("sees", provider="openai-responses", messages=message_with(source), id="large")
        logs: Any = await ended(server.client, keys, [run])
        after, fetcher_after = await bus_bytes(server, keys), most_memory(fetcher)
        body = provider.requests[-1].http_request.body
    assert logs[run][-1]["type"] == "completed", logs[run][-1]
    judge.check(logs[run])
    assert b64encode(image) in body
    assert after - before < 64 * 1024
    assert fetcher_after - fetcher_before < len(image)
    print(f"bus: {after - before} bytes more; fetcher: {(fetcher_after - fetcher_before) / MB:.1f} MB at its highest")


async def test_large_base64_of_a_request_is_in_the_store_and_not_in_the_runs_records(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    image = PNG + bytes(range(256)) * (MB // 256)
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(image).decode()}
    async with (
        MockProvider([SEES]) as provider,
        with_store(tmp_path, server_url, keys, provider.url) as (_, blobs),
        httpx.AsyncClient(timeout=60) as http,
    ):
        run = await send("sees", provider="gemini", messages=message_with(source))
        logs: Any = await ended(server.client, keys, [run])
        body = provider.requests[-1].http_request.body
        stored = await http.get(f"{blobs.url}/blobs/{blob_id_of(image)}")
    assert logs[run][-1]["type"] == "completed", logs[run][-1]
    assert b64encode(image) in body
    assert (stored.content, stored.headers["content-type"]) == (image, "image/png")
    assert await bus_bytes(server, keys) < 64 * 1024


async def test_without_a_store_base64_is_sent_unchanged_and_a_reference_fails_as_retryable(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    image = PNG + bytes(MB // 4)
    value = {"type": "base64", "media_type": "image/png", "data": b64encode(image).decode()}
    name = {"type": "blob", "media_type": "image/png", "blob_id": blob_id_of(image)}
    away = '\n[blobs]\nservice_url = "http://127.0.0.1:9"\n[retry]\nmax_attempts = 2\nbase_delay_s = 0.01\n'
    async with deployed([SEES], PIPELINE, away) as (provider, _):
        runs = [await send("sees", messages=message_with(source)) for source in (value, name)]
        logs: Any = await ended(server.client, keys, runs)
        bodies = [exchange.http_request.body for exchange in provider.requests]
    by_value, by_name = (logs[run] for run in runs)
    assert by_value[-1]["type"] == "completed", by_value[-1]
    assert len(bodies) == 1
    assert b64encode(image) in bodies[0]
    assert [event["type"] for event in by_name] == ["started", "retrying", "failed"]
    error = by_name[-1]["error"]
    assert (error["code"], error["class"], error["retryable"]) == ("blob_unavailable", "server", True)
    assert error["where"] == "messages[0].content[1]"


async def test_content_that_cannot_be_sent_fails_before_any_call_and_its_place_is_named(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with (
        MockProvider([SEES]) as provider,
        with_store(tmp_path, server_url, keys, provider.url) as (_, blobs),
    ):
        png = await upload(blobs.url, PNG)
        large = await upload(blobs.url, PNG + bytes(8 * MB))
        sources = [
            png | {"blob_id": blob_id_of(b"never stored")},
            png | {"blob_id": "sha256:../../x"},
            png | {"media_type": "image/webp"},
            png | {"size_bytes": 9},
            await upload(blobs.url, b"<svg/>", "image/svg+xml"),
            large,
        ]
        runs = [await send("sees", messages=message_with(png, source)) for source in sources]
        logs: Any = await ended(server.client, keys, runs)
        assert len(provider.requests) == 0
    errors = [logs[run][-1]["error"] for run in runs]
    assert {error["class"] for error in errors} == {"invalid_request"}
    at = "messages[0].content[2]"
    assert [(error["code"], error["where"]) for error in errors] == [
        ("blob_not_found", at),
        ("blob_refused", at),
        ("request_invalid", f"{at}.source.media_type"),
        ("request_invalid", f"{at}.source.size_bytes"),
        ("request_invalid", f"{at}.source.media_type"),
        ("request_invalid", at),
    ]


async def test_a_custom_store_replaces_the_blob_service(
    server: Server, keys: Keys, send: Send, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deployed: Deploy
) -> None:
    image = PNG + bytes(MB // 4)
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setenv("OWN_STORE", str(own))
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(image).decode()}
    async with deployed([SEES], PIPELINE, OWN_STORE) as (provider, _):
        run = await send("sees", messages=message_with(source))
        logs: Any = await ended(server.client, keys, [run])
        body = provider.requests[-1].http_request.body
    assert logs[run][-1]["type"] == "completed", logs[run][-1]
    assert b64encode(image) in body
    assert [path.read_bytes() for path in own.iterdir()] == [image]


async def test_an_image_of_a_tool_reaches_the_model_by_its_blob_in_both_modes(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    drawn = draw().data
    async with (
        MockProvider([SPOKEN, WRITTEN]) as provider,
        with_store(tmp_path, server_url, keys, provider.url, DRAW) as (bus, _),
    ):
        await bus.start("tools")
        chat = await send("spoken", tools=[TOOL], id="chat")
        prefill = await send("written", tools=[TOOL], id="prefill", mode="prefill", participant="Claude")
        logs: Any = await ended(server.client, keys, [chat, prefill])
        bodies = [exchange.http_request.body for exchange in provider.requests]
        records = [await server.client.hgetall(keys.run(run)) for run in (chat, prefill)]
    for log in logs.values():
        judge.check(log)
        assert log[-1]["type"] == "completed", log[-1]
        [result] = [e for e in log if e["type"] == "block_complete" and e["kind"] == "tool_result"]
        shown = {"media_type": "image/png", "blob_id": blob_id_of(drawn), "size_bytes": len(drawn)}
        assert result["images"] == [shown]
    encoded = b64encode(drawn)
    assert sum(encoded in body for body in bodies) == 2
    assert not any(encoded in value for record in records for value in record.values())


def spoil(directory: Path, blob_id: str) -> None:
    """What a disk may do to a blob."""
    [stored] = [p for p in directory.rglob("*") if blob_id[7:] in str(p) and p.is_file() and p.stat().st_size]
    with stored.open("r+b") as file:
        file.seek(stored.stat().st_size // 2)
        file.write(b"bad")


@pytest.mark.parametrize("size", [4_000, 3 * MB], ids=["small", "large"])
async def test_a_corrupt_blob_is_reported_before_a_provider_is_called_and_never_retried(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, size: int
) -> None:
    async with (
        MockProvider([SEES]) as provider,
        with_store(tmp_path, server_url, keys, provider.url) as (_, blobs),
        Client(server_url, prefix=keys.prefix, blobs=blobs.url) as bus,
    ):
        sound = await bus.blobs.put(PNG + bytes(size), "image/png")
        spoilt = await bus.blobs.put(PNG + b"x" * size, "image/png")
        spoil(tmp_path, spoilt.blob_id)
        sources = [{"type": "blob", "blob_id": b.blob_id, "media_type": b.media_type} for b in (sound, spoilt)]
        run = await send("sees", messages=message_with(*sources), fallback=[{"provider": "gemini", "model": "sees"}])
        log: Any = (await ended(server.client, keys, [run]))[run]
        with pytest.raises(BlobCorrupt):
            await bus.blobs.get(spoilt.blob_id)
        request_count = len(provider.requests)
        again = await send("sees", messages=message_with(sources[0]))
        whole: Any = (await ended(server.client, keys, [again]))[again]
    judge.check(log)
    assert [e["type"] for e in log] == ["started", "failed"]
    assert (log[-1]["error"]["code"], log[-1]["error"]["where"]) == ("blob_corrupt", "messages[0].content[2]")
    assert "retryable" not in log[-1]["error"]
    assert request_count == 0
    assert whole[-1]["type"] == "completed"
