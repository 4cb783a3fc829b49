"""TLS to the server: who it is, who this client is, in each topology; and what the whole deployment says of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis

from tests.e2e.fleet import PIPELINE, fleet
from tests.security.tls import Certificates, tls_cluster, tls_sentinel, tls_server
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import ServerUnavailable
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Turn

HELLO = Script(name="hello", turns=(Turn(says=Reply(text="Hello there")),))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def checked(server: Server) -> None:
    """`check`, repeated if a slow machine did not complete the handshakes in time."""

    async def in_time() -> bool:
        try:
            await server.check()
        except ServerUnavailable as e:
            if "Timeout" in str(e):
                return False
            raise
        return True

    await eventually(in_time)


async def test_both_sides_show_certificates(certificates: Certificates) -> None:
    with tls_server(certificates) as port:
        async with Server(f"rediss://127.0.0.1:{port}?{certificates.query()}") as server:
            await checked(server)
            assert await server.client.ping()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ssl_ca_certs": "other_ca"}, "certificate verify failed"),
        ({"ssl_certfile": "", "ssl_keyfile": ""}, "certificate required|Connection closed|reset|lost"),
        ({"ssl_certfile": "strange_cert", "ssl_keyfile": "strange_key"}, "unknown ca|Connection closed|reset|lost"),
    ],
)
async def test_a_side_that_the_other_does_not_know_is_refused(
    certificates: Certificates, changes: dict[str, str], why: str
) -> None:
    paths = {name: getattr(certificates, what) if what else "" for name, what in changes.items()}
    with tls_server(certificates) as port:
        async with Server(f"rediss://127.0.0.1:{port}?{certificates.query(**paths)}") as server:
            with pytest.raises(ServerUnavailable, match=why):
                await checked(server)


async def test_a_certificate_for_another_name_is_refused_unless_names_do_not_count(certificates: Certificates) -> None:
    with tls_server(certificates, cert=certificates.misnamed_cert, key=certificates.misnamed_key) as port:
        async with Server(f"rediss://127.0.0.1:{port}?{certificates.query()}") as server:
            with pytest.raises(ServerUnavailable, match="certificate is not valid for"):
                await checked(server)
        query = certificates.query(ssl_check_hostname="false")
        async with Server(f"rediss://127.0.0.1:{port}?{query}") as server:
            await checked(server)


async def test_a_server_without_tls_is_reported(certificates: Certificates, server_url: str) -> None:
    url = server_url.replace("redis://", "rediss://", 1)
    async with Server(f"{url}?{certificates.query()}") as server:
        with pytest.raises(ServerUnavailable):
            await server.check()


async def test_all_nodes_of_a_cluster_are_reached_over_tls(certificates: Certificates) -> None:
    with tls_cluster(certificates) as nodes:
        async with Server(f"rediss+cluster://{nodes}?{certificates.query()}") as server:
            await checked(server)
            for tag in range(12):
                assert await server.client.xadd(f"t:{{{tag}}}:x", {"a": "b"})


async def test_sentinel_and_master_are_reached_over_tls(certificates: Certificates, tmp_path: Path) -> None:
    with tls_sentinel(certificates, tmp_path) as port:
        async with Server(f"rediss+sentinel://127.0.0.1:{port}/main?{certificates.query()}") as server:
            await checked(server)
            assert await server.client.ping()


async def test_a_deployment_works_over_tls_as_a_user_whose_password_is_in_a_file(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = tmp_path / "password"
    password.write_text("not-told-to-anyone\n")
    monkeypatch.setenv("TOKENBUS_REDIS_PASSWORD_FILE", str(password))
    keys = Keys(partitions=2)
    with tls_server(certificates) as port:
        url = f"rediss://ada@127.0.0.1:{port}?{certificates.query()}"
        with redis.Redis(host="127.0.0.1", port=port, ssl=True, **certificates.python()) as admin:
            admin.acl_setuser("ada", enabled=True, passwords=["+not-told-to-anyone"], keys=["*"], categories=["+@all"])
            admin.acl_setuser("default", enabled=False)
        monkeypatch.setenv("TOKENBUS_REDIS_URL", url)
        async with MockProvider([HELLO]) as provider, fleet(tmp_path, url, keys, provider.url, PIPELINE) as workers:
            async with Client() as bus:
                message = {"role": "user", "content": "hello"}
                run = {"type": "generate", "provider": "anthropic", "model": "hello", "messages": [message]}
                result = await bus.result(await bus.publish(run))
            assert result.text == "Hello there"
        logs = await asyncio.to_thread(lambda: [worker.log.read_text() for worker in workers.workers])
    assert not any("not-told-to-anyone" in text for text in logs)
