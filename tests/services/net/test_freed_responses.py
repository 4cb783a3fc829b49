"""A closed response is freed at once, with its request and its connection, without Python's collector."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Generator
from typing import Any, Literal, get_args
from weakref import ref

import httpx
import pytest

from tokenbus_services.mock_provider import MockProvider, Reply, Script, Turn
from tokenbus_services.net.http_client import Client

Use = Literal["read to its end", "closed after its head", "closed in its body", "read by the client"]
ANSWER = Script(name="answer", turns=(Turn(says=Reply(text="some words")),))


@pytest.fixture
def no_collector() -> Generator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def provider() -> AsyncGenerator[MockProvider]:
    async with MockProvider([ANSWER]) as running:
        yield running


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("use", get_args(Use))
async def test_a_closed_response_is_freed_without_the_collector(use: Use, provider: MockProvider) -> None:
    async with Client(base_url=provider.url) as client:
        body = {"model": "answer", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        request = client.build_request("POST", "/v1/chat/completions", json=body)
        response = await client.send(request, stream=use != "read by the client")
        assert response.status_code == 200
        if use == "read to its end":
            assert b"data:" in await response.aread()
        elif use == "closed in its body":
            chunks: Any = response.aiter_raw()
            assert await anext(chunks)
            await chunks.aclose()
            del chunks
        await response.aclose()
        with pytest.raises((httpx.StreamClosed, httpx.StreamConsumed)):
            await anext(response.aiter_raw())
        kept = [ref(response), ref(request)]
        del response, request
        assert [one() for one in kept] == [None, None]
