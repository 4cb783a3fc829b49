"""Controls which addresses a call may reach if others can influence its target: an HTTP tool, an MCP server, a media
URL.

The name is resolved here, every address is checked, and the connection goes to a checked address, never to the name. So
DNS rebinding has no effect, and neither do alternative spellings of an address (``2130706433``, ``0177.0.0.1``,
``::ffff:127.0.0.1``). The TLS handshake and the Host header keep the name. Redirects are checked the same way.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal

import structlog

from tokenbus.bus import process_clock
from tokenbus_services.net.http_client import Transport

Kind = Literal["loopback", "private", "link-local", "metadata", "reserved"]

METADATA = frozenset(
    map(ip_address, ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"))
)
"""Metadata services with cloud credentials: AWS, Google and Azure; AWS over IPv6; Alibaba; Oracle; Azure's host."""
_PRIVATE = [
    ip_network(text)
    # RFC 1918; carrier-grade NAT, also used inside clusters (RFC 6598); IPv6 unique local and site-local.
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7", "fec0::/10")
]
_NAT64 = ip_network("64:ff9b::/96")
_UNICAST = ip_network("2000::/3")
"""All public unicast space of IPv6. Outside it are translated IPv4 addresses (::ffff:0:0:0/96, 64:ff9b:1::/48, ::/96),
segment routing (5f00::/16) and unassigned space.
"""
_SPECIAL = [
    ip_network(text)
    # Entries of the IANA special-purpose registries that some Python versions treat as public: protocol assignments,
    # 6to4 relays, AS112 and AMT; documentation, old and new; the former 6bone.
    for text in (
        *("192.0.0.0/24", "192.88.99.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.175.48.0/24"),
        *("2001::/23", "2001:db8::/32", "3fff::/20", "2620:4f:8000::/48", "3ffe::/16"),
    )
]

_log = structlog.stdlib.get_logger()


class AddressRefused(Exception):
    """The host resolves to an address that this call may not reach. The address itself appears only in the log."""

    def __init__(self, host: str, kind: Kind) -> None:
        super().__init__(f"{host} resolves to a {kind} address, which is not allowed")
        self.host = host
        self.kind: Kind = kind


class Egress:
    """Egress rules: public addresses, with ``allow_private`` also loopback and private ones, and the listed networks.

    Link-local and cloud metadata addresses are reachable only through a listed network.
    """

    def __init__(self, *, allow_private: bool = False, allow_networks: Iterable[str] = ()) -> None:
        """Raises ValueError for anything that is not a network in CIDR notation."""
        self._allow_private = allow_private
        self._networks = [ip_network(text) for text in allow_networks]

    def refused(self, address: str) -> Kind | None:
        """Return why this IP address is not allowed; None if it is. Raises ValueError if it is not an address."""
        ip = _inner(ip_address(address.partition("%")[0]))
        if any(ip in network for network in self._networks):
            return None
        kind = _kind(ip)
        return None if kind in {"loopback", "private"} and self._allow_private else kind

    def check_literal(self, host: str) -> None:
        """Raise AddressRefused if the host is a forbidden IP address. Names are checked later."""
        try:
            kind = self.refused(host)
        except ValueError:
            return
        if kind:
            raise AddressRefused(host, kind)

    async def addresses(self, host: str, port: int, *, timeout: float | None = None) -> list[str]:
        """Resolve the host and return its allowed IP addresses, in the resolver's order.

        Raises AddressRefused if none is allowed, OSError if there are none (TimeoutError after ``timeout`` seconds).
        """
        async with process_clock.timeout(timeout):
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


class GuardedTransport(Transport):
    """`Transport`, restricted by an `Egress`. It uses no proxy: that would resolve names itself.

    Raises AddressRefused in addition to httpx's exceptions.
    """

    def __init__(self, egress: Egress) -> None:
        super().__init__()
        self._egress = egress

    async def hosts(self, host: str, port: int) -> list[str]:
        return await self._egress.addresses(host, port)


def _inner(ip: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The embedded IPv4 address of an IPv6 address, if a gateway or the system would route to it."""
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
