"""Large media in and out by reference: what it costs the bus at its highest, measured at a server of the test's own."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import sender
from tests.e2e.fleet import ended
from tests.e2e.media.test_images import events_of_kind, images_api
from tests.e2e.media.test_media import MB, PNG, message_with, upload, with_store
from tests.servers import binary
from tokenbus.blobs import blob_id_of
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Picture, Reply, Script, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer

LARGE = PNG + bytes(range(256)) * (20 * MB // 256)
SCRIPTS = [
    Script(name="sees", turns=(Turn(says=Reply(text="I see.")),)),
    Script(name="draws", turns=(Turn(says=Reply(pictures=(Picture(data=LARGE),))),)),
    Script(name="draws-small", turns=(Turn(says=Reply(pictures=(Picture(data=PNG + b"small"),))),)),
]
KEYS = Keys(prefix="memory", partitions=4)


async def peak(server: Server) -> int:
    """The most memory that the server ever took, in bytes."""
    return int((await server.client.info("memory"))["used_memory_peak"])


async def largest_key(server: Server) -> int:
    """Bytes of the largest key."""
    sizes = [await server.client.memory_usage(key, samples=0) async for key in server.client.scan_iter("memory:*")]
    return max(sizes)


@pytest.mark.timeout(180)
async def test_20_mb_in_and_20_mb_out_do_not_raise_the_peak_memory(
    tmp_path: Path,
) -> None:
    with EmbeddedServer(binary=binary()) as own:
        async with (
            Server(own.url) as server,
            MockProvider(SCRIPTS) as provider,
            with_store(tmp_path, own.url, KEYS, provider.url, images_api(provider.url)) as (_, blobs),
            httpx.AsyncClient(base_url=blobs.url, timeout=60) as http,
        ):
            send = sender(server, KEYS)
            first = [
                await send("sees", provider="openai-responses"),
                await send("draws-small", "A cat.", provider="openai-images"),
            ]
            await ended(server.client, KEYS, first)
            before = await peak(server)

            source = await upload(blobs.url, LARGE)
            run = await send("sees", provider="openai-responses", messages=message_with(source))
            logs: Any = await ended(server.client, KEYS, [run], timeout=90)
            assert logs[run][-1]["type"] == "completed", logs[run][-1]
            assert b64encode(LARGE) in provider.requests[-1].http_request.body
            after_in = await peak(server)

            run = await send("draws", "A cat.", provider="openai-images")
            logs = await ended(server.client, KEYS, [run], timeout=90)
            [image] = events_of_kind(logs[run], "block_complete")
            assert image["image"]["blob_id"] == blob_id_of(LARGE)
            stored = (await http.get(f"/blobs/{blob_id_of(LARGE)}")).content
            assert sha256(stored).digest() == sha256(LARGE).digest()
            after_out, largest = await peak(server), await largest_key(server)
    came, went = (after_in - before) / MB, (after_out - after_in) / MB
    print(f"peak of the bus: {came:.2f} MB more for 20 MB in, {went:.2f} MB more for 20 MB out; a key: {largest} bytes")
    assert after_in - before < MB
    assert largest < MB
    assert after_out - after_in < MB
