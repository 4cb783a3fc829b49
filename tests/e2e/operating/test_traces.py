"""Traces and logs of runs whose services are processes of their own, one of which is killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.collector import Collector, Received, collector
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import SEPARATE, Fleet, Kind, ended, fleet, log_of, provider_table
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, Status, ToolCall, Turn

CONTENT = "pomegranate"
SECRET = "sk-planted-4f5e6d7c8b9a"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PUBLISHER = "00f067aa0ba902b7"
SCRIPTS = [
    Script(
        name="forecast",
        turns=(
            Turn(says=Reply(text=f"A {CONTENT}?", tool_calls=(ToolCall(name="weather", arguments={"city": CONTENT}),))),
            Turn(says=Reply(text=f"The {CONTENT} it is.")),
        ),
    ),
    Script(name="stalls", turns=(Turn(says=Reply(text="One two three."), first=(Stall(after_events=4),)),)),
    Script(name="gone", turns=(Turn(says=Reply(text="never"), fault=Status(status=404)),)),
]
KINDS: tuple[Kind, ...] = (*SEPARATE, "tools", "policy", "recorder", "gateway")
POLICY = """
[policies.talk]
use = "tests.e2e.policies.guards:Replace"
[policies.talk.options]
word = "swordfish"
by = "*"
"""


def lines(services: Fleet, run: str) -> dict[str, dict[str, object]]:
    """The log lines of a run, the last of each event."""
    logs = "".join(worker.log.read_text() for worker in services.workers)
    found = [json.loads(line) for line in logs.splitlines() if run in line]
    return {line["event"]: line for line in found}


def connected(spans: list[Received], root_parent: str) -> None:
    """Every span but the run's hangs under another span of the trace."""
    known = {span.span_id for span in spans}
    assert [span.name for span in spans if span.parent_id not in known] == [
        span.name for span in spans if span.parent_id == root_parent
    ]


async def test_a_run_is_one_trace_over_all_services_and_stays_one_if_one_of_them_is_killed(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_KEY", SECRET)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=bus")
    with collector() as received:
        async with MockProvider(SCRIPTS) as provider:
            keyed = provider_table("keyed", "openai-chat", provider.url).replace('env = ""', 'env = "PLANTED_KEY"')
            keyless = provider_table("keyless", "openai-chat", provider.url).replace('env = ""', 'env = "NO_SUCH_KEY"')
            otel = f'[otel]\nendpoint = "{received.url}"\n'
            bus, store = made(tmp_path / "bus"), made(tmp_path / "store")
            async with fleet(store, server_url, keys, provider.url, ("blobs",), otel) as stores:
                toml = f"{keyed}{keyless}[gateway]\n[records]\n{otel}{POLICY}"
                toml += f'[blobs]\nservice_url = "{stores.workers[0].url}"\n'
                async with fleet(bus, server_url, keys, provider.url, KINDS, toml) as services:
                    traceparent = f"00-{TRACE}-{PUBLISHER}-01"
                    run = await send(
                        *("forecast", CONTENT),
                        provider="keyed",
                        tools=[WEATHER],
                        policies=["talk"],
                        traceparent=traceparent,
                        record=True,
                        metadata={"tenant": "acme"},
                    )
                    await asyncio.to_thread(complete, services.workers[-1].url, f"00-{'b' * 32}-{PUBLISHER}-01")
                    unsampled = await send("forecast", traceparent=f"00-{'a' * 32}-{PUBLISHER}-00")
                    lost = await send("gone")
                    keyless_run = await send("forecast", provider="keyless")
                    await ended(server.client, keys, [run, unsampled, lost, keyless_run])
                    await eventually(lambda: check_trace(received.spans(TRACE)), timeout=60)
                    await eventually(lambda: check_asked(received.spans("b" * 32)), timeout=60)

                    killed = await send("stalls", on_failure="restart")
                    await eventually(lambda: begun(server, keys, killed), timeout=60)
                    services.workers[0].kill()
                    await services.start("fetcher")
                    await ended(server.client, keys, [killed])
                    await eventually(lambda: check_lost(received, killed), timeout=60)

                    received.refuses = True
                    unharmed = await send("gone", provider="gemini")
                    await ended(server.client, keys, [unharmed])
                    received.refuses = False

                    story = lines(services, run)
                    assert {"run_started", "attempt_started", "attempt_ended", "run_ended", "tool_called"} <= set(story)
                    assert story["attempt_ended"]["provider"] == "keyed"
                    not_found = lines(services, lost)["attempt_ended"]
                    assert (not_found["status"], not_found["class"]) == (404, "not_found")
                    assert "base_url in [providers.anthropic]" in str(not_found["hint"])
                    assert "NO_SUCH_KEY" in str(lines(services, keyless_run)["attempt_ended"]["hint"])
                    for planted in (CONTENT, SECRET):
                        assert not [w.kind for w in services.workers if planted in w.log.read_text()]
        assert not received.spans("a" * 32)
        assert {"gen_ai.client.operation.duration", "gen_ai.client.token.usage"} <= received.metrics()
        assert {headers.get("x-team") for headers in received.headers} == {"bus"}
        for planted in (CONTENT, SECRET):
            assert planted.encode() not in received.raw


def complete(gateway: str, traceparent: str) -> None:
    """Ask the gateway, which answers with the provider's error."""
    body = json.dumps({"model": "anthropic/gone", "messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"traceparent": traceparent, "content-type": "application/json"}
    request = Request(f"{gateway}/v1/chat/completions", body, headers)
    with pytest.raises(HTTPError, match="404") as refused:
        urlopen(request)
    refused.value.close()


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def check_asked(spans: list[Received]) -> bool:
    """The gateway's span is beneath its client's, and the run beneath the gateway's."""
    by_name = {span.name: span for span in spans}
    assert {"gateway openai_chat", "run gone"} <= set(by_name)
    gateway_span = by_name["gateway openai_chat"]
    assert (gateway_span.service, gateway_span.attributes["http.response.status_code"]) == ("tokenbus-gateway", 404)
    assert by_name["run gone"].parent_id == gateway_span.span_id
    connected(spans, PUBLISHER)
    return True


def check_trace(spans: list[Received]) -> bool:
    names = {"run forecast", "intake", "wait", "chat forecast", "POST", "decode", "execute_tool weather", "policies"}
    names |= {"record", "blob put"}
    assert {span.name for span in spans} == names
    connected(spans, PUBLISHER)
    services = ("fetcher", "normalizer", "parser", "tools", "policy", "recorder", "blobs")
    assert {span.service for span in spans} == {f"tokenbus-{name}" for name in services}
    by_name = {span.name: span for span in spans}
    root, tool, call = by_name["run forecast"], by_name["execute_tool weather"], by_name["POST"]
    chats = [span for span in spans if span.name == "chat forecast"]
    assert root.parent_id == PUBLISHER
    assert root.attributes["tokenbus.tenant"] == "acme"
    assert root.attributes["tokenbus.status"] == "completed"
    assert {span.parent_id for span in (*chats, tool, by_name["intake"], by_name["wait"])} == {root.span_id}
    assert len(chats) == 2
    assert call.parent_id in {chat.span_id for chat in chats}
    assert call.attributes["http.response.status_code"] == 200
    assert chats[0].attributes["gen_ai.provider.name"] == "openai"
    assert chats[0].attributes["gen_ai.usage.output_tokens"] > 0
    assert "tokenbus.first_byte" in chats[0].events
    assert tool.attributes["gen_ai.tool.name"] == "weather"
    decoded = {span.parent_id for span in spans if span.name == "decode"}
    assert decoded == {chat.span_id for chat in chats}
    assert by_name["blob put"].parent_id == by_name["record"].span_id
    assert by_name["blob put"].attributes["http.response.status_code"] == 201
    assert by_name["record"].parent_id == root.span_id
    assert all(span.begin_ns <= span.end_ns for span in spans)
    return True


async def begun(server: Server, keys: Keys, run: str) -> bool:
    """Whether visible text of the run was published."""
    return any(event.get("visible") for event in await log_of(server.client, keys, run))


def check_lost(received: Collector, run: str) -> bool:
    """What the killed fetcher had not sent is lost with it, its attempt is not."""
    roots = [s for s in received.spans() if s.attributes.get("tokenbus.run.id") == run and s.name == "run stalls"]
    assert roots
    spans = received.spans(roots[0].trace_id)
    chats = [span.attributes for span in spans if span.name == "chat stalls"]
    assert {chat["tokenbus.attempt"]: chat["tokenbus.outcome"] for chat in chats} == {1: "lost", 2: "ok"}
    assert "POST" in {span.name for span in spans}
    connected(spans, "")
    return True
