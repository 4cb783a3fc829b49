"""Images are moved out of an answer while it is read: however it is cut, the rest has placeholders instead."""

from __future__ import annotations

import errno
import itertools
import json
import random
from base64 import b64encode
from collections.abc import AsyncIterable
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.fetcher.writing.test_raw_writer import frames, run, writing
from tests.unit.core.test_image_header import PNG
from tokenbus.blobs import BlobRef, blob_id_of
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.core.image_header import found
from tokenbus.errors import BlobTooLarge, BlobUnavailable
from tokenbus.events.frames import Ended
from tokenbus.events.normalized import Image
from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import Generate, Message
from tokenbus.providers import registry
from tokenbus_services.blobs import client as patience
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.fetcher.calls.provider_call import fetch
from tokenbus_services.fetcher.calls.response_relay import CallOptions
from tokenbus_services.fetcher.image_offload import SMALLEST_CHARS, Base64Spool, ImageOffloader, ImageStore
from tokenbus_services.media.blob_cache import RecentBlobs
from tokenbus_services.mock_provider import MockProvider, Picture, Reply, Script, Turn
from tokenbus_services.settings import ProviderSettings

__all__ = ["run"]

LARGE = PNG + random.Random(1).randbytes(SMALLEST_CHARS)
OTHER = PNG + random.Random(2).randbytes(SMALLEST_CHARS + 1)
SMALL = PNG + b"small"


class Store:
    """A blob store that says what it was given."""

    def __init__(self, *problems: Exception) -> None:
        self.problems = list(problems)
        self.kept: list[tuple[bytes, str]] = []

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        whole = content if isinstance(content, bytes) else b"".join([piece async for piece in content])
        if self.problems:
            raise self.problems.pop(0)
        self.kept.append((whole, media_type))
        return BlobRef(blob_id=blob_id_of(whole), media_type=media_type, size=len(whole))

    async def load(self, blob_id: str) -> bytes:
        raise AssertionError("nobody asks for this here")

    async def aclose(self) -> None:
        pass


def lifter_of(store: Store, api: ApiName = "openai-images", *, largest_bytes: int = 2**20) -> ImageOffloader:
    keys = registry.get(api).image_keys
    assert keys
    return ImageOffloader(keys, ImageStore(RecentBlobs(store, 0), largest_bytes=largest_bytes), nullcontext)


async def passed(lifter: ImageOffloader, answer: bytes, *cuts: int) -> bytes:
    """The rest of an answer that is read in these pieces."""
    gone: list[bytes] = []
    places = [0, *sorted({cut for cut in cuts if cut < len(answer)}), len(answer)]
    for begin, end in itertools.pairwise(places):
        read = answer[begin:end]
        gone += [read] if lifter.passes(read) else [piece async for piece in lifter.feed(read)]
    lifter.close()
    return b"".join(gone)


def image(base64: str) -> Image:
    return Image(0, "image/png", base64, final=True)


def answer_of(api: ApiName, content: bytes) -> bytes:
    text = b64encode(content).decode()
    url = f"data:image/png;base64,{text}"
    body: Any = {
        "openai-images": {"created": 1, "data": [{"b64_json": text}]},
        "openai-responses": {"output": [{"type": "image_generation_call", "result": text, "status": "completed"}]},
        "openai-chat": {"choices": [{"message": {"images": [{"image_url": {"url": url}}]}}]},
        "gemini": {"candidates": [{"content": {"parts": [{"inlineData": {"mimeType": "image/png", "data": text}}]}}]},
        "gemini-interactions": {
            "status": "completed",
            "steps": [{"content": [{"type": "image", "mime_type": "image/png", "data": text}]}],
        },
    }[api]
    return json.dumps(body, indent=1 if api == "gemini" else None).encode()


@pytest.mark.parametrize("api", ["openai-images", "openai-responses", "openai-chat", "gemini", "gemini-interactions"])
async def test_the_image_of_each_api_is_stored_and_replaced_by_a_note(api: ApiName) -> None:
    store = Store()
    lifter = lifter_of(store, api)
    gone = await passed(lifter, answer_of(api, LARGE))
    assert store.kept == [(LARGE, "image/png")]
    before, _, behind = answer_of(api, LARGE).partition(b64encode(LARGE))
    assert gone.startswith(before)
    assert gone.endswith(behind)
    offloaded = found(image(gone[len(before) : -len(behind)].decode()), lifter.secret)
    assert (offloaded.blob_id, offloaded.size_bytes, offloaded.base64) == (blob_id_of(LARGE), len(LARGE), "")
    assert (offloaded.width, offloaded.height) == (1024, 768)


@given(
    cuts=st.lists(st.integers(0, 150_000), max_size=12),
    images=st.lists(st.sampled_from([LARGE, OTHER, SMALL]), min_size=1, max_size=3),
    escapes=st.booleans(),
)
async def test_the_answer_is_the_same_for_every_cut_of_the_bytes(
    cuts: list[int], images: list[bytes], escapes: bool
) -> None:
    texts = [b64encode(each).decode() for each in images]
    spelled = [t.replace("/", "\\/").replace("=", "\\u003D") if escapes else t for t in texts]
    items = ",".join(f'{{"about":"\\"b64_json\\":\\"no\\"","b64_json" : "{text}"}}' for text in spelled)
    answer = f'{{"data":[{items}]}}'.encode()
    store = Store()
    lifter = lifter_of(store)
    decoded = json.loads(await passed(lifter, answer, *cuts))
    offloaded = [found(image(item["b64_json"]), lifter.secret) for item in decoded["data"]]
    assert [t.base64 or t.blob_id for t in offloaded] == [
        text if each is SMALL else blob_id_of(each) for each, text in zip(images, texts, strict=True)
    ]
    assert {content for content, _ in store.kept} == set(images) - {SMALL}
    assert len(store.kept) == len(set(images) - {SMALL}), "one that comes twice is stored once"


@pytest.mark.parametrize(
    ("text", "largest"),
    [
        ("A" * (SMALLEST_CHARS + 1), 2**20),
        ("AAA=" * SMALLEST_CHARS, 2**20),
        ("über" + "A" * SMALLEST_CHARS, 2**20),
        ('A\\"' * SMALLEST_CHARS, 2**20),
        (b64encode(LARGE).decode(), 1000),
    ],
    ids=["cut", "padded in the middle", "no base64", "quotes in it", "too large"],
)
async def test_an_answer_without_a_stored_image_is_passed_on_byte_by_byte(text: str, largest: int) -> None:
    answer = f'{{"b64_json":"{text}","b64_json":"{b64encode(SMALL).decode()}"}}'.encode()
    store = Store()
    assert await passed(lifter_of(store, largest_bytes=largest), answer, 100, 5000) == answer
    assert store.kept == []


async def test_a_brief_outage_of_the_store_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0)
    store = Store(BlobUnavailable("blobs", "away"))
    lifter = lifter_of(store)
    assert b64encode(LARGE) not in await passed(lifter, answer_of("openai-images", LARGE))
    assert store.kept == [(LARGE, "image/png")]


async def test_without_a_store_the_image_is_passed_on_unchanged_and_the_next_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0)
    store = Store(*[BlobUnavailable("blobs", "away")] * patience.TRIES)
    lifter = lifter_of(store)
    answer = answer_of("openai-images", LARGE)
    assert await passed(lifter, answer) == answer
    assert store.problems == []
    assert await passed(lifter, answer) == answer
    assert store.kept == [], "it rests"


async def test_a_store_that_refuses_one_image_is_asked_for_the_next() -> None:
    store = Store(BlobTooLarge(2, 1))
    lifter = lifter_of(store)
    answer = answer_of("openai-images", LARGE)
    assert await passed(lifter, answer) == answer
    assert await passed(lifter, answer_of("openai-images", OTHER)) != answer
    assert store.kept == [(OTHER, "image/png")]


async def test_an_incomplete_image_is_not_stored() -> None:
    store = Store()
    answer = answer_of("openai-images", LARGE)
    gone = await passed(lifter_of(store), answer[: len(answer) // 2], 100)
    assert gone == answer.partition(b64encode(LARGE))[0]
    assert store.kept == []


def test_words_that_do_not_know_the_secret_name_no_blob() -> None:
    forged = image(f"tokenbus:{'0' * 32}:{blob_id_of(LARGE)}:9:1:1")
    assert found(forged, "1" * 32) == forged
    assert found(forged, "") == forged


async def test_a_full_disk_ends_the_attempt_and_another_worker_retries(
    server: Server, keys: Keys, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Base64Spool, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Base64Spool, "write", full)
    request = Generate(provider="p", model="m", messages=[Message(role="user", content="A cat.")])
    async with (
        MockProvider([Script(name="m", turns=(Turn(says=Reply(pictures=(Picture(data=LARGE),))),))]) as provider,
        writing(server, keys, run) as attempt,
    ):
        base_url = f"{provider.url}/v1"
        endpoint = Endpoint("p", ProviderSettings(api="openai-images", base_url=base_url, api_key_env=""), {})
        call = endpoint.build(request, []).call
        blob_store = ImageStore(RecentBlobs(Store(), 0), largest_bytes=2**20)
        await fetch(endpoint, request, call, writer=attempt, deadline=None, options=CallOptions(images=blob_store))
        await endpoint.close()
    [*_, last] = await frames(server, keys, run)
    end = last.items[-1]
    assert isinstance(end, Ended)
    assert end.error
    assert (end.error.code, end.error.retryable) == ("disk", True)
