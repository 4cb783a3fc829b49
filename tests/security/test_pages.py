"""The pages of the services: which there are, what may be sent to them, and by whom."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from faststream.asgi import AsgiFastStream

from tests.e2e.fleet import PIPELINE, ended, fleet
from tests.services.cli.process import run, running, settings_file
from tokenbus import Client
from tokenbus.blobs import blob_id_of
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.blobs.http import WithBlobs
from tokenbus_services.cli.service_registry import SERVICES, ServiceName, create
from tokenbus_services.gateway.app import WithPages
from tokenbus_services.gateway.http_request import Edge
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Turn
from tokenbus_services.net.request_guard import AsgiApp, RequestGuard
from tokenbus_services.settings import (
    BlobSettings,
    GatewaySettings,
    HttpSettings,
    RecordSettings,
    Settings,
    WebhookSettings,
)
from tokenbus_services.settings.tables.gateway import ALL_SURFACES

PAGES = ["/asyncapi", "/asyncapi.json", "/health", "/metrics", "/ready"]
METHODS = ("POST", "PUT", "PATCH", "DELETE")
HELLO = Script(name="hello", turns=(Turn(says=Reply(text="Hello.")),), repeat_last=True)


def made(service: ServiceName, directory: Path, **http: Any) -> AsgiApp:
    settings = Settings(
        redis_url="redis://127.0.0.1:1",
        records=RecordSettings(),
        data_dir=str(directory),
        http=HttpSettings(**http),
        blobs=BlobSettings(service_url="http://blobs:8080"),
        gateway=GatewaySettings(),
        webhooks={"any": WebhookSettings(url="https://example.com/", secret_env="HOOK_SECRET")},
    )
    return create(service, settings)


@pytest.fixture(autouse=True)
def _with_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz")


@asynccontextmanager
async def browser_client(app: AsgiApp, host: str = "127.0.0.1:8085") -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url=f"http://{host}") as http:
        yield http


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_has_these_pages_and_no_others_and_none_takes_anything(
    service: ServiceName, tmp_path: Path
) -> None:
    made_app: Any = made(service, tmp_path)
    guard = made_app.app if isinstance(made_app, Edge) else made_app
    assert isinstance(guard, RequestGuard)
    inner = guard.app
    assert isinstance(inner, WithBlobs) == (service == "blobs")
    app = inner.app if isinstance(inner, (WithBlobs, WithPages)) else inner  # the gateway's routes: test_gateway_keys
    assert isinstance(app, AsgiFastStream)
    assert sorted(path for path, _ in app.routes) == PAGES
    async with browser_client(made_app) as http:
        for method in METHODS:
            for page in PAGES:
                assert (await http.request(method, page)).status_code == 405
            assert (await http.request(method, "/asyncapi/try", json={})).status_code == 404
        assert (await http.get("/blobs")).status_code == (405 if service == "blobs" else 404)


@pytest.mark.parametrize("service", SERVICES)
async def test_no_page_loads_or_runs_anything(service: ServiceName, tmp_path: Path) -> None:
    async with browser_client(made(service, tmp_path)) as http:
        page = await http.get("/asyncapi")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<(script|link|img|iframe|object|base)|\bon\w+=|src=|url\(|@import|javascript:", page.text)


async def test_the_index_of_a_gateway_names_each_api_with_its_page_to_programs_of_this_machine(tmp_path: Path) -> None:
    guard: Any = made("gateway", tmp_path)
    async with browser_client(guard) as http:
        index = await http.get("/")
        rebound = await http.get("/", headers={"Host": "rebound.example"})
    assert (index.status_code, index.headers["content-type"]) == (200, "application/json")
    assert rebound.status_code == 421
    assert len(index.json()["apis"]) == len(ALL_SURFACES)
    app: Any = guard.app.app._routes  # its pages are beside
    while not hasattr(app, "router"):
        app = app.app
    paths = [route.path for route in app.router.routes]
    checkout = Path(__file__).parents[2]
    for api in index.json()["apis"]:
        assert any(path == api["path"] or path.startswith(f"{api['path']}/") for path in paths), api
        assert (checkout / api["docs"]).is_file(), api
    assert (checkout / index.json()["docs"]).is_file()


HOME = {"Host": "127.0.0.1:8085"}


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Origin": "https://elsewhere.example"}, 403, "cross_site"),
        ({"Origin": "null"}, 403, "cross_site"),
        ({"Origin": "http://127.0.0.1:9999"}, 403, "cross_site"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "cross_site"),
        ({"Sec-Fetch-Site": "same-site"}, 403, "cross_site"),
        ({"Host": "rebound.example"}, 421, "host_refused"),
        ({"Host": "rebound.example:8085", "Origin": "http://rebound.example:8085"}, 421, "host_refused"),
        ({"Host": "127.0.0.1.rebound.example"}, 421, "host_refused"),
        ({"Host": ""}, 421, "host_refused"),
        ({"Host": "[::1"}, 421, "host_refused"),
    ],
)
async def test_a_page_of_another_site_can_write_nothing(
    headers: dict[str, str], status: int, code: str, tmp_path: Path
) -> None:
    async with browser_client(made("blobs", tmp_path)) as http:
        for method, path in (("POST", "/blobs"), ("PUT", f"/blobs/{blob_id_of(b'x')}"), ("POST", "/blobs/x/lease")):
            answer = await http.request(method, path, headers={**HOME, **headers}, content=b"x")
            assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert not list((tmp_path / "blobs").rglob("*sha256*/*"))


@pytest.mark.parametrize("service", SERVICES)
async def test_a_name_that_was_pointed_here_can_read_no_page(service: ServiceName, tmp_path: Path) -> None:
    async with browser_client(made(service, tmp_path)) as http:
        for page in PAGES:
            assert (await http.get(page, headers={"Host": "rebound.example"})).status_code == 421
        for host in (f"{service}:8080", "10.1.2.3:8080"):
            assert (await http.get("/health", headers={"Host": host})).status_code == 200


CROSS_SITE: list[dict[str, str]] = [
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    {"Origin": "https://elsewhere.example"},
]


@pytest.mark.parametrize("headers", CROSS_SITE)
@pytest.mark.parametrize("query", ["group=g", "group", "from=start&group=", "%67roup=g"])
async def test_a_page_of_another_site_takes_no_events_of_a_group(
    headers: dict[str, str], query: str, tmp_path: Path
) -> None:
    async with browser_client(made("gateway", tmp_path)) as http:
        taken = await http.get(f"/topics/visible?{query}", headers={**HOME, **headers})
        assert (taken.status_code, taken.json()["error"]["code"]) == (403, "cross_site")


async def test_a_name_that_was_pointed_here_can_read_no_blob(tmp_path: Path) -> None:
    async with browser_client(made("blobs", tmp_path)) as http:
        blob = (await http.post("/blobs", content=b"x")).json()["blob_id"]
        assert (await http.get(f"/blobs/{blob}")).content == b"x"
        assert (await http.get(f"/blobs/{blob}", headers={"Host": "rebound.example"})).status_code == 421


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8085", "localhost", "LOCALHOST.:8085", "[::1]:8085", "10.1.2.3", "blobs:8080", "store.corp.example"],
)
async def test_programs_and_the_services_own_page_can_write_by_each_name_it_has(host: str, tmp_path: Path) -> None:
    async with browser_client(made("blobs", tmp_path, hosts=("store.corp.example",)), host) as http:
        given = {"Host": host}
        own = {**given, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        for headers in (given, own):
            assert (await http.post("/blobs", content=b"x", headers=headers)).status_code == 201


async def test_the_blob_service_requires_a_token_if_other_hosts_can_reach_it(server_url: str, tmp_path: Path) -> None:
    config = settings_file(tmp_path, f'redis_url = "{server_url}"\ndata_dir = "{tmp_path}"')
    worker = ("worker", "blobs", "--host", "0.0.0.0", "--port", "0")
    refused = await run(*worker, TOKENBUS_CONFIG=config)
    assert refused.code == 2
    assert "TOKENBUS_BLOB_TOKEN" in refused.error
    assert "0.0.0.0" in refused.error
    (file := tmp_path / "token").write_text("a-long-random-token\n")
    both = {"TOKENBUS_BLOB_TOKEN_FILE": str(file), "TOKENBUS_BLOB_TOKEN": "another"}
    assert "is set too" in (await run(*worker, TOKENBUS_CONFIG=config, **both)).error
    async with running(tmp_path / "err", *worker, TOKENBUS_CONFIG=config, TOKENBUS_BLOB_TOKEN_FILE=str(file)) as blobs:
        url = (await blobs.says("ready ")).split()[2]
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            assert (await http.post("/blobs", content=b"x")).status_code == 401
            bearer = {"Authorization": "Bearer a-long-random-token"}
            assert (await http.post("/blobs", content=b"x", headers=bearer)).status_code == 201
        assert await blobs.stop() == 0


@pytest.mark.parametrize("hostile", ["tries", "half-open"])
async def test_runs_end_normally_during_attacks_on_the_pages(
    hostile: str, server: Server, server_url: str, keys: Keys, tmp_path: Path
) -> None:
    """What FastStream's page for trying out did to a worker, and more half-open connections than it may have."""
    async with (
        MockProvider([HELLO]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE, "[http]\nconnections = 8\n") as workers,
        Client(server_url, prefix=keys.prefix, partitions=keys.partitions) as bus,
        httpx.AsyncClient(timeout=60) as http,
    ):
        held: list[asyncio.StreamWriter] = []
        for worker in workers.workers:
            if hostile == "tries":
                for channel in ("fetcher", "normalizer", "parser", "intake"):
                    tried = await http.post(f"{worker.url}/asyncapi/try", json={"channelName": channel, "message": {}})
                    assert tried.status_code == 404
            else:
                port = httpx.URL(worker.url).port
                for _ in range(20):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
                    held.append(writer)
                assert (await http.get(f"{worker.url}/ready", headers={"Connection": "close"})).status_code == 200
        request = {
            "type": "generate",
            "provider": "anthropic",
            "model": "hello",
            "messages": [{"role": "user", "content": "Hello?"}],
        }
        runs = [(await bus.publish(request)).id for _ in range(5)]
        logs = await ended(server.client, keys, runs)
        assert {log[-1]["type"] for log in logs.values()} == {"completed"}
        for writer in held:
            writer.close()
