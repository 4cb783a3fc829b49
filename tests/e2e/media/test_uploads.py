"""Media that providers keep as files, through the running services: sent once, named by every turn and run after it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import ended
from tests.e2e.media.test_media import MB, PNG, bus_bytes, message_with, most_memory, upload, with_store
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Exchange, MockProvider, Reply, Script, Status, ToolCall, Turn

CALL = ToolCall(name="weather", arguments={"city": "B"})
LOOKS = Script(
    name="looks",
    turns=(
        Turn(says=Reply(text="First.", tool_calls=(CALL,))),
        Turn(says=Reply(text="And again.", tool_calls=(CALL,))),
        Turn(says=Reply(text="I see.")),
    ),
)
APIS = ("anthropic", "openai-responses", "gemini")
UPLOADS = "".join(f"\n[providers.{api}.uploads]\n" for api in APIS)
IMAGE = PNG + bytes(range(256)) * 4096
OTHER = IMAGE[::-1]


def calls_of(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Those that were no uploads."""
    return [exchange for exchange in exchanges if exchange.request is not None]


def check(logs: Any) -> None:
    """Each run completed, at its first attempt at each turn."""
    for log in logs.values():
        judge.check(log)
        assert log[-1]["type"] == "completed", log[-1]
        assert not [event for event in log if event["type"] in ("retrying", "restarted")]


@pytest.mark.timeout(120)
async def test_the_same_blob_in_three_turns_and_a_second_run_is_uploaded_once_and_named_by_its_id(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with (
        MockProvider([LOOKS]) as provider,
        with_store(tmp_path, server_url, keys, provider.url, UPLOADS) as (bus, blobs),
    ):
        await bus.start("tools")
        source = await upload(blobs.url, IMAGE)
        for number in range(2):
            runs = [
                await send("looks", provider=api, id=f"{api}-{number}", messages=message_with(source), tools=[WEATHER])
                for api in APIS
            ]
            check(await ended(server.client, keys, runs))
        calls, files = calls_of(provider.requests), provider.files.files
    assert sorted(file.api for file in files.values()) == ["anthropic", "gemini", "openai-chat"]
    assert {file.sha256 for file in files.values()} == {sha256(IMAGE).hexdigest()}
    assert len(calls) == 2 * 3 * len(APIS)
    for call in calls:
        assert call.status == 200
        assert len(call.http_request.body) < 4096
        assert sum(file_id.encode() in call.http_request.body for file_id in files) == 1


@pytest.mark.timeout(120)
async def test_an_expired_file_costs_one_more_call_and_is_invisible_to_subscribers(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with (
        MockProvider([LOOKS]) as provider,
        with_store(tmp_path, server_url, keys, provider.url, UPLOADS) as (bus, blobs),
    ):
        await bus.start("tools")
        source = await upload(blobs.url, IMAGE)
        for number in range(2):
            before = len(provider.requests)
            runs = [
                await send("looks", provider=api, id=f"{api}-{number}", messages=message_with(source), tools=[WEATHER])
                for api in APIS
            ]
            check(await ended(server.client, keys, runs))
            for file_id in list(provider.files.files) if number == 0 else ():
                provider.files.expire(file_id)
        after = provider.requests[before:]
        statuses = [call.status for call in after]
        inside = [call for call in calls_of(after) if b64encode(IMAGE) in call.http_request.body]
    # The file is missing once, so the bytes go inside the request; later turns upload the file again.
    assert sorted(status for status in statuses if status and status != 200) == [403, 404, 404]
    assert len(inside) == len(APIS)
    assert len(provider.files.files) == len(APIS)


@pytest.mark.timeout(120)
async def test_fetchers_share_their_files_and_an_upload_that_fails_costs_no_run(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with (
        MockProvider([LOOKS]) as provider,
        with_store(tmp_path, server_url, keys, provider.url, UPLOADS) as (bus, blobs),
    ):
        await bus.start("fetcher", "tools")
        source, other = await upload(blobs.url, IMAGE), await upload(blobs.url, OTHER)
        fields: dict[str, Any] = {"provider": "anthropic", "tools": [WEATHER]}
        runs = [await send("looks", f"hello {n}", messages=message_with(source), **fields) for n in range(12)]
        check(await ended(server.client, keys, runs))
        made = len(provider.files.files)
        assert 1 <= made <= 2
        runs = [await send("looks", f"hello {n}", messages=message_with(source), **fields) for n in range(4)]
        check(await ended(server.client, keys, runs))
        assert len(provider.files.files) == made
        provider.files.fail_next_uploads(*[Status(status=404)] * 2)
        run = await send("looks", messages=message_with(other), **fields)
        check(await ended(server.client, keys, [run]))
        calls = calls_of(provider.requests)
    assert sum(b64encode(OTHER) in call.http_request.body for call in calls) == 3
    assert not any(b64encode(IMAGE) in call.http_request.body for call in calls)


@pytest.mark.timeout(120)
async def test_an_upload_of_20_mb_leaves_bus_and_fetcher_flat(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    image = PNG + bytes(range(256)) * (20 * MB // 256)
    async with (
        MockProvider([LOOKS]) as provider,
        with_store(tmp_path, server_url, keys, provider.url, UPLOADS) as (bus, blobs),
    ):
        await bus.start("tools")
        fields: dict[str, Any] = {"provider": "openai-responses", "tools": [WEATHER]}
        first = await send("looks", messages=message_with(await upload(blobs.url, IMAGE)), **fields)
        await ended(server.client, keys, [first])
        source = await upload(blobs.url, image)
        fetcher = bus.worker_of("fetcher")
        before, fetcher_before = await bus_bytes(server, keys), most_memory(fetcher)
        run = await send("looks", messages=message_with(source), **fields)
        check(await ended(server.client, keys, [run]))
        after, fetcher_after = await bus_bytes(server, keys), most_memory(fetcher)
        sizes = [len(call.http_request.body) for call in calls_of(provider.requests)]
        digests = {file.sha256 for file in provider.files.files.values()}
    assert sha256(image).hexdigest() in digests
    assert max(sizes) < 4096
    assert after - before < 64 * 1024
    assert fetcher_after - fetcher_before < len(image) // 2
    print(f"bus: {after - before} bytes more; fetcher: {(fetcher_after - fetcher_before) / MB:.1f} MB at its highest")
