"""A forwarded call is accounted for as a run is: audit, metrics, spans, the provider's limits, no key in its answer."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tests.collector import Collector, Received, collector
from tests.e2e.gateway.served import auth
from tests.waiting import eventually_sync
from tokenbus.testing import LocalBus
from tokenbus_services.gateway import audit
from tokenbus_services.gateway.forward import forward
from tokenbus_services.gateway.keys.key import new_key

ADA = new_key()
SECRET = "sk-planted-4f5e6d7c8b9a"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SETTINGS = f"""
[gateway]
forward = ["embeddings", "audio"]
[gateway.keys.ada]
sha256 = "{ADA.sha256}"
tenant = "crew"
metrics = true
[limits.providers.keyed]
[limits.providers.keyed.models.one]
concurrency = 1
[limits.providers.keyed.models.few]
requests_per_second = 0.01
"""


class Provider(ThreadingHTTPServer):
    """Streams its key in pieces, as the texts of several events, and answers for the model `one` when it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.goes_on = threading.Event()
        self.pauses = False


class Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body["model"])
        status, more = 200, {}
        if self.path.endswith("/audio/transcriptions"):
            kind = "text/event-stream"
            texts = ["It is ", SECRET[:9], SECRET[9:16], SECRET[16:], "."]
            events = [{"type": "transcript.text.delta", "delta": text} for text in texts]
            data = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
        else:
            if body["model"] == "one":
                assert self.server.goes_on.wait(60)
            elif body["model"] == "busy":
                status, more = 429, {"retry-after": "40"}
            kind = "application/json"
            data = json.dumps({"data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}}).encode()
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(data)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing."""


@contextmanager
def serving() -> Iterator[Provider]:
    with Provider() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def received() -> Generator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture(scope="module")
def provider() -> Generator[Provider]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def http(received: Collector, provider: Provider) -> Generator[httpx.Client]:
    keyed = f'[providers.keyed]\napi = "openai-chat"\nbase_url = "http://127.0.0.1:{provider.server_port}/v1"\n'
    more = f'{keyed}api_key_env = "PLANTED_KEY"\n[otel]\nendpoint = "{received.url}"\n'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANTED_KEY", SECRET)
        with LocalBus(SETTINGS + more) as bus, httpx.Client(base_url=bus.gateway, timeout=60) as client:
            client.headers.update(auth(ADA))
            yield client


def embed(http: httpx.Client, model: str, **headers: str) -> httpx.Response:
    return http.post("/v1/embeddings", json={"model": f"keyed/{model}", "input": "a"}, headers=headers)


def test_a_forwarded_call_is_in_the_audit_the_metrics_and_the_trace_of_its_client(
    http: httpx.Client, received: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(audit.log, "info", lambda event, **facts: logged.append(facts))
    assert embed(http, "any", traceparent=f"00-{TRACE}-{PARENT}-01").status_code == 200
    line = eventually_sync(lambda: next((line for line in logged if line["surface"] == "embeddings"), None))
    assert line
    assert line.items() >= {
        "key": "ada", "tenant": "crew", "model": "keyed/any", "end": "completed", "input_tokens": 7, "status": 200,
    }.items()  # fmt: skip
    metrics = http.get("/metrics").text
    assert 'tokenbus_gateway_key_answers_total{key="ada",status="200"} ' in metrics
    tokens = re.search(r'tokenbus_gateway_key_tokens_total{key="ada",kind="input"} (\d+)', metrics)
    assert tokens
    assert int(tokens[1]) % 7 == 0
    assert 'tokenbus_gateway_answers_total{status="200",surface="embeddings"}' in metrics

    def span() -> Received | None:
        return next((one for one in received.spans(TRACE) if one.name == "gateway embeddings"), None)

    found = eventually_sync(span)
    assert found
    assert (found.parent_id, found.attributes["tokenbus.status"]) == (PARENT, "completed")


def test_a_provider_of_all_places_taken_gets_no_forwarded_call_until_one_is_free(
    http: httpx.Client, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "LIMIT_WAIT_S", 0.2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(embed, http, "one")
        eventually_sync(lambda: "one" in provider.asked)
        refused = embed(http, "one")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "limit_wait")
        assert refused.headers["x-should-retry"] == "true"
        assert provider.asked.count("one") == 1
        provider.goes_on.set()
        assert first.result().status_code == 200
    eventually_sync(lambda: embed(http, "one").status_code == 200)


def test_a_forwarded_call_pays_for_the_rate_of_its_model(
    http: httpx.Client, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "LIMIT_WAIT_S", 0.2)
    assert embed(http, "few").status_code == 200
    refused = embed(http, "few")
    assert (refused.status_code, provider.asked.count("few")) == (429, 1)
    assert 1 < float(refused.headers["retry-after"]) <= 100


def test_a_provider_that_asks_for_a_pause_of_a_model_has_it(
    http: httpx.Client, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "LIMIT_WAIT_S", 0.2)
    assert embed(http, "busy").json()["error"]["code"] == "http_429"
    eventually_sync(lambda: embed(http, "busy").json()["error"]["code"] == "limit_wait")


def test_a_key_that_a_provider_spreads_over_events_is_not_sent(http: httpx.Client) -> None:
    body: Any = {"model": "keyed/any", "file": "x", "stream": True}
    answer = http.post("/v1/audio/transcriptions", json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    text = "".join(event["delta"] for event in events)
    assert len(events) == 5
    assert SECRET not in text
    assert text.startswith("It is ")
    assert text.endswith(".")
