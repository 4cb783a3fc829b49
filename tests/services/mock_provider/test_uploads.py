"""The file APIs of the mock provider, as the providers' own SDKs use them."""

from __future__ import annotations

import io
from hashlib import sha256
from typing import Any

import pytest

from tests.services.mock_provider.requests import one_turn, serving
from tokenbus_services.mock_provider import MockProvider, Reply

CONTENT = bytes(range(256)) * 300 + b"\r\n--\r\n"
HELLO = one_turn(Reply(text="Hello"))


def stored(server: MockProvider, media_type: str) -> str:
    """The id of the one file, whose content came as it was."""
    [file] = server.files.files.values()
    assert (file.sha256, file.size, file.media_type) == (sha256(CONTENT).hexdigest(), len(CONTENT), media_type)
    return file.file_id


async def test_the_anthropic_sdk_uploads_and_names_a_file() -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed")
    async with (
        serving(HELLO) as (server, _),
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        betas = ["files-api-2025-04-14"]
        upload = ("a.png", io.BytesIO(CONTENT), "image/png")
        made = await client.beta.files.upload(file=upload, expires_in_seconds=3600, betas=betas)
        assert made.id == stored(server, "image/png")
        assert made.expires_at is not None
        image = {"type": "image", "source": {"type": "file", "file_id": made.id}}
        request: dict[str, Any] = {"model": "one-turn", "max_tokens": 9, "betas": betas}
        request["messages"] = [{"role": "user", "content": [image]}]
        assert (await client.beta.messages.create(**request)).content[0].text == "Hello"
        server.files.expire(made.id)
        with pytest.raises(anthropic.NotFoundError, match=made.id):
            await client.beta.messages.create(**request)


async def test_the_openai_sdk_uploads_and_names_a_file() -> None:
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    async with (
        serving(HELLO) as (server, _),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        made = await client.files.create(
            file=("a.pdf", io.BytesIO(CONTENT), "application/pdf"),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert made.id == stored(server, "application/pdf")
        assert made.expires_at is not None
        part = {"type": "input_file", "file_id": made.id}
        request: dict[str, Any] = {"model": "one-turn", "input": [{"role": "user", "content": [part]}]}
        assert (await client.responses.create(**request)).output_text == "Hello"
        server.files.expire(made.id)
        with pytest.raises(openai.NotFoundError, match=made.id):
            await client.responses.create(**request)
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=("a.pdf", io.BytesIO(CONTENT)), purpose="fine-tune")


async def test_the_google_sdk_uploads_and_names_a_file() -> None:
    genai = pytest.importorskip("google.genai", reason="the google-genai SDK is not installed")
    types, errors = genai.types, pytest.importorskip("google.genai.errors")
    async with serving(HELLO) as (server, _):
        server.files.processing = 1
        client = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=server.url, api_version="v1beta"))
        try:
            made = await client.aio.files.upload(
                file=io.BytesIO(CONTENT), config=types.UploadFileConfig(mime_type="video/mp4")
            )
            assert made.uri == stored(server, "video/mp4")
            assert made.state == types.FileState.PROCESSING
            assert (await client.aio.files.get(name=made.name)).state == types.FileState.ACTIVE
            contents = [types.Part.from_uri(file_uri=made.uri, mime_type="video/mp4")]
            assert (await client.aio.models.generate_content(model="one-turn", contents=contents)).text == "Hello"
            server.files.expire(made.uri)
            with pytest.raises(errors.ClientError, match="permission"):
                await client.aio.models.generate_content(model="one-turn", contents=contents)
        finally:
            await client.aio.aclose()
