"""Sessions over HTTP: what one client appends, every other one reads in one order, and each pays for its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import redis

from tests.e2e.gateway.served import auth
from tests.waiting import eventually_sync
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.requests import Configure
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.budgets.spend import Spent, read_spend
from tokenbus_services.gateway.keys.key import NewKey, new_key
from tokenbus_services.mock_provider import Reply, Stall, Turn

ADA, EVE, BOSS, POOR, NARROW, SHORT, PAYS, TALKS = (new_key() for _ in range(8))
KEYS = {
    "ada": (ADA, 'tenant = "ada"'),
    "eve": (EVE, 'tenant = "eve"'),
    "boss": (BOSS, 'tenant = "boss"\noperator = true'),
    "poor": (POOR, 'tenant = "ada"\nmax_budget = 0.5'),
    "narrow": (NARROW, 'tenant = "ada"\nmodels = ["anthropic/another"]'),
    "pays": (PAYS, 'tenant = "ada"\nmax_budget = 9'),
    "talks": (TALKS, 'tenant = "ada"\nmodels = ["anthropic/talk"]\ntools = []'),
    "short": (SHORT, 'tenant = "ada"\nmax_tokens = 7'),
}
SETTINGS = """
[gateway]
[gateway.prices."anthropic/"]
input = 1
output = 1000
[gateway.prices."anthropic/short"]
input = 1
output = 1000
max_output = 500
""" + "".join(f'[gateway.keys.{name}]\nsha256 = "{key.sha256}"\n{more}\n' for name, (key, more) in KEYS.items())
UI = {"id": "m", "role": "user", "parts": [{"type": "text", "text": "on"}]}
TALK = {"model": "anthropic/talk", "max_tokens": 100}


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        yield running


@pytest.fixture
def http(bus: LocalBus) -> Generator[httpx.Client]:
    bus.model_says("talk", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")), *["four"] * 9)
    with httpx.Client(base_url=bus.gateway, timeout=60) as client:
        yield client


def append(http: httpx.Client, session: str, key: NewKey, item: dict[str, Any], **more: Any) -> httpx.Response:
    return http.post(f"/sessions/{session}/events", json={"item": item, **more}, headers=auth(key))


def configured(http: httpx.Client, session: str, key: NewKey = ADA, **more: Any) -> None:
    answer = append(http, session, key, {"type": "configure", "request": {**TALK, **more}})
    assert answer.status_code == 200, answer.text


def say(http: httpx.Client, session: str, text: str, key: NewKey = ADA, **more: Any) -> dict[str, Any]:
    answer = append(http, session, key, {"type": "message", "content": text}, **more)
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


def events(
    http: httpx.Client, session: str, key: NewKey = ADA, *, after: str | None = None, live: bool = True
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Id, name and data of each event."""
    headers = {**auth(key), **({"last-event-id": after} if after else {})}
    with http.stream("GET", f"/sessions/{session}/events?live={json.dumps(live)}", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        fields: dict[str, str] = {}
        for line in answer.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                yield fields["id"], fields["event"], json.loads(fields["data"])
                fields = {}


def until(found: Iterator[tuple[str, str, dict[str, Any]]], name: str, times: int = 1) -> list[tuple[str, str, Any]]:
    seen: list[tuple[str, str, Any]] = []
    for event in found:
        seen.append(event)
        times -= event[1] == name
        if not times:
            break
    return seen


def test_a_conversation_is_written_and_read_over_http_in_one_order_from_any_cursor(
    bus: LocalBus, http: httpx.Client
) -> None:
    configured(http, "chat")
    first = say(http, "chat", "hello", id="a", metadata={"who": "ada", "gateway": {"key": "eve"}, "tenant": "eve"})
    assert (first["append"], first["fate"]["state"]) == ("a", "delivered")
    live = events(http, "chat")
    begun = until(live, "chunk")
    answer = append(http, "chat", ADA, {"type": "message", "content": "and then?"}, id="b")
    assert (answer.status_code, answer.json()) == (202, {"append": "b", "fate": {"state": "appended"}})
    again = http.post(
        "/sessions/chat/events",
        json={"item": {"type": "message", "content": "and then?"}},
        headers={**auth(ADA), "idempotency-key": "b"},
    )
    assert again.json() == answer.json()
    rejected = append(http, "chat", ADA, {"type": "message", "content": "no", "when_busy": "reject"})
    assert rejected.json()["fate"] == {"state": "returned", "reason": "busy"}
    say(http, "chat", "never", id="w")
    append(http, "chat", ADA, {"type": "withdraw", "append": "w"})
    fate = http.get("/sessions/chat/events/w", headers=auth(ADA)).json()
    assert fate["fate"] == {"state": "returned", "reason": "withdrawn"}
    seq = next(data["seq"] for _, name, data in begun if name == "chunk")
    too_far = append(http, "chat", ADA, {"type": "interrupt", "heard_through": seq + 99})
    assert too_far.json()["fate"]["reason"] == "heard_too_far"
    append(http, "chat", ADA, {"type": "interrupt", "heard_through": seq})
    whole = begun + until(live, "run_ended", 2)
    stored = list(events(http, "chat", live=False))
    assert stored == whole
    for n in range(0, len(stored), 4):
        assert list(events(http, "chat", after=stored[n][0], live=False)) == stored[n + 1 :]
    statuses = [data["status"] for _, name, data in stored if name == "run_ended"]
    assert statuses == ["cancelled", "completed"]
    started = next(data for _, name, data in stored if name == "started")
    assert started["metadata"]["tenant"] == "ada"
    assert started["metadata"]["gateway"]["key"] == "ada"
    assert started["metadata"]["who"] == "ada"
    history = http.get("/sessions/chat/messages", headers=auth(ADA)).json()["messages"]
    assert [message["role"] for message in history] == ["user", "assistant", "user", "assistant"]
    run = first["fate"]["run"]
    assert http.get(f"/runs/{run}", headers=auth(ADA)).json()["status"] == "cancelled"
    forked = http.post("/sessions/chat/fork", json={"session": "fork", "through": run}, headers=auth(ADA))
    assert (forked.status_code, forked.json()) == (201, {"session": "fork"})
    assert http.get("/sessions/fork/messages", headers=auth(ADA)).json()["messages"] == history[:2]
    cursor = stored[-1][0]
    assert http.delete("/sessions/chat", headers=auth(ADA)).status_code == 204
    assert http.get("/sessions/chat", headers=auth(ADA)).status_code == 404
    configured(http, "chat")
    refused = http.get(f"/sessions/chat/events?after={cursor}", headers=auth(ADA))
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "session_replaced")
    http.delete("/sessions/chat", headers=auth(ADA))


def test_a_session_is_of_its_tenant_and_no_answer_tells_another_that_it_exists(
    bus: LocalBus, http: httpx.Client
) -> None:
    configured(http, "secret", metadata={"room": "7"})
    paths = ("/sessions/secret", "/sessions/secret/events", "/sessions/secret/messages", "/sessions/secret/events/x")
    for path in paths:
        other = http.get(path, headers=auth(EVE))
        missing = http.get(path.replace("secret", "nothing"), headers=auth(EVE))
        assert other.status_code == missing.status_code == 404
        assert other.text.replace("secret", "nothing") == missing.text
    assert append(http, "secret", EVE, {"type": "message", "content": "hello"}).status_code == 404
    assert http.delete("/sessions/secret", headers=auth(EVE)).status_code == 404
    assert http.get("/sessions?tenant=ada", headers=auth(EVE)).json()["sessions"] == []
    listed = http.get("/sessions?metadata.room=7", headers=auth(ADA)).json()["sessions"]
    assert [info["session"] for info in listed] == ["secret"]
    assert http.get("/sessions/secret", headers=auth(BOSS)).status_code == 404
    seen = http.get("/sessions/secret?tenant=ada", headers=auth(BOSS)).json()
    assert (seen["session"], seen["configuration"]["request"]["model"]) == ("secret", "talk")
    assert {"secret"} <= {info["session"] for info in http.get("/sessions", headers=auth(BOSS)).json()["sessions"]}
    assert http.get("/sessions").status_code == 401
    page = http.get("/sessions?limit=1", headers=auth(ADA)).json()
    rest = http.get(f"/sessions?limit=200&after={page['next']}", headers=auth(ADA)).json()["sessions"]
    assert page["sessions"][0] not in rest
    for wrong in ("limit=0", "after=x", "older_than=x", "colour=red", "oldest_first=1"):
        assert http.get(f"/sessions?{wrong}", headers=auth(ADA)).status_code == 400


def test_what_is_wrong_is_refused_with_its_place(http: httpx.Client) -> None:
    configured(http, "wrong")
    for item, status, param in (
        ({"type": "message", "content": 7}, 400, "item.content"),
        ({"type": "delete"}, 400, "item.type"),
        ({"type": "configure", "request": {"model": "nobody/x"}}, 404, "model"),
        ({"type": "configure", "request": {**TALK, "max_tokens": 0}}, 400, "max_tokens"),
        ({"type": "configure", "request": {**TALK, "extra": {"logit_bias": {}}}}, 400, "extra.logit_bias"),
        ({"type": "message", "content": [{"type": "text", "text": "x", "extra": {"anthropic": {"y": 1}}}]}, 400, None),
    ):
        answer = append(http, "wrong", ADA, item)
        assert answer.status_code == status, answer.text
        if param:
            assert answer.json()["error"]["param"] == param
    assert http.get("/sessions/wrong/events?after=5", headers=auth(ADA)).status_code == 400
    assert http.post("/sessions/wrong/events", content=b"{", headers=auth(ADA)).status_code == 400


def held(http: httpx.Client, bus: LocalBus, key: str) -> float:

    with redis.Redis.from_url(bus.url) as client:
        found: Any = client.hget(Keys().gateway_held(key), "")
    return int(found or 0) / 1e9


def test_a_budget_holds_what_an_append_may_cost_until_its_run_has_ended(bus: LocalBus, http: httpx.Client) -> None:
    configured(http, "money", POOR)
    assert held(http, bus, "poor") == 0
    say(http, "money", "hello", POOR, id="a")
    until(events(http, "money"), "chunk")
    one = held(http, bus, "poor")
    assert one > 0.1  # 100 tokens of output
    say(http, "money", "more", POOR, id="b")
    two = held(http, bus, "poor")
    assert two > 1.9 * one  # the history too
    assert append(http, "money", POOR, {"type": "message", "content": "x", "when_busy": "reject"}).status_code == 200
    assert held(http, bus, "poor") == two
    append(http, "money", ADA, {"type": "withdraw", "append": "b"})
    assert held(http, bus, "poor") == one
    for n in range(9):
        answer = append(http, "money", POOR, {"type": "message", "content": f"too many {n}"})
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "budget_reserved"
            break
    else:
        pytest.fail("more than the budget was reserved")
    append(http, "money", ADA, {"type": "interrupt"})
    eventually_sync(lambda: held(http, bus, "poor") == 0)
    spent = {info["status"] for _, name, info in events(http, "money", live=False) if name == "run_ended"}
    assert "completed" in spent
    with bus.sync_client() as direct:
        assert all(info.tenant == "ada" for info in direct.sessions(words="money"))
    http.delete("/sessions/money", headers=auth(ADA))


def test_a_key_may_not_reach_by_a_session_what_it_may_not_ask_for(http: httpx.Client) -> None:
    configured(http, "rights")
    for item in ({"type": "message", "content": "hello"}, {"type": "configure", "request": TALK}):
        answer = append(http, "rights", NARROW, item)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")
    answer = append(http, "rights", SHORT, {"type": "message", "content": "hello"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "session_not_of_key")
    configured(http, "rights", SHORT)
    seen = http.get("/sessions/rights", headers=auth(ADA)).json()
    assert seen["configuration"]["request"]["max_tokens"] == 7
    assert say(http, "rights", "hello", SHORT)["fate"]["state"] == "delivered"


def test_the_key_of_a_run_pays_for_the_summary_of_its_history_and_may_use_its_model(
    bus: LocalBus, http: httpx.Client
) -> None:
    bus.model_says("short", "They counted.")
    bound = {"tokens": 300, "how": "summary", "provider": "anthropic", "model": "short"}
    narrow = {"type": "configure", "request": {**TALK, "model": "anthropic/another"}, "history": bound}
    answer = append(http, "long", NARROW, narrow)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed"), answer.text
    answer = append(http, "long", PAYS, {"type": "configure", "request": TALK, "history": bound})
    assert answer.status_code == 200, answer.text
    assert held(http, bus, "pays") == 0
    bus.model_says("talk", "one")
    say(http, "long", "count " * 400, PAYS)
    until(events(http, "long"), "run_ended")
    bus.model_says("talk", Turn(says=Reply(text="two three"), fault=Stall(after_text="two")))
    say(http, "long", "on", PAYS)
    until(events(http, "long"), "chunk", 2)
    assert held(http, bus, "pays") > 0.6, "for 100 tokens of the answer, and 500 of the summary"
    append(http, "long", ADA, {"type": "interrupt"})
    until(events(http, "long"), "run_ended", 2)
    assert [request["model"] for request in bus.requests].count("short") == 1

    async def spent() -> Spent:
        async with Server(bus.url) as server:
            return (await read_spend(server, Keys(), ["pays"]))[0].total

    eventually_sync(lambda: asyncio.run(spent()).runs == 3)
    assert held(http, bus, "pays") == 0


def chat(http: httpx.Client, chat: str, key: NewKey, text: str) -> httpx.Response:
    """Say it as `useChat` does, in a chat that is the session of this name."""
    said = {**UI, "id": f"m-{text}", "parts": [{"type": "text", "text": text}]}
    body = {"id": chat, "messages": [said], "trigger": "submit-message", "model": "anthropic/talk"}
    return http.post("/api/chat", json=body, headers=auth(key))


SUMMARY = {"tokens": 9, "how": "summary"}


@pytest.mark.parametrize(
    ("fields", "history", "refused"),
    [
        ({"fallback": [{"provider": "anthropic", "model": "another"}]}, None, (403, "anthropic/another")),
        (
            {"tools": [{"name": "x", "parameters": {"type": "object"}, "extra": {"anthropic": {"y": 1}}}]},
            None,
            (400, "allow_extra"),
        ),
        ({"extra": {"service_tier": "x"}}, None, (400, "allow_extra")),
        ({}, SUMMARY, None),
        ({}, {**SUMMARY, "provider": "anthropic", "model": "short"}, (403, "anthropic/short")),
    ],
)
def test_what_a_configuration_adds_to_a_chats_request_is_admitted_with_it(
    bus: LocalBus, http: httpx.Client, fields: dict[str, Any], history: Any, refused: tuple[int, str] | None
) -> None:
    bus.model_says("talk", "one")
    with bus.sync_client() as direct:
        item = {"type": "configure", "request": {"provider": "anthropic", "model": "talk", **fields}}
        item |= {"history": history} if history else {}
        direct.session("added", tenant="ada").append(msgspec.convert(item, Configure))
    answer = chat(http, "added", TALKS, "hello")
    if refused:
        assert (answer.status_code, refused[1] in answer.text) == (refused[0], True), answer.text
    else:
        assert answer.status_code == 200, answer.text
    said = http.get("/sessions/added/messages", headers=auth(ADA)).json()["messages"]
    assert bool(said) == (refused is None)
    http.delete("/sessions/added", headers=auth(ADA))


def test_a_budget_holds_the_history_and_what_is_configured_of_a_chat(bus: LocalBus, http: httpx.Client) -> None:
    bus.model_says("talk", "one", Turn(says=Reply(text="two three"), fault=Stall(after_text="two")))
    configured(http, "held")
    say(http, "held", "count " * 40_000)
    until(events(http, "held"), "run_ended")
    body = {"id": "held", "messages": [UI], "trigger": "submit-message", "model": "anthropic/talk"}
    with http.stream("POST", "/api/chat", json=body, headers=auth(POOR)):
        most = 0.1 + 0.24
        assert most < held(http, bus, "poor") < most + 0.1, "100 tokens of output, and each byte of the history"
    http.delete("/sessions/held", headers=auth(ADA))
    eventually_sync(lambda: held(http, bus, "poor") == 0)


def test_a_chat_that_another_key_has_made_has_the_fields_that_the_writers_key_forces(
    bus: LocalBus, http: httpx.Client
) -> None:
    bus.model_says("talk", "one", "two")
    assert chat(http, "forced", ADA, "hello").status_code == 200
    assert chat(http, "forced", SHORT, "and?").status_code == 200
    assert [request["max_tokens"] for request in bus.requests[-1:]] == [7]
    http.delete("/sessions/forced", headers=auth(ADA))


def test_an_id_that_no_append_can_have_has_no_fate(bus: LocalBus, http: httpx.Client) -> None:
    """What waits is beside the fates, under names that begin with `!` and `^`."""
    configured(http, "names")
    say(http, "names", "hello", id="a")
    append(http, "names", ADA, {"type": "message", "content": "waits", "when_busy": "steer"}, id="b")
    for name in ("!b", "^b", "é", "x" * 300):
        assert http.get(f"/sessions/names/events/{name}", headers=auth(ADA)).status_code == 404
    append(http, "names", ADA, {"type": "interrupt"})
