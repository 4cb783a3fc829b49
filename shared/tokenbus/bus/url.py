"""The server's address as one text: what `TOKENBUS_REDIS_URL` may hold.

::

    redis://[user:password@]host[:port][/db]             also rediss, valkey, valkeys; the s is for TLS
    redis+sentinel://[user:password@]host[:port],…/master[/db]
    redis+cluster://[user:password@]host[:port],…
    unix://[user:password@]/path/of/socket[?db=1]

With TLS, ``?ssl_ca_certs=…&ssl_certfile=…&ssl_keyfile=…&ssl_cert_reqs=none`` as redis-py knows them. User,
password and socket path are percent-decoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NoReturn
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tokenbus.errors import SettingsError

Topology = Literal["single", "sentinel", "cluster"]

_SCHEME = re.compile(r"(?:redis|valkey)(?P<tls>s?)(?:\+(?P<topology>sentinel|cluster))?")
_NODE = re.compile(r"(?:\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]\s]+))(?::(?P<port>[0-9]{1,5}))?")
_TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"})
_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUrl:
    """One server, or the nodes through which a Sentinel group or a Cluster is found. Never prints the password."""

    topology: Topology = "single"
    nodes: tuple[tuple[str, int], ...] = ()
    """Host and port of the server, the sentinels or some cluster nodes; empty for a socket."""
    path: str | None = None
    """The Unix socket."""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_options: tuple[tuple[str, str], ...] = ()
    """Names and values as redis-py takes them."""
    master: str = ""
    """sentinel: the name of the monitored master."""

    @property
    def safe(self) -> str:
        """The same address without password and options, for logs and errors."""
        user = f"{self.username}@" if self.username else ""
        if self.path is not None:
            return f"unix://{user}{self.path}" + (f"?db={self.db}" if self.db else "")
        scheme = ("rediss" if self.tls else "redis") + ("" if self.topology == "single" else f"+{self.topology}")
        nodes = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.nodes)
        rest = (f"/{self.master}" if self.master else "") + (f"/{self.db}" if self.db else "")
        return f"{scheme}://{user}{nodes}{rest}"


def parse_url(url: str) -> ServerUrl:
    """The address that the text names. Raises SettingsError, which says what is wrong but repeats no part of the url
    that may be a secret."""
    scheme, separator, _ = url.partition("://")
    known = _SCHEME.fullmatch(scheme)
    if not separator or not (known or scheme == "unix"):
        _refuse("scheme", "must be redis, rediss, valkey or valkeys, +sentinel or +cluster behind it; or unix")
    try:
        parts = urlsplit(url)
    except ValueError:
        _refuse("host", "brackets are for IPv6 addresses alone")
    if parts.fragment:
        _refuse("password", "a # in it must be written as %23")
    login, _, nodes = parts.netloc.rpartition("@")
    username, _, password = (unquote(part) or None for part in login.partition(":"))
    if not known:
        return _socket(parts, nodes, username, password)
    tls = bool(known["tls"])
    topology = _topology(known["topology"])
    segments = [unquote(s) for s in parts.path.split("/")[1:]] if parts.path.strip("/") else []
    master = ""
    if topology == "sentinel":
        if not segments or not segments[0]:
            _refuse("path", "the master's name is missing: redis+sentinel://host:26379/mymaster")
        master = segments.pop(0)
    if topology == "cluster" and segments:
        _refuse("path", "a cluster has no databases and no master's name")
    if len(segments) > 1:
        _refuse("path", "holds more than a database")
    return ServerUrl(
        topology=topology,
        nodes=_nodes(nodes, topology),
        db=_database(segments[0]) if segments else 0,
        username=username,
        password=password,
        tls=tls,
        tls_options=_options(parts.query, _TLS_OPTIONS if tls else frozenset()),
        master=master,
    )


def _socket(parts: SplitResult, host: str, username: str | None, password: str | None) -> ServerUrl:
    if host or len(parts.path) <= 1:
        _refuse("path", "must be absolute: unix:///run/valkey/valkey.sock")
    options = dict(_options(parts.query, frozenset({"db"})))
    db = _database(options["db"]) if "db" in options else 0
    return ServerUrl(path=unquote(parts.path), db=db, username=username, password=password)


def _topology(name: str | None) -> Topology:
    match name:
        case "sentinel" | "cluster":
            return name
        case _:
            return "single"


def _nodes(text: str, topology: Topology) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for node in text.split(","):
        match = _NODE.fullmatch(node)
        if not match:
            _refuse("host", "must be host, host:port or [IPv6]:port, several with commas between")
        port = int(match["port"] or (26379 if topology == "sentinel" else 6379))
        if not 1 <= port <= _MAX_PORT:
            _refuse("port", f"must be 1 to {_MAX_PORT}")
        found.append((match["ip6"] or match["host"], port))
    if topology == "single" and len(found) > 1:
        _refuse("host", "several hosts need redis+sentinel:// or redis+cluster://")
    return tuple(found)


def _database(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        _refuse("database", "must be a number")
    return int(text)


def _options(query: str, allowed: frozenset[str]) -> tuple[tuple[str, str], ...]:
    options = parse_qsl(query, keep_blank_values=True)
    if any(name not in allowed for name, _ in options):
        _refuse("options", f"only {', '.join(sorted(allowed))} can be set here" if allowed else "none can be set here")
    return tuple(options)


def _refuse(where: str, problem: str) -> NoReturn:
    raise SettingsError("redis_url", where, problem) from None
