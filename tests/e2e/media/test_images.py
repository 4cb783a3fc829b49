"""Images that models make, through the running services: in order with the text, their bytes in the blob store."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import PIPELINE, ended, fleet, log_of, only_separate
from tests.e2e.media.test_media import MB, bus_bytes, most_memory, upload, with_store
from tests.waiting import eventually
from tokenbus.blobs import blob_id_of
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.client.response import Response
from tokenbus.events.public import decode
from tokenbus_services.mock_provider import Delivery, Fixed, MockProvider, Picture, Reply, Script, ToolCall, Turn

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\x00\x00\x02\x80\x00\x00\x01\xe0"
"""The beginning of one of 640 by 480 pixels."""
CAT = Picture(data=PNG + b"cat" * 1000, previews=(PNG + b"c" * 500, PNG + b"ca" * 500), revised_prompt="a black cat")
DOG = Picture(data=PNG + b"dog" * 1000)
CALL = ToolCall(name="weather", arguments={"city": "B"})
WITH_TEXT = Script(
    name="with-text",
    turns=(
        Turn(says=Reply(text="Here:", pictures=(CAT, DOG), tool_calls=(CALL,))),
        Turn(says=Reply(text="Nice.")),
    ),
)
PICTURES = Script(name="pictures", turns=(Turn(says=Reply(pictures=(CAT, DOG))),))


def images_api(url: str, more: str = "") -> str:
    return f'\n[providers.openai-images]\napi = "openai-images"\nbase_url = "{url}/v1"\napi_key_env = ""\n{more}'


def blob(content: bytes, **known: Any) -> dict[str, Any]:
    """An image as an event describes it."""
    where = {"media_type": "image/png", "blob_id": blob_id_of(content), "size_bytes": len(content)}
    return {**where, "width": 640, "height": 480, **known}


def events_of_kind(log: Any, kind: str) -> list[Any]:
    return [e for e in log if e["type"] == kind and e["kind"] == "image"]


async def test_images_come_in_order_with_the_text_as_blobs_and_go_back_with_the_next_turn(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    calling = {"tools": [WEATHER], "max_tool_depth": 1}
    request: dict[str, dict[str, Any]] = {
        "openai-responses": {"size": "1024x1024", "quality": "low", "previews": 2, "model": "gpt-image-2"},
        "gemini": {},
    }
    async with (
        MockProvider([WITH_TEXT, PICTURES]) as provider,
        with_store(tmp_path, server_url, keys, provider.url, images_api(provider.url)) as (bus, blobs),
    ):
        await bus.start("tools")
        for api, images in request.items():
            await send("with-text", f"hello {api}", provider=api, id=api, images=images, **calling)
        images = {"quality": "low", "count": 2, "previews": 1}
        await send("pictures", "A cat.", provider="openai-images", id="streamed", images=images)
        await send("pictures", "A cat.", provider="openai-images", id="whole", stream=False)
        await send("pictures", "A cat.", provider="openai-images", id="inline", images={"deliver": "base64"})
        logs: Any = await ended(server.client, keys, [*request, "streamed", "whole", "inline"])
        async with httpx.AsyncClient(base_url=blobs.url, timeout=60) as http:
            found = [await http.get(f"/blobs/{blob_id_of(data)}") for data in (CAT.data, DOG.data, *CAT.previews)]
        bodies = [e.http_request.body.decode() for e in provider.requests]
    assert [answer.content for answer in found] == [CAT.data, DOG.data, *CAT.previews]
    for log in logs.values():
        judge.check(log)
        assert log[-1]["type"] == "completed", log[-1]

    for api in request:
        blocks = [e["kind"] for e in logs[api] if e["type"] == "block_complete"]
        assert blocks == ["text", "image", "image", "tool_call", "tool_result", "text"]
        [again] = [body for body in bodies if f"hello {api}" in body and '"Here:"' in body]
        sent = ['"Here:"', *(b64encode(picture.data).decode() for picture in (CAT, DOG))]
        places = [again.index(part) for part in sent]
        assert places == sorted(places)
    made = {"size": "1024x1024", "quality": "low", "model": "gpt-image-2"}
    cat, dog = (e["image"] for e in events_of_kind(logs["openai-responses"], "block_complete"))
    assert (cat, dog) == (blob(CAT.data, revised_prompt="a black cat", **made), blob(DOG.data, **made))
    previews = events_of_kind(logs["openai-responses"], "image_preview")
    assert [e["image"] for e in previews] == [blob(data, **made) for data in CAT.previews]
    assert [e["index"] for e in previews] == [0, 1]
    assert [e["image"]["model"] for e in events_of_kind(logs["gemini"], "block_complete")] == ["with-text"] * 2

    assert [e["prompt"] for e in events_of_kind(logs["streamed"], "block_start")] == ["A cat."] * 2
    made = {"prompt": "A cat.", "model": "pictures", "size": "1024x1024"}
    assert [e["image"] for e in events_of_kind(logs["streamed"], "image_preview")] == [
        blob(CAT.previews[0], quality="low", **made)
    ]
    wanted = [blob(CAT.data, quality="high", **made), blob(DOG.data, quality="high", **made)]
    assert [e["image"] for e in events_of_kind(logs["whole"], "block_complete")] == wanted
    assert events_of_kind(logs["whole"], "image_preview") == []
    inline = [e["image"] for e in events_of_kind(logs["inline"], "block_complete")]
    assert [image["base64"] for image in inline] == [b64encode(p.data).decode() for p in (CAT, DOG)]
    assert not any("blob_id" in image for image in inline)
    assert [(image["size_bytes"], image["width"], image["height"]) for image in inline] == [
        (len(picture.data), 640, 480) for picture in (CAT, DOG)
    ]
    result = Response.of(decode(msgspec.json.encode(e)) for e in logs["whole"])
    assert [image.blob_id for image in result.images] == [blob_id_of(p.data) for p in (CAT, DOG)]


@only_separate("killing a pipeline worker ends the provider's call too")
async def test_a_killed_normalizer_neither_loses_nor_doubles_an_image(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    slow = Script(
        name="slow",
        turns=(Turn(says=Reply(pictures=(CAT, DOG)), delivery=Delivery(cuts=Fixed(size=512), pace=20)),),
    )
    async with (
        MockProvider([slow]) as provider,
        with_store(tmp_path, server_url, keys, provider.url, images_api(provider.url)) as (bus, _),
    ):
        run = await send("slow", "A cat.", provider="openai-images", images={"previews": 2})

        async def begun() -> bool:
            return bool(events_of_kind(await log_of(server.client, keys, run), "image_preview"))

        await eventually(begun)
        normalizer = bus.worker_of("normalizer")
        normalizer.kill()
        await bus.start("normalizer")
        logs: Any = await ended(server.client, keys, [run])
    judge.check(logs[run])
    assert logs[run][-1]["type"] == "completed"
    assert [e["image"]["blob_id"] for e in events_of_kind(logs[run], "image_preview")] == [
        blob_id_of(p) for p in CAT.previews
    ]
    assert [e["image"]["blob_id"] for e in events_of_kind(logs[run], "block_complete")] == [
        blob_id_of(p.data) for p in (CAT, DOG)
    ]


async def test_without_a_blob_store_an_image_is_inline_and_its_run_says_why(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    nowhere = '\n[blobs]\nservice_url = "http://127.0.0.1:9"\n'
    async with (
        MockProvider([PICTURES]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE, images_api(provider.url, nowhere)) as running,
    ):
        runs = [await send("pictures", provider="openai-images", id=f"r{i}", images={"previews": 2}) for i in range(6)]
        logs: Any = await ended(server.client, keys, runs)
        assert running
    for log in logs.values():
        judge.check(log)
        assert log[-1]["type"] == "completed"
        cat, dog = events_of_kind(log, "block_complete")
        assert [e["image"]["base64"] for e in (cat, dog)] == [b64encode(p.data).decode() for p in (CAT, DOG)]
        assert events_of_kind(log, "image_preview") == []
        notes = [note for e in (cat, dog) for note in e["provider_extra"]]
        assert [note["name"] for note in notes] == ["tokenbus.image_not_stored"] * 4


async def test_20_mb_of_image_leave_the_bus_flat(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    large = Picture(data=PNG + bytes(range(256)) * (20 * MB // 256))
    script = Script(name="large", turns=(Turn(says=Reply(pictures=(large,))),))
    async with (
        MockProvider([script]) as provider,
        with_store(tmp_path, server_url, keys, provider.url, images_api(provider.url)) as (_, blobs),
    ):
        run = await send("large", "A cat.", provider="openai-images")
        logs: Any = await ended(server.client, keys, [run])
        async with httpx.AsyncClient(base_url=blobs.url, timeout=60) as http:
            stored = await http.head(f"/blobs/{blob_id_of(large.data)}")
        held = await bus_bytes(server, keys)
    judge.check(logs[run])
    [image] = events_of_kind(logs[run], "block_complete")
    assert image["image"]["size_bytes"] == int(stored.headers["content-length"]) == len(large.data)
    assert held < MB


def edits(*sources: dict[str, str]) -> list[dict[str, Any]]:
    images = [{"type": "image", "source": source} for source in sources]
    return [{"role": "user", "content": [{"type": "text", "text": "As one."}, *images]}]


async def test_images_are_edited_by_reference_and_what_was_made_is_edited_again(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    large, masking = PNG + bytes(range(256)) * (20 * MB // 256), PNG + b"clear" * 50
    inline = {"type": "base64", "media_type": "image/png", "data": b64encode(DOG.data).decode()}
    edited = Script(name="edited", turns=(Turn(says=Reply(pictures=(CAT,))),))
    async with (
        MockProvider([edited]) as provider,
        with_store(tmp_path, server_url, keys, provider.url, images_api(provider.url)) as (bus, blobs),
    ):
        request: dict[str, Any] = {"provider": "openai-images"}
        await ended(server.client, keys, [await send("edited", messages=edits(inline), id="warm", **request)])
        mask = {"source": await upload(blobs.url, masking)}
        [fetcher] = [worker for worker in bus.workers if worker.kind == PIPELINE[0]]
        held, peak = await bus_bytes(server, keys), most_memory(fetcher)
        whole = edits(await upload(blobs.url, large), inline)
        run = await send("edited", messages=whole, images={"mask": mask, "previews": 2}, id="one", **request)
        logs: Any = await ended(server.client, keys, [run])
        grown, risen = await bus_bytes(server, keys) - held, most_memory(fetcher) - peak
        [made] = events_of_kind(logs[run], "block_complete")
        again = {"type": "blob", "media_type": "image/png", "blob_id": made["image"]["blob_id"]}
        by_url = {"type": "url", "url": "https://example.org/a.png"}
        missing = {"source": {**again, "blob_id": blob_id_of(b"never stored")}}
        await send("edited", messages=edits(again), id="again", stream=False, **request)
        await send("edited", messages=edits(again, by_url), id="by_url", **request)
        await send("edited", messages=edits(again), images={"mask": missing}, id="unmasked", **request)
        logs |= await ended(server.client, keys, ["again", "by_url", "unmasked"])
        requests = {exchange.http_request.path: exchange.request for exchange in provider.requests}
        bodies = [exchange.request.body for exchange in provider.requests if exchange.request]
    for log in logs.values():
        judge.check(log)
    assert [logs[name][-1]["type"] for name in ("one", "again", "by_url")] == ["completed"] * 3
    assert requests.keys() == {"/v1/images/edits"}
    _, one, *later = bodies
    assert [file["data"] for file in (*one["image[]"], one["mask"])] == [large, DOG.data, masking]
    assert grown < 64 * 1024
    assert risen < len(large)
    previews = events_of_kind(logs["one"], "image_preview")
    assert [e["image"]["blob_id"] for e in previews] == [blob_id_of(preview) for preview in CAT.previews]
    assert made["image"] == blob(CAT.data, prompt="As one.", model="edited", size="1024x1024", quality="high")
    assert {"image", "images"} == {name for body in later for name in body if name.startswith("image")}
    [named] = [body["images"] for body in later if "images" in body]
    as_data = f"data:image/png;base64,{b64encode(CAT.data).decode()}"
    assert named == [{"image_url": as_data}, {"image_url": "https://example.org/a.png"}]
    [file] = [body["image"] for body in later if "image" in body]
    assert file["data"] == CAT.data
    error = logs["unmasked"][-1]["error"]
    assert (error["code"], error["where"]) == ("blob_not_found", "images.mask")
