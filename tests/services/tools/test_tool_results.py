"""The part of a result that the model sees, and the location of the rest."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.blobs import blob_id_of
from tokenbus.errors import BlobTooLarge, BlobUnavailable
from tokenbus.events.frames import ResultImage
from tokenbus_services.tools import results as results_module
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool_call import Text, ToolOutcome

from .conftest import MakeExecutor, MemoryBlobs, call


async def chunks(*content: bytes) -> AsyncIterator[bytes]:
    for chunk in content:
        yield chunk


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nothing", ""),
        ("data", '"AAE="'),
        ("surrogate", "half ? a pair"),
        ("echo", "{}"),
    ],
)
async def test_each_kind_of_value_has_its_text(run: MakeExecutor, name: str, content: str) -> None:
    assert await run(name).execute(call(name)) == ToolOutcome(content)


@pytest.mark.parametrize("name", ["unserialisable", "cyclic"])
async def test_a_value_that_json_cannot_hold_is_an_error(run: MakeExecutor, name: str) -> None:
    outcome = await run(name).execute(call(name))
    assert outcome.is_error
    assert outcome.content.startswith("the tool returned a value that is not JSON-serializable: ")


async def test_a_result_at_the_limit_stays_whole(run: MakeExecutor, blobs: MemoryBlobs) -> None:
    outcome = await run("give", limit=500).execute(call("give", '{"size": 250, "letter": "é"}'))
    assert outcome == ToolOutcome("é" * 250)
    assert blobs.contents == {}


async def test_a_result_over_the_limit_is_kept_whole_and_shown_in_part(run: MakeExecutor, blobs: MemoryBlobs) -> None:
    outcome = await run("give", limit=500).execute(call("give", '{"size": 251, "letter": "é"}'))
    whole = ("é" * 251).encode()
    assert outcome.blob_id == blob_id_of(whole)
    assert blobs.contents == {outcome.blob_id: whole}
    assert blobs.media_types == {outcome.blob_id: "text/plain;charset=utf-8"}
    assert not outcome.is_error
    beginning, _, note = outcome.content.partition("\n")
    assert set(beginning) == {"é"}
    assert note == f"[truncated; the whole result has 502 bytes and is stored as blob {outcome.blob_id}]"
    assert 498 <= len(outcome.content.encode()) <= 500


async def test_large_json_is_kept_as_json(run: MakeExecutor, blobs: MemoryBlobs) -> None:
    outcome = await run("give_json", limit=500).execute(call("give_json", '{"size": 1000}'))
    assert outcome.blob_id is not None
    assert blobs.media_types[outcome.blob_id] == "application/json"


@pytest.mark.parametrize("failure", [BlobUnavailable("put", "http://internal:8085 refused"), BlobTooLarge(9, 8)])
async def test_a_blob_store_that_fails_costs_only_the_rest(
    run: MakeExecutor, blobs: MemoryBlobs, failure: BlobUnavailable | BlobTooLarge
) -> None:
    blobs.failure = failure
    outcome = await run("give", limit=500).execute(call("give", '{"size": 9999}'))
    assert (outcome.is_error, outcome.blob_id) == (False, None)
    assert outcome.content.startswith("xxx")
    assert outcome.content.endswith(f"\n[truncated; the whole result could not be stored: {failure.code}]")
    assert len(outcome.content.encode()) <= 500


async def test_a_blob_store_that_does_not_answer_is_given_up(
    blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(results_module, "_STORE_S", 0.02)
    monkeypatch.setattr(blobs, "store", silent)
    outcome = await Results(100, blobs).text(Text("x" * 1000))
    assert outcome.content.endswith("could not be stored: blob_unavailable]")


async def test_without_a_blob_store_a_large_result_is_cut() -> None:
    outcome = await Results(100, None).text(Text("x" * 1000))
    assert (outcome.is_error, outcome.blob_id) == (False, None)
    assert len(outcome.content) <= 100


async def test_a_limit_smaller_than_the_note_leaves_the_note(blobs: MemoryBlobs) -> None:
    outcome = await Results(1, blobs).text(Text("xyz"))
    assert outcome.content.startswith("\n[truncated; the whole result has 3 bytes")


async def test_a_streamed_result_is_passed_on_without_being_held(blobs: MemoryBlobs) -> None:
    piece = "é".encode() * 50
    outcome = await Results(200, blobs).stream(chunks(*[piece] * 1000), "text/markdown", "utf-8")
    assert outcome.blob_id is not None
    assert blobs.contents[outcome.blob_id] == piece * 1000
    assert blobs.media_types[outcome.blob_id] == "text/markdown"
    assert outcome.content.startswith("ééé")


async def test_a_character_cut_by_the_limit_or_a_read_is_not_garbled(blobs: MemoryBlobs) -> None:
    whole = ("a" + "€" * 100).encode()
    for cut in range(1, 8):
        outcome = await Results(150, blobs).stream(chunks(whole[:cut], whole[cut:]), "text/plain", "utf-8")
        assert outcome.content.startswith("a€")
        assert "\ufffd" not in outcome.content


async def test_another_charset_is_read_as_what_it_says(blobs: MemoryBlobs) -> None:
    outcome = await Results(100, blobs).stream(chunks("Käse".encode("latin-1")), "text/plain", "iso-8859-1")
    assert outcome == ToolOutcome("Käse")


@pytest.mark.parametrize("charset", ["zlib", "hex", "rot13", "no-such-thing", "utf\0-8", ""])
async def test_a_charset_that_is_none_makes_the_result_a_blob(blobs: MemoryBlobs, charset: str) -> None:
    outcome = await Results(100, blobs).stream(chunks(b"abc"), "text/plain", charset)
    assert outcome.blob_id == blob_id_of(b"abc")


@pytest.mark.parametrize("size", [10, 1000])
async def test_what_is_no_text_is_kept_and_named(blobs: MemoryBlobs, size: int) -> None:
    content = b"\x89PNG\xff" * size
    outcome = await Results(100, blobs).stream(chunks(content), "image/png", "utf-8")
    assert outcome.blob_id == blob_id_of(content)
    assert outcome.content == f"[{len(content)} bytes of image/png, stored as blob {outcome.blob_id}]"
    assert not outcome.is_error


async def test_what_is_no_text_and_cannot_be_kept_is_an_error(blobs: MemoryBlobs) -> None:
    blobs.failure = BlobUnavailable("put", "down")
    outcome = await Results(100, blobs).stream(chunks(b"\x89PNG\xff"), "image/png", "utf-8")
    assert outcome == ToolOutcome("[image/png, not text; it could not be stored: blob_unavailable]", is_error=True)


@given(text=st.text(max_size=300), limit=st.integers(150, 400))
def test_a_result_never_takes_more_than_its_limit(text: str, limit: int) -> None:
    outcome = asyncio.run(Results(limit, None).text(Text(text)))
    assert len(outcome.content.encode()) <= limit
    if len(text.encode()) <= limit:
        assert outcome == ToolOutcome(text)


PNG = b"\x89PNG\r\n\x1a\n"
SHOWN = ResultImage("image/png", blob_id=blob_id_of(PNG), size_bytes=len(PNG))


async def test_an_image_within_the_limit_is_shown_and_kept(blobs: MemoryBlobs) -> None:
    for outcome in (
        await Results(100, blobs, image_bytes=8).blob(PNG, "image/png"),
        await Results(1, blobs, image_bytes=8).stream(chunks(PNG[:3], PNG[3:]), "image/png;x=y", "utf-8"),
    ):
        assert outcome.images == (SHOWN,)
        assert not outcome.is_error
        assert "stored as blob" in outcome.content


@pytest.mark.parametrize(("limit", "media_type"), [(7, "image/png"), (100, "image/tiff"), (100, "image/svg+xml")])
async def test_an_image_that_is_too_large_or_unknown_to_models_is_only_kept(
    blobs: MemoryBlobs, limit: int, media_type: str
) -> None:
    results = Results(4, blobs, image_bytes=limit)
    for outcome in (
        await results.blob(PNG, media_type),
        await results.stream(chunks(PNG[:3], PNG[3:]), media_type, "utf-8"),
    ):
        assert (outcome.images, outcome.blob_id) == ((), blob_id_of(PNG))


async def test_an_image_is_shown_without_a_blob_store_too() -> None:
    outcome = await Results(100, None, image_bytes=8).blob(PNG, "image/png")
    assert outcome == ToolOutcome("[8 bytes of image/png]", images=(ResultImage("image/png", b64encode(PNG).decode()),))


async def test_of_many_images_the_first_are_shown(blobs: MemoryBlobs) -> None:
    results = Results(1000, blobs, image_bytes=20)
    many = [await results.blob(PNG, "image/png") for _ in range(3)]
    outcome = await results.joined([ToolOutcome("three charts"), *many])
    assert outcome.content.startswith("three charts\n[8 bytes of image/png, stored as blob ")
    assert outcome.images == (SHOWN, SHOWN, ResultImage("image/png", blob_id=SHOWN.blob_id))


async def test_a_python_tool_returns_images_alone_or_among_texts(run: MakeExecutor) -> None:
    alone = await run("draw").execute(call("draw"))
    among = await run("report").execute(call("report"))
    assert [image.media_type for image in alone.images] == ["image/png"]
    assert among.content.splitlines()[0] == "a chart"
    assert among.content.splitlines()[2] == '{"points":2}'
    assert among.images == alone.images
