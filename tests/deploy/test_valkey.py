"""The start script of Kubernetes' Valkey, with a real server: password, users, TLS, and the end by SIGTERM."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import AuthenticationError, Redis
from redis.exceptions import RedisError

from tests.waiting import eventually_sync

SCRIPTS = Path("deploy/kubernetes/components/valkey").resolve()
PASSWORD = 'with "quotes" and \\ and $HOME'

pytestmark = pytest.mark.skipif(
    not (shutil.which("valkey-server") or shutil.which("redis-server")), reason="no server on the PATH"
)


@contextmanager
def started(folder: Path, **given: str) -> Generator[tuple[subprocess.Popen[bytes], int, dict[str, str]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in ("data", "tls", "users"):
        (folder / name).mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "PORT": str(port),
        "DATA": str(folder / "data"),
        "TLS": str(folder / "tls"),
        "USERS": str(folder / "users"),
        "MAXMEMORY": "64mb",
        **given,
    }
    process = subprocess.Popen(["sh", SCRIPTS / "start.sh"], env=environment, stdout=subprocess.PIPE)
    try:
        yield process, port, environment
    finally:
        process.kill()
        process.communicate()


def ready(environment: dict[str, str]) -> bool:
    done = subprocess.run(["sh", SCRIPTS / "ready.sh"], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def test_a_password_with_every_sign_is_needed_and_is_in_no_list_of_processes(tmp_path: Path) -> None:
    with started(tmp_path, PASSWORD=PASSWORD) as (process, port, environment):
        eventually_sync(lambda: ready(environment))
        with Redis(port=port) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
        with Redis(port=port, password=PASSWORD) as client:
            assert client.set("a", "b")
            settings = client.config_get("*")
            assert (settings["maxmemory-policy"], settings["appendonly"]) == ("noeviction", "yes")
        assert PASSWORD.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, "the server gets the signal of the kubelet, and writes what it has"


def test_users_are_those_of_the_file_and_one_without_the_user_default_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "users").mkdir()
    users = tmp_path / "users/users.acl"
    users.write_text("user tokenbus-blobs on >secret +ping\n")
    with started(tmp_path) as (process, _, _):
        assert process.wait(20) == 1
    users.write_text("user default off\nuser tokenbus-blobs on >secret +ping\n")
    with started(tmp_path) as (_, port, environment):
        eventually_sync(lambda: ready(environment))
        with Redis(port=port, username="tokenbus-blobs", password="secret") as client:
            assert client.ping()
            with pytest.raises(RedisError):
                client.get("a")


def test_with_a_certificate_only_tls_is_spoken(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    key, certificate = tmp_path / "tls/tls.key", tmp_path / "tls/tls.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )  # fmt: skip
    shutil.copy(certificate, tmp_path / "tls/ca.crt")
    with started(tmp_path, PASSWORD=PASSWORD) as (_, port, environment):
        eventually_sync(lambda: ready(environment))
        with Redis(port=port, password=PASSWORD) as plain, pytest.raises((RedisError, ssl.SSLError)):
            plain.ping()
        with Redis(port=port, password=PASSWORD, ssl=True, ssl_ca_certs=str(certificate)) as client:
            assert client.ping()
