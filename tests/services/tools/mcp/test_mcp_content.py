"""What an MCP result becomes: texts in order, all else as blobs."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import mcp_types as types
import pytest

from tests.services.tools.conftest import MemoryBlobs
from tokenbus.blobs import blob_id_of
from tokenbus.errors import ToolFailure
from tokenbus_services.tools.mcp.server import MAX_BLOBS, outcome_of
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool_call import ToolOutcome


def image(content: bytes = b"png", media_type: str = "image/png") -> types.ImageContent:
    return types.ImageContent(data=b64encode(content).decode(), mime_type=media_type)


def text(value: str) -> types.TextContent:
    return types.TextContent(text=value)


async def outcome(blobs: MemoryBlobs | None, *parts: Any, **fields: Any) -> ToolOutcome:
    return await outcome_of("t", types.CallToolResult(content=list(parts), **fields), Results(10_000, blobs))


async def test_texts_and_resources_are_joined_by_lines(blobs: MemoryBlobs) -> None:
    inside = types.TextResourceContents(uri="file:///a", text="in a")
    link = types.ResourceLink(name="b", uri="file:///b")
    got = await outcome(blobs, text("one"), types.EmbeddedResource(resource=inside), link)
    assert got == ToolOutcome("one\nin a\n[resource b: file:///b]")


async def test_a_result_that_is_one_image_is_its_blob(blobs: MemoryBlobs) -> None:
    got = await outcome(blobs, image())
    assert got.blob_id in blobs.contents
    assert got.content == f"[3 bytes of image/png, stored as blob {got.blob_id}]"


async def test_a_media_type_that_is_none_does_not_lose_the_content(blobs: MemoryBlobs) -> None:
    got = await outcome(blobs, image(media_type="../../x\r\n"))
    assert blobs.media_types[got.blob_id or ""] == "application/octet-stream"


async def test_structured_content_is_used_if_there_is_no_other_content(blobs: MemoryBlobs) -> None:
    assert (await outcome(blobs, structured_content={"a": 1})).content == '{"a":1}'
    assert (await outcome(blobs, text("said"), structured_content={"a": 1})).content == "said"


async def test_the_number_of_kept_blobs_is_bounded(blobs: MemoryBlobs) -> None:
    got = await outcome(blobs, *(image(bytes([n])) for n in range(MAX_BLOBS + 2)))
    assert len(blobs.contents) == MAX_BLOBS
    assert got.content.count("not kept") == 2


async def test_an_image_without_a_blob_store_leaves_the_text() -> None:
    got = await outcome(None, text("here"), image())
    assert got.content.startswith("here\n[image/png, not text; it could not be stored")


async def test_what_is_not_base64_is_a_bad_result(blobs: MemoryBlobs) -> None:
    with pytest.raises(ToolFailure, match="base64"):
        await outcome(blobs, types.ImageContent(data="%%%", mime_type="image/png"))


async def test_an_error_without_a_text_is_still_reported(blobs: MemoryBlobs) -> None:
    with pytest.raises(ToolFailure, match="without an error message") as raised:
        await outcome(blobs, is_error=True)
    assert raised.value.kind == "tool_error"


async def test_images_among_texts_are_shown(blobs: MemoryBlobs) -> None:
    parts: list[Any] = [text("two charts"), image(b"one"), image(b"two", "image/jpeg")]
    results = Results(10_000, blobs, image_bytes=1000)
    got = await outcome_of("t", types.CallToolResult(content=parts), results)
    assert got.content.startswith("two charts\n[3 bytes of image/png")
    assert [(i.media_type, i.blob_id) for i in got.images] == [
        ("image/png", blob_id_of(b"one")),
        ("image/jpeg", blob_id_of(b"two")),
    ]
