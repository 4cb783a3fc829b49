"""Who changed what, and over which door: each action has its entry, whichever door it took."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
import pytest
import redis
from websockets.sync.client import connect

from tests.e2e.gateway.served import auth
from tests.e2e.gateway.test_doors import AGENT, CHAT, at_the_console
from tests.services.cli.process import run as run_command
from tests.waiting import eventually_sync
from tokenbus.bus.dead_letters import DeadLetter
from tokenbus.bus.keys import Keys
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.mock_provider import Reply, Stall, ToolCall, Turn

ADA, OPS = new_key(), new_key()
SETTINGS = f"""
[console]
[gateway]
tools = ["pay"]
forward = ["files"]
[gateway.aliases]
default = ["anthropic/slow"]
[gateway.keys.ada]
sha256 = "{ADA.sha256}"
tenant = "acme"
[gateway.keys.ops]
sha256 = "{OPS.sha256}"
operator = true
console = ["act", "decide", "admin"]
[tools.pay]
kind = "python"
call = "tests.services.tools.sample_tools:echo"
description = "Pays."
parameters = {{ type = "object" }}
approval = "always"
"""
SAYS = [{"role": "user", "content": "hello"}]
Did = tuple[str, str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("text", "one two three")
        running.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
        running.model_says("pays", Reply(tool_calls=(ToolCall(name="pay", arguments={}),)), "Done.")
        yield running


@pytest.fixture(scope="module")
def http(bus: LocalBus) -> Generator[httpx.Client]:
    with httpx.Client(base_url=bus.gateway, timeout=60, headers=auth(ADA)) as client:
        yield client


def command(bus: LocalBus, *arguments: str, code: int | None = 0) -> str:
    """What it printed. ``code``: its exit code; None: any."""
    ended = asyncio.run(run_command(*arguments, **bus.environment))
    assert code in (None, ended.code), ended.err
    return ended.out


def begun(http: httpx.Client, model: str = "slow", **more: Any) -> str:
    return http.post("/runs", json={"model": f"anthropic/{model}", "messages": SAYS, **more}).json()["run"]


def waiting(bus: LocalBus, http: httpx.Client) -> tuple[str, str]:
    """A run, and what it waits for."""
    run = begun(http, "pays", tools=[{"name": "pay"}])
    found = eventually_sync(lambda: http.get(f"/runs/{run}/waiting").json()["waiting"])
    return run, found[0]["wait"]


def dead(bus: LocalBus) -> str:
    request = {"type": "generate", "id": secrets.token_hex(4), "provider": "anthropic", "model": "text"}
    data = msgspec.json.encode({**request, "messages": SAYS})
    letter = DeadLetter(reason="broke", stage="intake", stream=Keys().requests, entry="1-1", bytes=data)
    with redis.Redis.from_url(bus.url) as client:
        entry: Any = client.xadd(Keys().dead, {"__data__": msgspec.json.encode(letter)})
    return entry.decode()


def cancel(bus: LocalBus, http: httpx.Client) -> Did:
    run = begun(http)
    http.post(f"/runs/{run}/cancel", json={"reason": "private words"})
    return "cancel", "ada", "native", {"run": run, "tenant": "acme"}


def cancel_of_a_command(bus: LocalBus, http: httpx.Client) -> Did:
    run = begun(http)
    command(bus, "cancel", run)
    return "cancel", "@", "cli", {"run": run}


def cancel_at_the_console(bus: LocalBus, http: httpx.Client) -> Did:
    run = begun(http)
    at_the_console(http, f"/console/api/runs/{run}/cancel", OPS)
    return "cancel", "ops", "console", {"run": run}


def cancel_of_a_response(bus: LocalBus, http: httpx.Client) -> Did:
    asked = {"model": "anthropic/slow", "input": "hello", "background": True}
    response = http.post("/v1/responses", json=asked).json()["id"]
    http.post(f"/v1/responses/{response}/cancel")
    return "cancel", "ada", "openai_responses", {"run": response.removeprefix("resp_"), "tenant": "acme"}


def stop_of_a_chat(bus: LocalBus, http: httpx.Client) -> Did:
    with http.stream("POST", "/api/chat", json={**CHAT, "id": "stopped"}) as answer:
        next(line for line in answer.iter_lines() if "two" in line)
        assert http.post("/api/chat/stopped/stop").json() == {"stopped": True}
    return "cancel", "ada", "ai_sdk_ui", {"tenant": "acme"}


def stop_of_an_agent(bus: LocalBus, http: httpx.Client) -> Did:
    run = secrets.token_hex(8)
    with http.stream("POST", "/agui", json={**AGENT, "runId": run}) as answer:
        next(line for line in answer.iter_lines() if "two" in line)
        assert http.delete(f"/agui/runs/{run}").status_code == 204
    return "cancel", "ada", "ag_ui", {"tenant": "acme"}


def erasure(bus: LocalBus, http: httpx.Client) -> Did:
    response = http.post("/v1/responses", json={"model": "anthropic/text", "input": "hello"}).json()["id"]
    assert http.delete(f"/v1/responses/{response}").status_code == 200
    return "erase", "ada", "openai_responses", {"run": response.removeprefix("resp_"), "tenant": "acme"}


def end_of_a_conversation(bus: LocalBus, http: httpx.Client) -> Did:
    name = http.post("/v1/conversations", json={}).json()["id"]
    assert http.delete(f"/v1/conversations/{name}").status_code == 200
    return "conversation.delete", "ada", "openai_responses", {"conversation": name, "tenant": "acme"}


def session(http: httpx.Client, model: str = "text") -> str:
    name = secrets.token_hex(4)
    item = {"type": "configure", "request": {"model": f"anthropic/{model}"}}
    assert http.post(f"/sessions/{name}/events", json={"item": item}).status_code == 200
    return name


def settings_of_a_session(bus: LocalBus, http: httpx.Client) -> Did:
    return "session.configure", "ada", "native", {"session": session(http), "tenant": "acme"}


def end_of_a_session(bus: LocalBus, http: httpx.Client) -> Did:
    name = session(http)
    assert http.delete(f"/sessions/{name}").status_code < 300
    return "session.delete", "ada", "native", {"session": name, "tenant": "acme"}


def end_of_a_stream(bus: LocalBus, http: httpx.Client) -> Did:
    name = session(http)
    assert http.delete(f"/v1/stream/sessions/{name}").status_code == 204
    return "session.delete", "ada", "durable_streams", {"session": name, "tenant": "acme"}


def message_of_an_operator(bus: LocalBus, http: httpx.Client) -> Did:
    name = session(http)
    item = {"type": "message", "content": "private words"}
    at_the_console(http, f"/console/api/sessions/{name}/events?tenant=acme", OPS, item=item)
    return "session.message", "ops", "console", {"session": name}


def interrupt_of_an_operator(bus: LocalBus, http: httpx.Client) -> Did:
    name = session(http, "slow")
    assert http.post(f"/sessions/{name}/events", json={"item": {"type": "message", "content": "hello"}}).is_success
    at_the_console(http, f"/console/api/sessions/{name}/events?tenant=acme", OPS, item={"type": "interrupt"})
    return "session.interrupt", "ops", "console", {"session": name}


def decision(bus: LocalBus, http: httpx.Client) -> Did:
    run, wait = waiting(bus, http)
    http.post(f"/runs/{run}/waiting/{wait}", json={"type": "approval", "decision": "deny", "reason": "private words"})
    return "decide", "ada", "http", {"run": run, "wait": wait, "decision": "deny", "tenant": "acme"}


def decision_at_the_console(bus: LocalBus, http: httpx.Client) -> Did:
    run, wait = waiting(bus, http)
    body = {"type": "approval", "decision": "deny", "reason": "private words"}
    assert at_the_console(http, f"/console/api/runs/{run}/waiting/{wait}", OPS, **body).status == 200
    return "decide", "ops", "console", {"run": run, "wait": wait, "decision": "deny"}


def decision_of_a_command(bus: LocalBus, http: httpx.Client) -> Did:
    run, wait = waiting(bus, http)
    command(bus, "approve", run)
    return "decide", "@", "cli", {"run": run, "wait": wait, "decision": "allow"}


def replay(bus: LocalBus, http: httpx.Client) -> Did:
    entry = dead(bus)
    assert at_the_console(http, f"/console/api/dead/{entry}/retry", OPS).status == 202
    return "dead.retry", "ops", "console", {"entry": entry}


def replay_of_a_command(bus: LocalBus, http: httpx.Client) -> Did:
    entry = dead(bus)
    command(bus, "dead", "retry", entry)
    return "dead.retry", "@", "cli", {"entry": entry}


def drop(bus: LocalBus, http: httpx.Client) -> Did:
    entry = dead(bus)
    at_the_console(http, f"/console/api/dead/{entry}/drop", OPS)
    return "dead.drop", "ops", "console", {"entry": entry}


def fork(bus: LocalBus, http: httpx.Client) -> Did:
    name, to = session(http), secrets.token_hex(4)
    assert http.post(f"/sessions/{name}/fork", json={"session": to}).status_code == 201
    return "session.fork", "ada", "native", {"session": name, "to": to, "tenant": "acme"}


def steer(bus: LocalBus, http: httpx.Client) -> Did:
    address = bus.gateway.replace("http://", "ws://") + "/v1/responses"
    with connect(address, additional_headers=auth(ADA)) as socket:
        socket.send(json.dumps({"type": "response.create", "model": "anthropic/slow", "input": "hello"}))
        response = ""
        while "two" not in (frame := json.loads(socket.recv())).get("delta", ""):
            response = frame.get("response", {}).get("id", response)
        said = {"type": "response.steer", "previous_response_id": response, "input": "private words"}
        socket.send(json.dumps(said))
        while json.loads(socket.recv())["type"] != "response.incomplete":
            pass
    return "steer", "ada", "openai_responses", {"run": response.removeprefix("resp_"), "tenant": "acme"}


def end_of_a_file(bus: LocalBus, http: httpx.Client) -> Did:
    headers = {"x-tokenbus-provider": "openai-chat"}
    sent = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    file = http.post("/v1/files", headers=headers, **sent).json()["id"]
    assert http.delete(f"/v1/files/{file}").json()["deleted"]
    return "files.delete", "ada", "forward", {"id": file, "provider": "openai-chat", "tenant": "acme"}


def change_of_a_conversation(bus: LocalBus, http: httpx.Client) -> Did:
    name = http.post("/v1/conversations", json={}).json()["id"]
    assert http.post(f"/v1/conversations/{name}", json={"metadata": {"a": "private words"}}).status_code == 200
    return "conversation.change", "ada", "openai_responses", {"conversation": name, "tenant": "acme"}


def making_of_a_stream(bus: LocalBus, http: httpx.Client) -> Did:
    name = secrets.token_hex(4)
    made = http.put(f"/v1/stream/sessions/{name}", headers={"content-type": "application/json"})
    assert made.status_code == 201, made.text
    return "session.configure", "ada", "durable_streams", {"session": name, "tenant": "acme"}


def retry_at_the_console(bus: LocalBus, http: httpx.Client) -> Did:
    run = begun(http)
    http.post(f"/runs/{run}/cancel")
    eventually_sync(lambda: http.get(f"/runs/{run}").json()["status"] == "cancelled")
    assert at_the_console(http, f"/console/api/runs/{run}/retry", OPS).status == 202
    return "retry", "ops", "console", {"run": run}


def erasure_of_a_command(bus: LocalBus, http: httpx.Client) -> Did:
    run = begun(http, "text")
    http.get(f"/runs/{run}", params={"wait": "true"})
    command(bus, "erase", run, "--yes", code=None)  # 1 while an open run of another test shares entries with it
    return "erase", "@", "cli", {"runs": 1, "names": [run]}


def test_what_lies_in_a_time_is_erased_and_what_is_before_and_after_it_stays(bus: LocalBus, http: httpx.Client) -> None:
    def now_s() -> int:
        with redis.Redis.from_url(bus.url) as client:
            at: Any = client.time()
        return at[0]

    def ended() -> tuple[str, datetime]:
        """A run, and the next full second, which has begun."""
        run = begun(http, "text")
        assert http.get(f"/runs/{run}", params={"wait": "true"}).json()["status"] == "completed"
        second = now_s()
        eventually_sync(lambda: now_s() > second)
        return run, datetime.fromtimestamp(second + 1, UTC)

    (before, since), (within, until), (after, _) = ended(), ended(), ended()
    asked = ("--since", since.isoformat(), "--until", until.isoformat())
    assert json.loads(command(bus, "erase", *asked, "--dry-run", "--json"))["runs"] == 1
    said = json.loads(command(bus, "erase", *asked, "--yes", "--json", code=None))
    assert (said["runs"], said["open"], said["erased"]["runs"]) == (1, [], 1)
    assert [http.get(f"/runs/{run}").status_code for run in (before, within, after)] == [200, 404, 200]
    entry = json.loads(command(bus, "audit", "--json", "--most", "1"))
    assert (entry["action"], entry["facts"]["names"], "since_ms" in entry["facts"]) == ("erase", [within], True)


@pytest.mark.parametrize(
    "act",
    [
        cancel, cancel_of_a_command, cancel_at_the_console, cancel_of_a_response, stop_of_a_chat, stop_of_an_agent,
        erasure, erasure_of_a_command, end_of_a_conversation, settings_of_a_session, end_of_a_session, end_of_a_stream,
        message_of_an_operator, interrupt_of_an_operator, decision, decision_at_the_console,
        decision_of_a_command, replay, replay_of_a_command, drop, fork, steer, end_of_a_file, change_of_a_conversation,
        making_of_a_stream, retry_at_the_console,
    ],
)  # fmt: skip
def test_an_action_has_one_entry_of_who_did_what_over_which_door(
    bus: LocalBus, http: httpx.Client, act: Callable[[LocalBus, httpx.Client], Did]
) -> None:
    action, by, door, facts = act(bus, http)
    printed = command(bus, "audit", "--json", "--most", "1000").splitlines()
    entries = [
        entry
        for entry in map(json.loads, printed)
        if (entry["action"], entry["door"]) == (action, door) and facts.items() <= entry["facts"].items()
    ]
    assert len(entries) == 1, printed
    assert by in entries[0]["by"]
    assert "private words" not in "".join(printed)


def test_a_client_that_leaves_is_no_action(bus: LocalBus, http: httpx.Client) -> None:
    asked = {"model": "anthropic/slow", "messages": SAYS, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        run = answer.headers["x-tokenbus-run"]
    eventually_sync(lambda: http.get(f"/runs/{run}").json()["status"] == "cancelled")
    assert run not in command(bus, "audit", "--json", "--most", "1000")
