"""Every way to begin work goes through one admission and is billed to who asks. The ways are those of the routing
tables: a route that is neither below `BEGINS` nor below `BEGINS_NOTHING` fails here until it is.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
import redis
from websockets.sync.client import connect

import tokenbus_services
from tests.e2e.gateway.served import auth, forwarded_routes, gateway_routes
from tests.waiting import eventually_sync
from tokenbus.bus.dead_letters import DeadLetter
from tokenbus.bus.keys import Keys
from tokenbus.events.public import Started
from tokenbus.sync import Client as SyncClient
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.keys.key import NewKey, new_key
from tokenbus_services.gateway.routes.forwarded import REST
from tokenbus_services.mock_provider import CutOff, Picture, Reply, Status, Turn

OWNER, ASKER, SPENT_LIMIT, SPENT_BUDGET, OTHER_MODEL = (new_key() for _ in range(5))
KEYS = {
    "owner": (OWNER, ""),
    "asker": (ASKER, ""),
    "limited": (SPENT_LIMIT, "rpm_limit = 1"),
    "poor": (SPENT_BUDGET, "max_budget = 0.001"),
    "narrow": (OTHER_MODEL, 'models = ["anthropic/another"]'),
}
ROLES = ["act", "admin", "decide"]
SETTINGS = (
    """
[retry]
max_attempts = 1
[console]
[gateway]
early_status_s = 0.2
[gateway.aliases]
default = ["anthropic/text"]
"""
    + "".join(f'[gateway.prices."{name}/"]\ninput = 1000\noutput = 1000\n' for name in ("anthropic", "gemini"))
    + "".join(
        f'[gateway.keys.{name}]\nsha256 = "{key.sha256}"\ntenant = "crew"\nconsole = {json.dumps(ROLES)}\n{more}\n'
        for name, (key, more) in KEYS.items()
    )
)
SAYS = [{"role": "user", "content": "hello"}]
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}
CHAT = {"id": "c1", "messages": [{"id": "u1", "role": "user", "parts": [{"type": "text", "text": "hello"}]}]}
AGENT = {
    "threadId": "t1",
    "state": {},
    "messages": [{"id": "m1", "role": "user", "content": "hello"}],
    "tools": [],
    "context": [],
    "forwardedProps": {},
}


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("text", Reply(text="one two three"))
        running.model_says("image", Reply(text="Here.", pictures=(Picture(data=b"\x89PNG not really"),)))
        running.model_says("broken", Turn(says=Reply(), fault=Status(status=529)))
        running.model_says("claude-sonnet-4-5", Turn(says=Reply(text="one two three"), fault=CutOff(after_events=4)))
        yield running


@pytest.fixture(scope="module")
def http(bus: LocalBus) -> Generator[httpx.Client]:
    with httpx.Client(base_url=bus.gateway, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def direct(bus: LocalBus) -> Generator[SyncClient]:
    """The bus itself, beside all doors."""
    with bus.sync_client() as client:
        yield client


class Answer(NamedTuple):
    status: int
    text: str


Ask = Callable[[LocalBus, httpx.Client, str, NewKey], Answer]
"""Asks at a path with a key."""


def posting(body: dict[str, Any], model: str = "") -> Ask:
    def ask(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
        fresh = {**body, "runId": secrets.token_hex(8)} if "threadId" in body else body
        answer = http.post(path.replace("{model:path}", model), json=fresh, headers=auth(key))
        return Answer(answer.status_code, answer.text)

    return ask


def again(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    answer = http.post(path.replace("{run}", ended_badly(http)), json={}, headers=auth(key))
    return Answer(answer.status_code, answer.text)


def ended_badly(http: httpx.Client) -> str:
    """A run of another key of the tenant, cut off after some text."""
    body = {"model": "anthropic/claude-sonnet-4-5", "messages": SAYS, "on_failure": "fail"}
    run = http.post("/runs", json=body, headers=auth(OWNER)).json()["run"]
    assert http.get(f"/runs/{run}?wait=true", headers=auth(OWNER)).json()["status"] == "incomplete"
    return run


_over: list[str] = []


def over(http: httpx.Client) -> str:
    """The same such run each time, unless somebody deleted it."""
    if not _over or http.get(f"/runs/{_over[0]}", headers=auth(OWNER)).status_code != 200:
        _over[:] = [ended_badly(http)]
    return _over[0]


def at_the_console(http: httpx.Client, path: str, key: NewKey, **body: Any) -> Answer:
    with httpx.Client(base_url=http.base_url, timeout=60) as browser:

        def post(path: str, csrf: str, **body: Any) -> httpx.Response:
            return browser.post(path, json=body, headers={"x-console-csrf": csrf})

        csrf = browser.get("/console/api/session").json()["csrf"]
        csrf = post("/console/api/login", csrf, key=key.text).json()["csrf"]
        answer = post(path, csrf, **body)
        return Answer(answer.status_code, answer.text)


def console_again(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    return at_the_console(http, path.replace("{run}", ended_badly(http)), key)


def dead_letter_again(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    keys = Keys()
    run = f"dead-{secrets.token_hex(4)}"
    request = {"type": "generate", "id": run, "provider": "anthropic", "model": "text", "messages": SAYS}
    data = msgspec.json.encode({**request, "metadata": {"tenant": "crew"}})
    letter = DeadLetter(reason="broke", stage="intake", stream=keys.requests, entry="1-1", bytes=data, run=run)
    with redis.Redis.from_url(bus.url) as client:
        entry: Any = client.xadd(keys.dead, {"__data__": msgspec.json.encode(letter)})
    return at_the_console(http, path.replace("{entry}", entry.decode()), key)


def responses_socket(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    frame = {"type": "response.create", "model": "anthropic/text", "input": "hello"}
    return _over_a_socket(http, path, key, frame, ends=("response.completed", "error"))


def chat_socket(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    body = {"model": "anthropic/text"}
    frame = {"type": "send", "requestId": "r1", "headers": {}, "body": body, "trigger": "submit-message", **CHAT}
    return _over_a_socket(http, path, key, frame, ends=("end", "error"))


def _over_a_socket(
    http: httpx.Client, path: str, key: NewKey, frame: dict[str, Any], *, ends: tuple[str, ...]
) -> Answer:
    address = str(http.base_url).replace("http", "ws", 1).rstrip("/") + path
    with connect(address, additional_headers=auth(key)) as socket:
        socket.send(json.dumps(frame))
        while (event := json.loads(socket.recv(timeout=60)))["type"] not in ends:
            pass
    return Answer(event.get("status", 200 if event["type"] != "error" else 0), json.dumps(event))


MESSAGE = {"type": "message", "content": "hello"}


def session_of(http: httpx.Client) -> str:
    """A session of another key of the tenant."""
    name = secrets.token_hex(4)
    configure = {"item": {"type": "configure", "request": {"model": "anthropic/text"}}}
    assert http.post(f"/sessions/{name}/events", json=configure, headers=auth(OWNER)).status_code == 200
    return name


def to_session(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    answer = http.post(path.replace("{session}", session_of(http)), json={"item": MESSAGE}, headers=auth(key))
    return Answer(answer.status_code, answer.text)


def to_session_at_the_console(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    return at_the_console(http, path.replace("{session}", session_of(http)) + "?tenant=crew", key, item=MESSAGE)


ANTHROPIC = {"anthropic-version": "2026-10-21"}
SAID = {"type": "user.message", "content": [{"type": "text", "text": "hello"}]}


def to_new_session(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    body = {"agent": "anthropic/text", "environment_id": "env_x", "initial_events": [SAID]}
    answer = http.post(path, json=body, headers={**ANTHROPIC, **auth(key)})
    return Answer(answer.status_code, answer.text)


def events_to_session(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    path = path.replace("{id}", session_of(http))
    answer = http.post(path, json={"events": [SAID]}, headers={**ANTHROPIC, **auth(key)})
    return Answer(answer.status_code, answer.text)


def to_stream(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    answer = http.post(path.replace("{session}", session_of(http)), json="hello", headers=auth(key))
    return Answer(answer.status_code, answer.text)


def to_new_stream(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    path = path.replace("{session}", secrets.token_hex(4))
    answer = http.put(f"{path}?model=anthropic/text", json="hello", headers=auth(key))
    return Answer(answer.status_code, answer.text)


BEGINS: dict[tuple[str, str], Ask] = {
    ("POST", "/runs"): posting({"model": "anthropic/text", "messages": SAYS}),
    ("POST", "/runs/{run}/retry"): again,
    ("POST", "/runs/{run}/resume"): again,
    ("POST", "/sessions/{session}/events"): to_session,
    ("POST", "/v1/chat/completions"): posting({"model": "anthropic/text", "messages": SAYS}),
    ("POST", "/chat/completions"): posting({"model": "anthropic/text", "messages": SAYS}),
    ("POST", "/v1/responses"): posting({"model": "anthropic/text", "input": "hello"}),
    ("POST", "/responses"): posting({"model": "anthropic/text", "input": "hello"}),
    ("WEBSOCKET", "/v1/responses"): responses_socket,
    ("WEBSOCKET", "/responses"): responses_socket,
    **{
        ("POST", f"{base}/messages"): posting({"model": "anthropic/text", "messages": SAYS, "max_tokens": 9})
        for base in ("/anthropic/v1", "/anthropic/v1/v1", "/v1", "/v1/v1")
    },
    **{
        ("POST", f"{base}/{{model:path}}:{method}"): posting(GEMINI, "anthropic/text")
        for base in ("/gemini/v1beta", "/gemini/v1", "/v1beta", "/v1/models")
        for method in ("generateContent", "streamGenerateContent")
    },
    **{("POST", f"{base}/sessions"): to_new_session for base in ("/anthropic/v1", "/v1")},
    **{("POST", f"{base}/sessions/{{id}}/events"): events_to_session for base in ("/anthropic/v1", "/v1")},
    ("POST", "/v1/images/generations"): posting({"model": "gemini/image", "prompt": "a hat"}),
    ("POST", "/api/chat"): posting(CHAT),
    ("WEBSOCKET", "/api/chat"): chat_socket,
    ("POST", "/agui"): posting(AGENT),
    ("POST", "/v1/stream/sessions/{session}"): to_stream,
    ("PUT", "/v1/stream/sessions/{session}"): to_new_stream,
    ("POST", "/console/api/runs/{run}/retry"): console_again,
    ("POST", "/console/api/runs/{run}/resume"): console_again,
    ("POST", "/console/api/sessions/{session}/events"): to_session_at_the_console,
    ("POST", "/console/api/dead/{entry}/retry"): dead_letter_again,
}
BEGINS_NOTHING = {
    ("POST", "/runs/{run}/cancel"),
    ("POST", "/runs/{run}/waiting/{wait}"),  # the run was admitted when it began
    ("POST", "/console/api/runs/{run}/waiting/{wait}"),
    ("POST", "/sessions/{session}/fork"),
    ("DELETE", "/sessions/{session}"),
    *((method, f"{base}/{{id}}{end}") for base in ("/v1/responses", "/responses") for method, end in (
        ("DELETE", ""), ("POST", "/cancel")
    )),
    *((method, f"{base}{end}") for base in ("/v1/conversations", "/conversations") for method, end in (
        ("POST", ""), ("POST", "/{id}"), ("DELETE", "/{id}"), ("POST", "/{id}/items"), ("DELETE", "/{id}/items/{item}")
    )),
    *((method, f"{base}{end}") for base in ("/anthropic/v1", "/v1") for method, end in (
        ("POST", "/agents"), ("POST", "/environments"), ("POST", "/sessions/{id}"), ("DELETE", "/sessions/{id}"),
        ("POST", "/agents/{id}/archive"), ("POST", "/sessions/{id}/archive")
    )),
    *((method, f"{prefix}/{{rest:path}}") for prefixes in REST.values() for prefix in prefixes
      for method in ("POST", "PATCH", "DELETE")),
    *forwarded_routes(),  # these begin no run; test_forward.py shows that each passes the checks of its key
    ("POST", "/api/chat/{chat:path}/stop"),
    ("DELETE", "/agui/runs/{run:path}"),
    ("DELETE", "/v1/stream/sessions/{session}"),
    ("POST", "/console/api/login"),
    ("POST", "/console/api/logout"),
    ("POST", "/console/api/tickets"),
    ("POST", "/console/api/runs/{run}/cancel"),
    ("POST", "/console/api/dead/{entry}/drop"),
}  # fmt: skip
"""Beside every GET: those read."""


def write_to_session(item: dict[str, Any]) -> Ask:
    def ask(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
        answer = http.post(f"/sessions/{session_of(http)}/events", json={"item": item}, headers=auth(key))
        return Answer(answer.status_code, answer.text)

    return ask


def fork(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    path = path.replace("{session}", session_of(http))
    answer = http.post(path, json={"session": secrets.token_hex(4)}, headers=auth(key))
    return Answer(answer.status_code, answer.text)


def decision(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    path = path.replace("{run}", over(http)).replace("{wait}", "1.0")
    answer = http.post(path, json={"type": "approval", "decision": "allow"}, headers=auth(key))
    return Answer(answer.status_code, answer.text)


def decision_at_the_console(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    path = path.replace("{run}", over(http)).replace("{wait}", "1.0")
    return at_the_console(http, path, key, type="approval", decision="allow")


def of_conversation(body: dict[str, Any]) -> Ask:
    def ask(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
        made = http.post("/v1/conversations", json={}, headers=auth(OWNER)).json()
        answer = http.post(path.replace("{id}", made["id"]), json=body, headers=auth(key))
        return Answer(answer.status_code, answer.text)

    return ask


def agent(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
    body = {"name": "a", "model": "anthropic/text"}
    answer = http.post(path, json=body, headers={**ANTHROPIC, **auth(key)})
    return Answer(answer.status_code, answer.text)


def of_agent(what: str, body: dict[str, Any]) -> Ask:
    """On an agent or a session of another key of the tenant."""

    def ask(bus: LocalBus, http: httpx.Client, path: str, key: NewKey) -> Answer:
        base, of_owner = path.partition("/v1/")[0] + "/v1/", {**ANTHROPIC, **auth(OWNER)}
        new = {"name": "a", "model": "anthropic/text"}
        if what == "sessions":
            new = {"agent": "anthropic/text", "environment_id": "env_x"}
        made = http.post(f"{base}{what}", json=new, headers=of_owner).json()
        answer = http.post(path.replace("{id}", made["id"]), json=body, headers={**ANTHROPIC, **auth(key)})
        return Answer(answer.status_code, answer.text)

    return ask


ITEM = {"type": "message", "role": "user", "content": "hello"}
COUNTED: dict[tuple[str, str], Ask] = {
    ("POST", "/runs/{run}/waiting/{wait}"): decision,
    ("POST", "/console/api/runs/{run}/waiting/{wait}"): decision_at_the_console,
    ("POST", "/sessions/{session}/fork"): fork,
    **{
        ("POST", f"{base}{end}"): of_conversation(body)
        for base in ("/v1/conversations", "/conversations")
        for end, body in (("", {}), ("/{id}", {"metadata": {"a": "b"}}), ("/{id}/items", {"items": [ITEM]}))
    },
    **{("POST", f"{base}/agents"): agent for base in ("/anthropic/v1", "/v1")},
    **{
        ("POST", f"{base}/{what}/{{id}}{end}"): of_agent(what, body)
        for base in ("/anthropic/v1", "/v1")
        for what, end, body in (
            ("agents", "/archive", {}),
            ("sessions", "/archive", {}),
            ("sessions", "", {"title": "another"}),
        )
    },
}
"""What begins no run, but writes, and so takes one of the key's requests."""
NOT_COUNTED = {
    *((method, path) for method, path in BEGINS_NOTHING if method == "DELETE"),  # what there was is gone
    *((method, path) for method, path in BEGINS_NOTHING if path.endswith(("/cancel", "/stop"))),  # always possible
    *((method, f"{prefix}/{{rest:path}}") for prefixes in REST.values() for prefix in prefixes
      for method in ("POST", "PATCH")),
    *forwarded_routes(),
    ("POST", "/anthropic/v1/environments"),  # stores nothing
    ("POST", "/v1/environments"),
    ("POST", "/console/api/login"),  # these have bounds of their own
    ("POST", "/console/api/logout"),
    ("POST", "/console/api/tickets"),
    ("POST", "/console/api/dead/{entry}/drop"),  # for admins
}  # fmt: skip
SESSION_WRITES = {
    "a message that begins no run": {**MESSAGE, "run": False},
    "rewrite": {"type": "rewrite", "messages": SAYS},
    "interrupt": {"type": "interrupt"},
    "withdraw": {"type": "withdraw", "append": "a1"},
    "configure": {"type": "configure", "request": {"model": "anthropic/text"}},
}
ROUTES = gateway_routes(console=True)
WAYS = pytest.mark.parametrize("way", BEGINS, ids=" ".join)


def runs_of(direct: SyncClient) -> set[str]:
    return {info.run for info in direct.runs()}


def key_of(direct: SyncClient, run: str) -> str:
    """Id of the key to which a run is billed."""
    started = next(iter(direct.follow(run)))
    assert isinstance(started, Started)
    note: Any = (started.metadata or {})["gateway"]
    return note["key"]


def test_every_route_and_socket_is_known_to_begin_work_or_to_begin_none() -> None:
    writes = {route for route in ROUTES if route[0] != "GET"}
    assert writes == BEGINS.keys() | BEGINS_NOTHING
    assert not BEGINS.keys() & BEGINS_NOTHING


def test_only_the_door_publishes() -> None:
    """The bus's client is private to `GatewayRuns`, `SessionDoor` and `WaitDoor`; nothing else of gateway and console
    publishes.
    """
    services = Path(tokenbus_services.__file__).parent
    found = {
        f"{path.relative_to(services)}: {node.attr}"
        for room in ("gateway", "console")
        for path in (services / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("xadd", "_bus")
    }
    # The service opens and closes it, and the counter of spend subscribes.
    assert found == {
        f"gateway/{name}.py: _bus" for name in ("runs", "session_door", "wait_door", "service", "budgets/counter")
    }


@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route[0] == "GET" or route in BEGINS_NOTHING], ids=" ".join
)
def test_what_is_said_to_begin_nothing_begins_nothing(
    direct: SyncClient, http: httpx.Client, route: tuple[str, str]
) -> None:
    run, (method, path) = over(http), route
    before = runs_of(direct)
    path = re.sub(r"\{[^}]*\}", run, path)
    if path.startswith("/console/api") and method == "POST":
        at_the_console(http, path, OWNER)
    else:
        with http.stream(method, path, headers=auth(OWNER)):
            pass
    assert not runs_of(direct) - before  # one may be deleted


def test_every_write_that_begins_nothing_is_known_to_be_counted_or_not() -> None:
    assert COUNTED.keys() | NOT_COUNTED == BEGINS_NOTHING
    assert not COUNTED.keys() & NOT_COUNTED


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        *(pytest.param(way[1], ask, id=" ".join(way)) for way, ask in COUNTED.items()),
        *(pytest.param("", write_to_session(item), id=name) for name, item in SESSION_WRITES.items()),
    ],
)
def test_a_write_takes_one_of_the_keys_requests_a_minute(
    bus: LocalBus, http: httpx.Client, path: str, ask: Ask
) -> None:
    over(http)  # first: it takes one of the key's requests, too
    with redis.Redis.from_url(bus.url) as client:
        client.delete(Keys().gateway_use("limited"))
    first = ask(bus, http, path, SPENT_LIMIT)
    assert first.status != 429, first.text
    again = ask(bus, http, path, SPENT_LIMIT)
    assert again.status == 429, again.text
    assert "limit of 1 requests per minute is reached" in again.text


def test_a_rewrite_of_a_session_passes_what_its_messages_pass(http: httpx.Client) -> None:
    said = {"role": "user", "content": "x", "extra": {"anthropic": {"content": "y"}}}
    path = f"/sessions/{session_of(http)}/events"
    for item in ({"type": "message", "messages": [said]}, {"type": "rewrite", "messages": [said]}):
        answer = http.post(path, json={"item": item}, headers=auth(ASKER))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "messages[0].extra.anthropic.content"


def spend(bus: LocalBus, http: httpx.Client, key: NewKey, status: int) -> None:
    """Use up what the key has; of a rate just now, so that nothing of it comes back before it is asked again."""
    body = {"model": "anthropic/text", "messages": SAYS}
    if status == 429:
        with redis.Redis.from_url(bus.url) as client:
            client.delete(Keys().gateway_use(key.id))
    eventually_sync(lambda: http.post("/v1/chat/completions", json=body, headers=auth(key)).status_code == status)


def begun(
    bus: LocalBus, direct: SyncClient, http: httpx.Client, way: tuple[str, str], key: NewKey
) -> tuple[Answer, list[str]]:
    """The answer to one who asks in this way, and the keys of the new runs, but for the one that it was made of."""
    before = runs_of(direct)
    answer = BEGINS[way](bus, http, way[1], key)
    return answer, [name for run in runs_of(direct) - before if (name := key_of(direct, run)) != "owner"]


@WAYS
def test_a_new_run_is_billed_to_who_asks(
    bus: LocalBus, direct: SyncClient, http: httpx.Client, way: tuple[str, str]
) -> None:
    answer, billed = begun(bus, direct, http, way, ASKER)
    assert answer.status in (200, 201, 202, 204), answer.text
    assert billed == ["asker"]


@WAYS
@pytest.mark.parametrize(
    ("key", "spent", "status", "why"),
    [
        (SPENT_LIMIT, 429, 429, ("limit of 1 requests per minute is reached", "Try again in a moment.")),
        (SPENT_BUDGET, 402, 402, ("budget of this key is spent", "The budget for this chat is spent.")),
        (OTHER_MODEL, 403, 403, ("this key may not use the model",)),
    ],
    ids=["limit", "budget", "model"],
)
def test_nobody_begins_work_whose_key_may_not(
    bus: LocalBus,
    direct: SyncClient,
    http: httpx.Client,
    way: tuple[str, str],
    key: NewKey,
    spent: int,
    status: int,
    why: tuple[str, ...],
) -> None:
    spend(bus, http, key, spent)
    answer, billed = begun(bus, direct, http, way, key)
    assert answer.status in (status, 0), answer.text  # an error of a chat socket has no status
    assert any(text in answer.text for text in why), answer.text
    assert billed == []


def test_the_runs_that_one_run_may_lead_to_are_bounded(http: httpx.Client) -> None:
    run = ended_badly(http)
    for number in (0, 1001, 10**30):
        answer = http.post(f"/runs/{run}/retry", json={"again": number}, headers=auth(OWNER))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "again")
