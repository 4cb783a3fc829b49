"""The embedded server: starts on any machine, keeps what it should, and never outlives us."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis

from tests.servers import binary
from tests.waiting import eventually_sync
from tokenbus.errors import ServerUnavailable
from tokenbus_services.process import embedded_server as embedded
from tokenbus_services.process.embedded_server import EmbeddedServer, carried_binary, find_binary

PORTS_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PARENT = """
import sys, time
from pathlib import Path
from tokenbus_services.process.embedded_server import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]), binary=Path(sys.argv[2]))
server.start()
print(server.pid, server.port, flush=True)
sys.stdin.read()
"""


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_it_serves_while_it_is_open_and_leaves_nothing_behind():
    with EmbeddedServer(binary=binary()) as server:
        directory, pid = server.data_dir, server.pid
        assert directory
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            assert client.info("server")["process_id"] == pid
        assert (directory / "server.log").stat().st_size > 0
    assert _gone(pid)
    assert not directory.exists()
    assert (server.pid, server.running) == (0, False)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_its_parent_is_killed(tmp_path: Path, how: signal.Signals):
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path), str(binary())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout
        pid, port = map(int, parent.stdout.readline().split())
        assert not _free(port)
        parent.send_signal(how)
        parent.wait()
    eventually_sync(lambda: _gone(pid) and _free(port))


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal of Linux")
def test_it_ends_when_its_guard_is_killed():
    server = EmbeddedServer(binary=binary())
    server.start()
    pid = server.pid
    parent_of = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(parent_of), signal.SIGKILL)
    eventually_sync(lambda: _gone(pid))
    server.stop()


def test_it_outlives_the_thread_that_started_it():
    server = EmbeddedServer(binary=binary())
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    with server, redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_what_was_written_is_there_after_a_crash_and_a_start_on_the_same_port(tmp_path: Path):
    with EmbeddedServer(tmp_path, binary=binary(), appendonly=True) as server:
        url = server.url
        with redis.Redis.from_url(url) as client:
            client.set("k", "v")
            client.execute_command("WAITAOF", 1, 0, 1000) if client.info()["redis_version"] >= "7.2" else None
        os.kill(server.pid, signal.SIGKILL)
        eventually_sync(lambda: not server.running)
        server.start()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.get("k") == b"v"


def test_a_second_server_in_the_same_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "_LOCK_WAIT_S", 0.1)
    with EmbeddedServer(tmp_path, binary=binary()) as first:
        with pytest.raises(ServerUnavailable, match="another server runs in"):
            EmbeddedServer(tmp_path, binary=binary()).start()
        assert first.running


def test_a_port_that_was_taken_in_the_meantime_is_not_used(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = iter([taken, *(embedded.free_port() for _ in range(9))])
        monkeypatch.setattr(embedded, "free_port", lambda: next(ports))
        with EmbeddedServer(binary=binary()) as server:
            assert server.port != taken


@pytest.mark.skipif(not PORTS_GIVEN.exists(), reason="no Linux")
def test_no_outgoing_connection_takes_a_free_port():
    first, last = map(int, PORTS_GIVEN.read_text().split())
    assert not any(first <= embedded.free_port() <= last for _ in range(100))


def test_a_taken_port_that_was_asked_for_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ServerUnavailable, match="in use"):
            EmbeddedServer(binary=binary(), port=taken).start()


def test_a_server_that_does_not_start_is_an_error_with_its_log():
    server = EmbeddedServer(binary=binary(), options={"no-such-directive": "1"})
    with pytest.raises(ServerUnavailable, match="no-such-directive"):
        server.start()
    assert server.data_dir is None


def test_a_program_that_cannot_be_run_is_an_error(tmp_path: Path):
    with pytest.raises(ServerUnavailable, match="No such file"):
        EmbeddedServer(binary=tmp_path / "nothing").start()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ServerUnavailable, match="Not a directory"):
        EmbeddedServer(tmp_path / "file" / "data", binary=binary()).start()


def test_a_server_on_the_path_is_preferred_to_the_bundled_one_unless_it_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "redis-server"
    monkeypatch.setenv("PATH", str(tmp_path))
    for version, chosen in [("7.0.15", program), ("6.0.16", carried_binary())]:
        program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
        program.chmod(0o755)
        if chosen:
            assert find_binary() == chosen


def test_no_server_at_all_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded, "carried_binary", lambda: None)
    with pytest.raises(ServerUnavailable, match=r"extra `embedded`"):
        EmbeddedServer()


def test_a_value_that_is_too_large_is_refused_before_its_bytes(tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path, binary=binary()) as server,
        socket.create_connection(("127.0.0.1", server.port)) as sent,
    ):
        sent.sendall(b"*5\r\n$4\r\nXADD\r\n$1\r\nq\r\n$1\r\n*\r\n$8\r\n__data__\r\n$400000000\r\n")
        assert b"invalid bulk length" in sent.recv(1000)
