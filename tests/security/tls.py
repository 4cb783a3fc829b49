"""Servers that speak TLS alone to clients, with certificates of an authority made for the test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme

from tests.servers import binary
from tests.waiting import eventually_sync
from tokenbus.errors import ServerUnavailable
from tokenbus_services.process.embedded_server import EmbeddedServer, find_binary, free_port


class Certificates:
    """Certificates: an authority, a server for 127.0.0.1 and a client of it; and an untrusted authority."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        authority, stranger = trustme.CA(), trustme.CA()
        self.ca = self._write("ca.pem", authority.cert_pem)
        self.other_ca = self._write("other-ca.pem", stranger.cert_pem)
        self.server_cert, self.server_key = self._issue("server", authority, "127.0.0.1")
        self.misnamed_cert, self.misnamed_key = self._issue("misnamed", authority, "elsewhere.example")
        self.client_cert, self.client_key = self._issue("client", authority, "client@example.org")
        self.strange_cert, self.strange_key = self._issue("strange", stranger, "client@example.org")

    def options(self, port: int, *, cert: str = "", key: str = "") -> dict[str, str]:
        """Of the server: TLS on this port, to clients that show a certificate."""
        return {
            "tls-port": str(port),
            "tls-cert-file": cert or self.server_cert,
            "tls-key-file": key or self.server_key,
            "tls-ca-cert-file": self.ca,
            "tls-auth-clients": "yes",
        }

    def query(self, **changes: str) -> str:
        """Of the url."""
        options = {"ssl_ca_certs": self.ca, "ssl_certfile": self.client_cert, "ssl_keyfile": self.client_key, **changes}
        return "&".join(f"{name}={value}" for name, value in options.items() if value)

    def python(self) -> dict[str, Any]:
        """As redis-py takes them."""
        return {"ssl_ca_certs": self.ca, "ssl_certfile": self.client_cert, "ssl_keyfile": self.client_key}

    def _issue(self, name: str, authority: trustme.CA, whom: str) -> tuple[str, str]:
        issued = authority.issue_cert(whom)
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        return self._write(f"{name}.pem", trustme.Blob(chain)), self._write(f"{name}.key", issued.private_key_pem)

    def _write(self, name: str, blob: trustme.Blob) -> str:
        path = self._directory / name
        path.write_bytes(blob.bytes())
        return str(path)


_without_tls: set[Path] = set()


def tls_binary(certificates: Certificates) -> Path:
    """A server that was built with TLS; skips the test if there is none."""
    for candidate in (binary(), find_binary()):
        if candidate in _without_tls:
            continue
        try:
            with EmbeddedServer(binary=candidate, options=certificates.options(free_port())):
                return candidate
        except ServerUnavailable as e:
            if "TLS" not in str(e) and "tls-port" not in str(e):
                raise
            _without_tls.add(candidate)
    pytest.skip("no valkey-server or redis-server on this machine was built with TLS")


@contextmanager
def tls_server(certificates: Certificates, **changes: str) -> Iterator[int]:
    """The port on which a server speaks TLS."""
    port = free_port()
    options = certificates.options(port, **changes)
    with EmbeddedServer(binary=tls_binary(certificates), options=options):
        yield port


@contextmanager
def tls_cluster(certificates: Certificates, nodes: int = 3) -> Iterator[str]:
    """Host and port of a Cluster's nodes, which speak TLS among themselves too."""
    with ExitStack() as stack:
        ports: list[int] = []
        clients: list[Any] = []
        for i in range(nodes):
            ports.append(free_port())
            options = {
                **certificates.options(ports[i]),
                "tls-cluster": "yes",
                "cluster-enabled": "yes",
                "cluster-port": str(free_port()),
                "cluster-node-timeout": "2000",
            }
            server = stack.enter_context(EmbeddedServer(binary=tls_binary(certificates), options=options))
            clients.append(stack.enter_context(closing(redis.Redis(port=server.port))))
            clients[i].execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
            first, last = 16384 * i // nodes, 16384 * (i + 1) // nodes - 1
            clients[i].execute_command("CLUSTER ADDSLOTSRANGE", first, last)
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", ports[i], options["cluster-port"])
        for client in clients:
            eventually_sync(lambda c=client: c.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
            eventually_sync(lambda c=client: len(c.execute_command("CLUSTER NODES")) == nodes)
        yield ",".join(f"127.0.0.1:{port}" for port in ports)


@contextmanager
def tls_sentinel(certificates: Certificates, directory: Path) -> Iterator[int]:
    """The port of a sentinel that watches a master; all of them speak TLS."""
    port = free_port()
    with tls_server(certificates) as master:
        options = {**certificates.options(port), "port": "0", "tls-replication": "yes", "dir": str(directory)}
        lines = [f"{name} {value}" for name, value in options.items()]
        config = directory / "sentinel.conf"
        config.write_text("\n".join([*lines, "bind 127.0.0.1", f"sentinel monitor main 127.0.0.1 {master} 1"]) + "\n")
        log = (directory / "sentinel.log").open("wb")
        with log, subprocess.Popen([tls_binary(certificates), config, "--sentinel"], stdout=log, stderr=log) as process:
            try:
                with closing(redis.Redis(host="127.0.0.1", port=port, ssl=True, **certificates.python())) as sentinel:
                    eventually_sync(lambda: _watches(sentinel))
                yield port
            finally:
                process.terminate()


def _watches(sentinel: redis.Redis) -> bool:
    try:
        master: Any = sentinel.sentinel_master("main")
        return master["flags"] == "master"
    except redis.ConnectionError:
        return False
