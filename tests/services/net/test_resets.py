"""A connection that closes right after it opened counts as broken, for every client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import httpx
import pytest

from tokenbus.providers.api import HttpCall
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.mock_provider import MockProvider
from tokenbus_services.net.connection import Connection
from tokenbus_services.net.egress import Egress, GuardedTransport
from tokenbus_services.settings import ProviderSettings


@pytest.fixture
async def url(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[str]:
    """Where every connection is reset as it is made."""
    made = Connection.connection_made

    def reset(connection: Connection, transport: asyncio.BaseTransport) -> None:
        made(connection, transport)
        cast(asyncio.Transport, transport).abort()

    monkeypatch.setattr(Connection, "connection_made", reset)
    async with MockProvider([]) as provider:
        yield provider.url


async def test_a_provider_that_resets_it_is_out_of_reach(url: str) -> None:
    endpoint = Endpoint("p", ProviderSettings(api="openai-chat", base_url=url, api_key_env=""), {})
    with pytest.raises(httpx.ConnectError):
        await endpoint.send(endpoint.request(HttpCall(path="v1/chat/completions", body=b"{}", headers={})))
    await endpoint.close()


async def test_an_address_that_resets_it_is_out_of_reach(url: str) -> None:
    async with httpx.AsyncClient(transport=GuardedTransport(Egress(allow_private=True))) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
