"""Calls whose target others can influence reach public addresses; other addresses only if the settings allow them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import trustme

from tests.services.tools.conftest import MakeExecutor, call
from tokenbus.errors import SettingsError
from tokenbus_services.net import connection
from tokenbus_services.net.egress import AddressRefused, Egress, GuardedTransport
from tokenbus_services.settings import HttpTool, McpHttp
from tokenbus_services.tools.mcp.registry import McpServers


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("8.8.8.8", None),
        ("2606:4700::1111", None),
        ("::ffff:8.8.8.8", None),
        ("64:ff9b::808:808", None),
        ("127.0.0.1", "loopback"),
        ("127.8.8.8", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("2002:7f00:1::", "loopback"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("192.168.1.1", "private"),
        ("100.64.0.1", "private"),
        ("fd12::1", "private"),
        ("fec0::1", "private"),
        ("::ffff:10.0.0.1", "private"),
        ("64:ff9b::a00:1", "private"),
        ("2001:0:7f00:1::", "reserved"),
        ("169.254.1.1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("169.254.169.254", "metadata"),
        ("::ffff:169.254.169.254", "metadata"),
        ("fd00:ec2::254", "metadata"),
        ("168.63.129.16", "metadata"),
        ("0.0.0.0", "reserved"),
        ("0.1.2.3", "reserved"),
        ("::", "reserved"),
        ("::127.0.0.1", "reserved"),
        ("64:ff9b:1::7f00:1", "reserved"),
        ("192.0.2.1", "reserved"),
        ("224.0.0.1", "reserved"),
        ("255.255.255.255", "reserved"),
        ("::ffff:0:127.0.0.1", "reserved"),
        ("::ffff:0:a00:1", "reserved"),
        ("192.0.0.8", "reserved"),
        ("192.88.99.1", "reserved"),
        ("2002:c058:6301::", "reserved"),  # 6to4 of the line before
        ("192.31.196.1", "reserved"),
        ("192.52.193.1", "reserved"),
        ("192.175.48.1", "reserved"),
        ("2620:4f:8000::1", "reserved"),
        ("198.18.0.1", "reserved"),
        ("240.0.0.1", "reserved"),
        ("100::1", "reserved"),
        ("100:0:0:1::1", "reserved"),
        ("2001:2::1", "reserved"),
        ("2001:db8::1", "reserved"),
        ("3fff::1", "reserved"),
        ("3fff:fff::1", "reserved"),
        ("3fff:1000::1", None),
        ("5f00::1", "reserved"),
        ("200::1", "reserved"),
        ("4000::1", "reserved"),
        ("e000::1", "reserved"),
        ("ff0e::1", "reserved"),
        ("2606:4700:4700::1111", None),
        ("2a00:1450:4001::1", None),
    ],
)
def test_only_public_addresses_may_be_reached(address: str, kind: str | None) -> None:
    assert Egress().refused(address) == kind
    still = None if kind in ("loopback", "private") else kind
    assert Egress(allow_private=True).refused(address) == still


def test_a_network_that_is_named_may_be_reached() -> None:
    egress = Egress(allow_networks=["169.254.169.254/32", "10.0.0.0/8", "fd00::/8"])
    assert [egress.refused(a) for a in ("169.254.169.254", "10.9.9.9", "::ffff:10.9.9.9", "fd00::1")] == [None] * 4
    assert [egress.refused(a) for a in ("169.254.169.253", "11.0.0.1", "172.16.0.1")] == ["link-local", None, "private"]


@pytest.mark.parametrize("host", ["2130706433", "0177.1", "0x7f.1", "127.1", "localhost"])
async def test_no_way_of_writing_a_loopback_address_gets_there(make_executor: MakeExecutor, host: str) -> None:
    connected = asyncio.Event()
    async with await asyncio.start_server(lambda r, w: connected.set(), "127.0.0.1", 0) as server:
        url = f"http://{host}:{server.sockets[0].getsockname()[1]}/"
        outcome = await make_executor({"t": HttpTool(url=url)}).execute(call("t"))
        assert outcome.is_error
        assert "resolves to a loopback address, which is not allowed" in outcome.content
    assert not connected.is_set()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/", "http://[::ffff:7f00:1]/", "http://169.254.169.254/latest", "https://[fd12::1]/"]
)
def test_a_forbidden_address_in_the_settings_is_an_error_at_start(make_executor: MakeExecutor, url: str) -> None:
    with pytest.raises(SettingsError, match=r"tools\.t.*is not allowed: .*allow_"):
        make_executor({"t": HttpTool(url=url)})
    with pytest.raises(SettingsError, match=r"mcp\.m.*is not allowed: .*allow_"):
        McpServers({"m": McpHttp(url=url)}, env={}, message_bytes=1000)


def test_an_invalid_network_is_an_error_at_the_start(make_executor: MakeExecutor) -> None:
    with pytest.raises(SettingsError, match=r"allow_networks: .* has host bits set"):
        make_executor({"t": HttpTool(url="https://example.org", allow_networks=("10.0.0.1/8",))})


@contextmanager
def names(monkeypatch: pytest.MonkeyPatch, answers: Iterator[list[str]]) -> Iterator[list[str]]:
    """The resolver says this, one answer a question; what was asked."""
    requested: list[str] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        requested.append(host)
        return [(2, 1, 6, "", (address, port)) for address in next(answers)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    yield requested


async def test_a_name_that_changes_after_the_check_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the second answer would be the loopback address."""
    seen: list[tuple[Sequence[str], int]] = []

    async def open_socket(hosts: Sequence[str], port: int) -> socket.socket:
        seen.append((hosts, port))
        raise ConnectionRefusedError

    monkeypatch.setattr(connection, "open_socket", open_socket)
    answers = iter([["93.184.215.14"], ["127.0.0.1"]])
    with names(monkeypatch, answers) as asked:
        async with httpx.AsyncClient(transport=GuardedTransport(Egress())) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("https://rebinding.example/")
            assert asked == ["rebinding.example"]
            with pytest.raises(AddressRefused) as refused:
                await client.get("https://rebinding.example/")
    assert seen == [(["93.184.215.14"], 443)]
    assert refused.value.kind == "loopback"
    assert "127" not in str(refused.value), "the address behind the name is not shown to the caller who chose the name"


async def test_of_several_addresses_those_that_may_be_reached_are_tried_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await asyncio.start_server(_answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        egress = Egress(allow_networks=["127.0.0.0/8"])
        with names(monkeypatch, iter([["10.0.0.1", "127.0.0.9", "127.0.0.1"]])):
            async with httpx.AsyncClient(transport=GuardedTransport(egress)) as client:
                assert (await client.post(f"http://tool.example:{port}/", content=b"x")).text == "tool.example"


async def test_a_redirect_to_an_address_that_may_not_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/latest\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(redirect, "127.0.0.1", 0) as server:
        transport = GuardedTransport(Egress(allow_private=True))
        async with httpx.AsyncClient(transport=transport, follow_redirects=True) as client:
            with pytest.raises(AddressRefused, match="metadata"):
                await client.get(f"http://localhost:{server.sockets[0].getsockname()[1]}/")


async def test_the_certificate_is_checked_for_the_name_although_the_connection_is_to_an_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("tool.example").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    async with await asyncio.start_server(_answer, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        with names(monkeypatch, iter([["127.0.0.1"], ["127.0.0.1"]])):
            async with httpx.AsyncClient(transport=GuardedTransport(Egress(allow_private=True))) as client:
                assert (await client.get(f"https://tool.example:{port}/")).text == "tool.example"
                with pytest.raises(httpx.ConnectError, match="certificate is not valid for"):
                    await client.get(f"https://other.example:{port}/")


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    host = head.partition("host: ")[2].partition("\r\n")[0].partition(":")[0]
    writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(host)}\r\nconnection: close\r\n\r\n{host}".encode())
    await writer.drain()
    writer.close()
