"""Server address as one string: the format of `TOKENBUS_REDIS_URL`.

::

    redis://[user:password@]host[:port][/db]             also rediss, valkey, valkeys; the s is for TLS
    redis+sentinel://[user:password@]host[:port],…/master[/db]
    redis+cluster://[user:password@]host[:port],…
    unix://[user:password@]/path/of/socket[?db=1]

User, password and socket path are percent-decoded. With TLS the server's certificate must match the host name or
address. Options follow ``?``, separated by ``&``, and apply to all nodes and sentinels:

- ``ssl_ca_certs=/path``: certificate authorities to trust instead of the system's;
- ``ssl_certfile=/path&ssl_keyfile=/path``: client certificate;
- ``ssl_check_hostname=false``: accept any certificate of those authorities;
- ``ssl_cert_reqs=none``: accept any certificate. An attacker on the path can then read and change everything;
- ``password_file=/path``: a file with the password, read for each new connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from tokenbus.errors import SettingsError
from tokenbus.secret_env import secret_in

Topology = Literal["single", "sentinel", "cluster"]

_SCHEME = re.compile(r"(?:redis|valkey)(?P<tls>s?)(?:\+(?P<topology>sentinel|cluster))?")
_NODE = re.compile(r"(?:\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]\s]+))(?::(?P<port>[0-9]{1,5}))?")
_TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})
_TLS_VALUES: dict[str, dict[str, str | bool]] = {
    "ssl_cert_reqs": {"none": "none", "optional": "optional", "required": "required"},
    "ssl_check_hostname": {"true": True, "false": False},
}
PASSWORD_ENV = "TOKENBUS_REDIS_PASSWORD"
URL_ENV = "TOKENBUS_REDIS_URL"
URL_FILE_ENV = "TOKENBUS_REDIS_URL_FILE"
PASSWORD_FILE_ENV = "TOKENBUS_REDIS_PASSWORD_FILE"
_PASSWORD_FILE = "password_file"
"""Option of an address."""
_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUrl:
    """One server, or the entry nodes of a Sentinel group or a Cluster. Never prints the password."""

    topology: Topology = "single"
    nodes: tuple[tuple[str, int], ...] = ()
    """Host and port of the server, the sentinels or some cluster nodes; empty for a socket."""
    path: str | None = None
    """Path of the Unix socket."""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    """File with the password, or with a whole address, read for each new connection: a changed password is used from
    then on. `password` is what it was at the start.
    """
    tls: bool = False
    tls_options: tuple[tuple[str, str | bool], ...] = ()
    """Names and values as redis-py expects them."""
    master: str = ""
    """Sentinel: name of the monitored master."""

    @property
    def safe(self) -> str:
        """The address without password and options, for logs and errors."""
        user = f"{self.username}@" if self.username else ""
        if self.path is not None:
            return f"unix://{user}{self.path}" + (f"?db={self.db}" if self.db else "")
        scheme = ("rediss" if self.tls else "redis") + ("" if self.topology == "single" else f"+{self.topology}")
        nodes = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.nodes)
        rest = (f"/{self.master}" if self.master else "") + (f"/{self.db}" if self.db else "")
        return f"{scheme}://{user}{nodes}{rest}"


def parse_url(url: str) -> ServerUrl:
    """Parse an address. Raises SettingsError, whose text contains no part of the url that may be secret."""
    scheme, separator, _ = url.partition("://")
    known = _SCHEME.fullmatch(scheme)
    if not separator or not (known or scheme == "unix"):
        _refuse(
            "scheme",
            "must be redis, rediss, valkey or valkeys, +sentinel or +cluster behind it; or unix. "
            "A server on this machine is redis://localhost:6379",
        )
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
    allowed: frozenset[str] = _TLS_OPTIONS if tls else frozenset()
    options = dict(_options(parts.query, allowed | {_PASSWORD_FILE}))
    password_file = options.pop(_PASSWORD_FILE, None)
    return ServerUrl(
        topology=topology,
        nodes=_nodes(nodes, topology),
        db=_database(segments[0]) if segments else 0,
        username=username,
        password=password,
        password_file=None if password_file is None else str(password_file),
        tls=tls,
        tls_options=tuple(options.items()),
        master=master,
    )


def url_in_env(env: Mapping[str, str]) -> str | None:
    """The address in `URL_ENV`, or in the file that `URL_FILE_ENV` names, with its password; None if neither is set.

    Raises SettingsError if both are set, or if the file is unreadable or empty.
    """
    url = secret_in(URL_ENV, env)
    if url and (file := env.get(URL_FILE_ENV)):
        url = _with_option(url, file)
    return with_password(url, env) if url else None


def with_password(url: str, env: Mapping[str, str]) -> str:
    """Add the password from the environment if the address has none.

    `PASSWORD_ENV` holds the password, or `PASSWORD_FILE_ENV` the path of a file that contains only the password (a
    trailing newline is ignored), which is read again for each new connection. Raises SettingsError if both are set, or
    if the file is unreadable or empty.
    """
    password = secret_in(PASSWORD_ENV, env)
    scheme, separator, rest = url.partition("://")
    login, at, host = rest.rpartition("@")
    if not password or not separator or ":" in login:
        return url
    url = f"{scheme}://{login if at else ''}:{quote(password, safe='')}@{host}"
    file = env.get(PASSWORD_FILE_ENV)
    return _with_option(url, file) if file else url


def password_in(content: str) -> str | None:
    """Read the password from a file that contains either the password or a complete URL. Raises SettingsError."""
    return parse_url(content).password if "://" in content else content


def _with_option(url: str, file: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{_PASSWORD_FILE}={quote(file, safe='/')}"


def plain_url(url: str) -> str:
    """The address without the option that only `Server` knows."""
    return re.sub(rf"([?&]){_PASSWORD_FILE}=[^&]*&?", r"\1", url).rstrip("?&")


def _socket(parts: SplitResult, host: str, username: str | None, password: str | None) -> ServerUrl:
    if host or len(parts.path) <= 1:
        _refuse("path", "must be absolute: unix:///run/valkey/valkey.sock")
    options = dict(_options(parts.query, frozenset({"db", _PASSWORD_FILE})))
    db = _database(str(options["db"])) if "db" in options else 0
    file = str(options[_PASSWORD_FILE]) if _PASSWORD_FILE in options else None
    return ServerUrl(path=unquote(parts.path), db=db, username=username, password=password, password_file=file)


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


def _options(query: str, allowed: frozenset[str]) -> tuple[tuple[str, str | bool], ...]:
    options = parse_qsl(query, keep_blank_values=True)
    if any(name not in allowed for name, _ in options):
        _refuse("options", f"only {', '.join(sorted(allowed))} can be set here" if allowed else "none can be set here")
    return tuple((name, _tls_value(name, value)) for name, value in options)


def _tls_value(name: str, value: str) -> str | bool:
    known = _TLS_VALUES.get(name)
    if known is None:
        return value
    if value not in known:
        _refuse(name, f"must be {' or '.join(known)}")
    return known[value]


def _refuse(where: str, problem: str) -> NoReturn:
    raise SettingsError("redis_url", where, problem) from None
