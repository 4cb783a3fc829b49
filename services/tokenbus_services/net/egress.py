"""Which addresses may be reached by a call whose target others can influence: an HTTP tool, an MCP server, a media URL.

A name is resolved here, every address it has is looked at, and the connection goes to an address that was looked at,
never to the name: so a name that points elsewhere a moment later (DNS rebinding) changes nothing. Neither does a way of
writing an address (``2130706433``, ``0177.0.0.1``, ``::ffff:127.0.0.1``), for only what it resolves to counts. The TLS
handshake and the Host header still have the name. A redirect that is followed comes through here again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal

import httpx
import structlog

from tokenbus_services.net.httpx_reset_fix import reset_as_made
from tokenbus_services.net.response_heads import BoundedTransport

Kind = Literal["loopback", "private", "link-local", "metadata", "reserved"]

METADATA = frozenset(
    map(ip_address, ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"))
)
"""Where clouds tell a machine its credentials: AWS, Google and Azure; AWS over IPv6; Alibaba; Oracle; Azure's host."""
_PRIVATE = [
    ip_network(text)
    # RFC 1918; between a carrier and its customers, and within many clusters (RFC 6598); IPv6's own, old and new.
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7", "fec0::/10")
]
PORTS = {"http": 80, "https": 443}
_NAT64 = ip_network("64:ff9b::/96")
_UNICAST = ip_network("2000::/3")
"""All of IPv6 that is given out as public. Outside it lie translated IPv4 addresses (::ffff:0:0:0/96, 64:ff9b:1::/48,
::/96), segment routing (5f00::/16), and what nobody has."""
_SPECIAL = [
    ip_network(text)
    # Of the IANA special-purpose registries what Python, by its version, takes for public: protocols of their own, 6to4
    # relays, AS112 and AMT; documentation, old and new; the former 6bone.
    for text in (
        *("192.0.0.0/24", "192.88.99.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.175.48.0/24"),
        *("2001::/23", "2001:db8::/32", "3fff::/20", "2620:4f:8000::/48", "3ffe::/16"),
    )
]

_log = structlog.stdlib.get_logger()


class AddressRefused(Exception):
    """The host is at an address that this call may not reach. The address itself is only in the log."""

    def __init__(self, host: str, kind: Kind) -> None:
        super().__init__(f"{host} is at a {kind} address, which may not be reached")
        self.host = host
        self.kind: Kind = kind


class Egress:
    """What may be reached: public addresses; with ``allow_private`` also loopback and private ones; and these networks.

    Link-local addresses and those of cloud metadata are reached only by a network that names them.
    """

    def __init__(self, *, allow_private: bool = False, allow_networks: Iterable[str] = ()) -> None:
        """Raises ValueError for what is no network in CIDR notation."""
        self._allow_private = allow_private
        self._networks = [ip_network(text) for text in allow_networks]

    def refused(self, address: str) -> Kind | None:
        """Why this IP address may not be reached; None where it may. Raises ValueError for what is no address."""
        ip = _inner(ip_address(address.partition("%")[0]))
        if any(ip in network for network in self._networks):
            return None
        kind = _kind(ip)
        return None if kind in {"loopback", "private"} and self._allow_private else kind

    def check_literal(self, host: str) -> None:
        """Raises AddressRefused where the host is an IP address that may not be reached; names are looked up later."""
        try:
            kind = self.refused(host)
        except ValueError:
            return
        if kind:
            raise AddressRefused(host, kind)

    async def addresses(self, host: str, port: int, *, timeout: float | None = None) -> list[str]:
        """The IP addresses of the host that may be reached, in the resolver's order.

        Raises AddressRefused where it has only others, OSError where it has none (TimeoutError after ``timeout``
        seconds).
        """
        async with asyncio.timeout(timeout):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        good: list[str] = []
        refusal: AddressRefused | None = None
        for address in dict.fromkeys(str(info[4][0]) for info in found):
            if kind := self.refused(address):
                _log.warning("address_refused", host=host, address=address, kind=kind)
                refusal = AddressRefused(host, kind)
            else:
                good.append(address)
        if refusal and not good:
            raise refusal
        return good


class GuardedTransport(httpx.AsyncBaseTransport):
    """httpx's transport, held to an `Egress`. It keeps a pool for each host as long as it lives, and uses no proxy of
    the environment, which would resolve names itself.

    Raises AddressRefused beside what httpx raises.
    """

    def __init__(self, egress: Egress, *, limits: httpx.Limits | None = None) -> None:
        self._egress = egress
        self._limits = limits or httpx.Limits()
        self._by_host: dict[str, BoundedTransport] = {}
        """One pool for all would send a request over a connection to the same address whose certificate was checked for
        another name."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        timeout = request.extensions.get("timeout", {}).get("connect")
        try:
            addresses = await self._egress.addresses(
                host, request.url.port or PORTS[request.url.scheme], timeout=timeout
            )
        except TimeoutError as e:
            raise httpx.ConnectTimeout(f"no address of {host} in time", request=request) from e
        except OSError as e:
            raise httpx.ConnectError(str(e), request=request) from e
        transport = self._by_host.setdefault(host, BoundedTransport(limits=self._limits))
        for address in addresses[:-1]:
            try:
                with reset_as_made(request):
                    return await transport.handle_async_request(_to(address, request))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue  # nothing was sent yet
        with reset_as_made(request):
            return await transport.handle_async_request(_to(addresses[-1], request))

    async def aclose(self) -> None:
        for transport in self._by_host.values():
            await transport.aclose()


def _to(address: str, request: httpx.Request) -> httpx.Request:
    """The same request, to be sent to this address under its own name."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )


def _inner(ip: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that an IPv6 address stands for, where a gateway or the system would go there."""
    if isinstance(ip, IPv4Address):
        return ip
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None) or ip


def _kind(ip: IPv4Address | IPv6Address) -> Kind | None:
    if ip in METADATA:
        return "metadata"
    if ip.is_loopback:
        return "loopback"
    if ip.is_link_local:
        return "link-local"
    if any(ip in network for network in _PRIVATE):
        return "private"
    public = ip.is_global and not ip.is_multicast and not any(ip in network for network in _SPECIAL)
    return None if public and (ip.version == 4 or ip in _UNICAST) else "reserved"
