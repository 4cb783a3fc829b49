"""A connection that closes right after it opened counts as broken, for every client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import httpx
import pytest
from anyio._backends._asyncio import SocketStream

from tokenbus.providers.api import HttpCall
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.mock_provider import MockProvider
from tokenbus_services.net.connection import Connection
from tokenbus_services.net.egress import Egress, GuardedTransport
from tokenbus_services.net.http_client import reset_as_made
from tokenbus_services.settings import ProviderSettings


@pytest.fixture
async def url(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[str]:
    """Where every connection is reset as it is made."""
    made = Connection.connection_made

    def reset(connection: Connection, transport: asyncio.BaseTransport) -> None:
        made(connection, transport)
        cast(asyncio.Transport, transport).abort()

    def reset_by_anyio(stream: Any) -> None:
        """As with uvloop: no socket is left."""
        stream._transport.abort()

    monkeypatch.setattr(Connection, "connection_made", reset)
    monkeypatch.setattr(SocketStream, "_raw_socket", property(reset_by_anyio))
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


async def test_a_connection_of_httpx_itself_that_is_reset_is_out_of_reach(url: str) -> None:
    """As through a SOCKS proxy."""
    request = httpx.Request("GET", url, extensions={"timeout": {}})
    async with httpx.AsyncHTTPTransport() as transport:
        with pytest.raises(httpx.ConnectError), reset_as_made(request):
            await transport.handle_async_request(request)
