"""The gateway with keys: rights, models, limits, and no access to another tenant's runs."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis
import structlog
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.e2e.gateway.served import auth, gateway_routes
from tests.rows import over_rows
from tests.services.cli.process import running
from tests.waiting import eventually, eventually_sync
from tokenbus.bus.audit import AuditEntry
from tokenbus.bus.keys import Keys
from tokenbus.events.public import Completed, Started
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.keys.key import NewKey, new_key
from tokenbus_services.mock_provider import Reply, Stall, Status, Turn
from tokenbus_services.process.embedded_server import free_port

ADA, BOB, OPS, TIGHT, NARROW, RATED, POOR, SLOW, PAIR = (new_key() for _ in range(9))
HELLO: Any = {"model": "anthropic/text", "messages": [{"role": "user", "content": "hello"}]}
ADMIN = "an-admin-token-of-the-test"


PORT = free_port()
SETTINGS = f"""
[retry]
max_attempts = 1
[gateway]
early_status_s = 0.2
[gateway.admin]
port = {PORT}
[gateway.aliases]
house = ["anthropic/broken", "gemini/text"]
[gateway.prices."anthropic/"]
input = 1000
output = 1000
[gateway.keys.ada]
sha256 = "{ADA.sha256}"
tenant = "ada"
[gateway.keys.bob]
sha256 = "{BOB.sha256}"
[gateway.keys.ops]
sha256 = "{OPS.sha256}"
operator = true
[gateway.keys.tight]
sha256 = "{TIGHT.sha256}"
models = ["house"]
surfaces = ["openai_chat"]
max_tokens = 7
[gateway.keys.narrow]
sha256 = "{NARROW.sha256}"
models = ["anthropic/text", "openai-responses/text"]
[gateway.keys.rated]
sha256 = "{RATED.sha256}"
rpm_limit = 3
[gateway.keys.poor]
sha256 = "{POOR.sha256}"
max_budget = 0.001
budget_duration = "day"
[gateway.keys.slow]
sha256 = "{SLOW.sha256}"
max_parallel_requests = 1
[gateway.keys.pair]
sha256 = "{PAIR.sha256}"
max_parallel_requests = 1
"""


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENBUS_GATEWAY_ADMIN_TOKEN", ADMIN)
        with LocalBus(SETTINGS) as running:
            running.model_says("text", Reply(text="one two three"))
            running.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
            running.model_says("broken", Turn(says=Reply(), fault=Status(status=529)))
            yield running


@pytest.fixture(scope="module")
def http(bus: LocalBus) -> Generator[httpx.Client]:
    with httpx.Client(base_url=bus.gateway, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def admin(bus: LocalBus) -> Generator[httpx.Client]:
    headers = {"authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", headers=headers, timeout=60) as client:
        yield client


def chat(http: httpx.Client, key: Any, model: str = "anthropic/text", **more: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}
    return http.post("/v1/chat/completions", json=body, headers=auth(key))


def code_of(answer: httpx.Response) -> str:
    return answer.json()["error"]["code"]


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-goog-api-key"])
def test_a_key_is_taken_from_the_header_of_any_client(http: httpx.Client, header: str) -> None:
    value = f"Bearer {ADA.text}" if header == "authorization" else ADA.text
    assert http.post("/v1/chat/completions", json=HELLO, headers={header: value}).status_code == 200


def test_unknown_wrong_and_missing_keys_get_the_same_answer(http: httpx.Client) -> None:
    wrong = new_key("aaaaaaaa").text
    answers = [
        http.post("/v1/chat/completions", json=HELLO, headers=headers)
        for headers in (
            {},
            auth(wrong),
            auth(ADA.text[:-1] + "_"),
            auth("sk-x"),
            {"authorization": "Bearer"},
            {"x-api-key": wrong},
        )
    ]
    assert {(answer.status_code, answer.text) for answer in answers} == {(401, answers[0].text)}
    assert code_of(answers[0]) == "invalid_api_key"
    assert answers[0].headers["www-authenticate"] == "Bearer"


def test_a_key_in_the_url_opens_nothing(http: httpx.Client) -> None:
    assert http.post(f"/v1/chat/completions?key={ADA.text}", json=HELLO).status_code == 401


def test_a_request_beyond_what_the_key_allows_is_refused(http: httpx.Client) -> None:
    refused = chat(http, TIGHT, "anthropic/text")
    assert (refused.status_code, code_of(refused)) == (403, "model_not_allowed")
    unknown = chat(http, TIGHT, "anthropic/nothing-like-it")
    assert (unknown.status_code, code_of(unknown)) == (403, "model_not_allowed")


HOSTED: dict[str, tuple[str, Any]] = {
    "an adviser of the Messages API": (
        "/anthropic/v1/messages",
        {"max_tokens": 5, "tools": [{"type": "advisor_20260301", "name": "advisor", "model": "a-dear-one"}]},
    ),
    "images of the Responses API": (
        "/v1/responses",
        {"model": "openai-responses/text", "input": "hello", "tools": [{"type": "image_generation", "model": "dear"}]},
    ),
    "images of the bus": ("/runs", {"model": "openai-responses/text", "images": {"model": "a-dear-one"}}),
}


@pytest.mark.parametrize("case", HOSTED)
def test_a_model_for_a_tool_of_the_provider_is_refused_like_any_other(http: httpx.Client, case: str) -> None:
    path, more = HOSTED[case]
    request = {**HELLO, **more}
    if "input" in request:
        del request["messages"]
    answer = http.post(path, json=request, headers=auth(NARROW))
    assert answer.status_code == 403, answer.text
    assert "model_not_allowed" in answer.text


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        (
            {"messages": [{"role": "user", "content": "x", "extra": {"anthropic": {"content": "y"}}}]},
            "messages[0].extra",
        ),
        ({"tools": [{"name": "t", "extra": {"anthropic": {"type": "web_search"}}}]}, "tools[0].extra"),
        ({"system": [{"type": "text", "text": "x", "extra": {"anthropic": {"text": "y"}}}]}, "system[0].extra"),
    ],
)
def test_a_field_of_the_provider_is_refused_in_every_object_that_may_have_some(
    http: httpx.Client, changes: Any, param: str
) -> None:
    answer = http.post("/runs", json={**HELLO, "max_tool_depth": 0, **changes}, headers=auth(ADA))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(f"{param}.anthropic.")


def test_what_the_key_forces_reaches_the_provider_and_the_alias_falls_back(http: httpx.Client, bus: LocalBus) -> None:
    answer = chat(http, TIGHT, "house", max_tokens=5000)
    assert answer.json()["choices"][0]["message"]["content"] == "one two three"
    requests = [request for request in bus.requests if request.get("model") == "broken"]
    assert requests[-1]["max_tokens"] == 7
    with bus.sync_client() as direct:
        *_, end = direct.follow(answer.headers["x-tokenbus-run"])
    assert isinstance(end, Completed)
    assert end.provider == "gemini"


def test_requests_per_minute_are_reported_in_headers_and_refused_with_a_time(http: httpx.Client) -> None:
    answers = [chat(http, RATED) for _ in range(4)]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert code_of(refused) == "rate_limit_exceeded"
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-should-retry"] == "true"
    assert refused.headers["x-ratelimit-limit-requests"] == "3"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_a_spent_budget_is_a_402_and_the_spend_is_reported(http: httpx.Client, admin: httpx.Client) -> None:
    assert chat(http, POOR).status_code == 200

    def refused() -> httpx.Response | None:
        answer = chat(http, POOR)
        return answer if answer.status_code == 402 else None

    answer = eventually_sync(refused)
    assert answer
    assert code_of(answer) == "budget_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    spend = admin.get("/keys/poor").json()["spend"]["total"]
    # As the mock provider counts: every run the same, each counted once.
    assert spend["cost"] == pytest.approx((spend["input"] + spend["output"]) * 0.001)
    assert spend["runs"] * 25 == spend["input"]


def test_a_key_with_a_budget_may_not_use_what_has_no_price(http: httpx.Client) -> None:
    answer = chat(http, POOR, "gemini/text")
    assert (answer.status_code, code_of(answer)) == (403, "model_not_priced")


def test_answers_in_progress_are_limited_and_a_disconnect_makes_room(http: httpx.Client) -> None:
    body = {"model": "anthropic/slow", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body, headers=auth(SLOW)) as first:
        assert first.status_code == 200
        second = chat(http, SLOW)
        assert (second.status_code, code_of(second)) == (429, "too_many_runs")
    eventually_sync(lambda: chat(http, SLOW).status_code == 200)


def test_one_run_id_of_two_tenants_is_two_runs_and_no_answer_tells_of_the_other(http: httpx.Client) -> None:
    def told(key: NewKey, name: str) -> tuple[str, list[tuple[int, str]]]:
        """The run's full id, and all that the gateway says when the client gives a run this id."""
        before = http.get(f"/runs/{name}", headers=auth(key))
        made = http.post("/runs", json={**HELLO, "id": name}, headers=auth(key))
        run = made.json()["run"]
        assert run == made.headers["x-tokenbus-run"]
        after = http.get(f"/runs/{name}?wait=true", headers=auth(key))
        joined = chat(http, key, tokenbus={"run": name})
        answers = [(each.status_code, each.text) for each in (before, made, after, joined)]
        texts = [(status, text.replace(run, "RUN").replace(name, "RUN")) for status, text in answers]
        return run, [(status, re.sub(r"\d+", "N", text)) for status, text in texts]

    ada, first = told(ADA, "umbrella")
    bob, second = told(BOB, "umbrella")
    nobodys, third = told(BOB, "a-name-of-nobody")
    assert len({ada, bob, nobodys}) == 3
    assert [status for status, _ in first] == [404, 202, 200, 409]
    assert first == second == third
    for name in (ada, "umbrella"):
        assert http.get(f"/runs/{name}", headers=auth(ADA)).json()["run"] == ada
    assert http.get(f"/runs/{ada}", headers=auth(BOB)).status_code == 404
    squatted = http.post("/runs", json={**HELLO, "id": ada}, headers=auth(BOB)).json()["run"]
    assert squatted not in (ada, bob)
    listed = http.get("/runs", params={"prefix": "umbrella"}, headers=auth(ADA)).json()["runs"]
    assert [info["run"] for info in listed] == [ada]


def test_a_run_id_that_leaves_no_room_for_the_tenants_mark_is_refused_with_the_room(http: httpx.Client) -> None:
    answer = http.post("/runs", json={**HELLO, "id": "r" * 108}, headers=auth(ADA))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "run")
    assert "at most 107 characters" in answer.json()["error"]["message"]
    assert http.post("/runs", json={**HELLO, "id": "r" * 107}, headers=auth(ADA)).status_code == 202


def test_a_request_that_names_a_run_of_its_tenant_joins_it(http: httpx.Client) -> None:
    run = chat(http, ADA).headers["x-tokenbus-run"]
    again = chat(http, ADA, tokenbus={"run": run})
    assert again.headers["x-tokenbus-run"] == run
    assert again.json()["choices"][0]["message"]["content"] == "one two three"


def test_a_list_of_runs_has_only_the_keys_own_runs(http: httpx.Client) -> None:
    ours, theirs = (chat(http, key).headers["x-tokenbus-run"] for key in (ADA, BOB))

    def listed(key: NewKey, **parameters: str) -> set[tuple[str, str]]:
        answer = http.get("/runs", params={"limit": "200", **parameters}, headers=auth(key))
        return {(info["run"], info["tenant"]) for info in answer.json()["runs"]}

    assert (ours, "ada") in listed(ADA)
    assert {tenant for _, tenant in listed(ADA)} == {"ada"}
    assert listed(ADA, tenant="bob") == set()
    assert {(ours, "ada"), (theirs, "bob")} <= listed(OPS)
    assert (theirs, "bob") in listed(OPS, tenant="bob")


def test_one_idempotency_key_of_two_tenants_is_two_runs(http: httpx.Client) -> None:
    body = {"model": "anthropic/text", "messages": [{"role": "user", "content": "hello"}]}
    runs = [
        http.post("/v1/chat/completions", json=body, headers={**auth(key), "idempotency-key": "k1"}).headers[
            "x-tokenbus-run"
        ]
        for key in (ADA, BOB, ADA)
    ]
    assert runs[0] == runs[2] != runs[1]


def test_the_tenant_is_the_keys_and_never_the_requests(http: httpx.Client, bus: LocalBus) -> None:
    answer = chat(http, BOB, metadata={"tenant": "ada", "gateway": "x"})
    with bus.sync_client() as direct:
        started = next(iter(direct.follow(answer.headers["x-tokenbus-run"])))
    assert isinstance(started, Started)
    metadata: Any = started.metadata
    assert metadata["tenant"] == "bob"
    assert metadata["gateway"]["key"] == "bob"


def test_no_key_is_in_a_log_and_each_request_is(http: httpx.Client, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = new_key()
    with structlog.testing.capture_logs() as lines:
        run = chat(http, ADA, user=ADA.text, metadata={"note": ADA.text}).headers["x-tokenbus-run"]
        chat(http, wrong, model=f"anthropic/{wrong.text}")
        http.post(f"/v1/chat/completions?key={ADA.text}", json=HELLO, headers={"x-api-key": wrong.text})
        http.get(f"/runs/{ADA.text}", headers=auth(ADA))
        http.get("/v1/models", headers={"authorization": f"Basic {ADA.text}"})
        eventually_sync(lambda: [line["event"] for line in lines].count("gateway_request") >= 4)
    text = "".join((*map(str, lines), *capfd.readouterr()))
    for key in (ADA, wrong):
        assert key.text.removeprefix(f"tb-{key.id}-") not in text
        assert key.sha256 not in text
    assert f"'run': '{run}'" in text
    assert "hello" not in text
    assert "'key': 'ada'" in text
    assert ADMIN not in text


# Tenant isolation over every route that there is. ------------------------------------------------------------------


ROUTES = [(method, path) for method, path in gateway_routes() if method != "WEBSOCKET"]
ABOUT_A_RUN = [
    (method, path) for method, path in ROUTES if re.search(r"\{\w*(run|response|id|chat|thread)\w*(:path)?\}", path)
]
NOT_RUNS = ("/models/", "/models/{")
"""Paths with a parameter that is not a run."""


@over_rows(("method", "path"), ROUTES)
def test_no_route_answers_without_a_key(http: httpx.Client, method: str, path: str) -> None:
    """A path that only Anthropic's clients use is none for others, who get the 404 of an unknown one."""
    url = re.sub(r"\{[^}]*\}", "some", path)
    answers = [http.request(method, url, json={}, headers=headers) for headers in ({}, {"anthropic-version": "1"})]
    assert {answer.status_code for answer in answers} - {404} == {401}, [answer.text for answer in answers]


@pytest.fixture(scope="module")
def run_of_ada(http: httpx.Client) -> str:
    return chat(http, ADA).headers["x-tokenbus-run"]


@over_rows(("method", "path"), [r for r in ABOUT_A_RUN if not any(n in r[1] for n in NOT_RUNS)])
def test_another_tenants_run_looks_like_an_unknown_one(
    http: httpx.Client, run_of_ada: str, method: str, path: str
) -> None:
    run = run_of_ada

    def answer(key: Any, name: str) -> tuple[int, str]:
        got = http.request(method, re.sub(r"\{[^}]*\}", name, path), json={}, headers=auth(key))
        text = got.text.replace(name, "RUN")
        return got.status_code, text.replace(got.headers["x-request-id"], "ID")

    assert answer(BOB, run) == answer(BOB, "run-that-never-was")
    assert answer(BOB, f"resp_{run}") == answer(BOB, "resp_run-that-never-was")


# The admin API. ----------------------------------------------------------------------------------------------------


def test_the_admin_api_needs_its_own_token(admin: httpx.Client) -> None:
    for headers in ({"authorization": ""}, auth(ADA), auth(OPS), auth("x")):
        assert admin.get("/keys", headers=headers).status_code == 401
        assert admin.post("/keys", json={}, headers=headers).status_code == 401


def test_a_key_lives_from_its_making_to_its_revocation(bus: LocalBus, http: httpx.Client, admin: httpx.Client) -> None:
    made = admin.post("/keys", json={"name": "web", "rules": {"tenant": "eve", "rpm_limit": 100}})
    assert made.status_code == 201
    key, key_id = made.json()["key"], made.json()["id"]
    assert chat(http, key).status_code == 200
    rotated = admin.post(f"/keys/{key_id}/rotate", json={"grace_s": 600}).json()
    assert rotated["id"] == key_id
    for text in (key, rotated["key"]):
        eventually_sync(lambda text=text: chat(http, text).status_code == 200)
    shown = admin.get(f"/keys/{key_id}").text
    assert key not in shown
    assert rotated["key"] not in shown
    assert "sha256" not in shown
    assert admin.delete(f"/keys/{key_id}").json()["state"] == "revoked"
    for text in (key, rotated["key"]):
        eventually_sync(lambda text=text: chat(http, text).status_code == 401)
    assert {one["id"]: one["state"] for one in admin.get("/keys").json()["keys"]}[key_id] == "revoked"
    with redis.Redis.from_url(bus.url) as server:
        written: Any = server.xrange(Keys().audit)
    entries = [msgspec.json.decode(fields[b"__data__"], type=AuditEntry) for _, fields in written]
    done = [(each.action, each.by, each.door) for each in entries if each.facts["key"] == key_id]
    assert done == [(f"keys.{verb}", "admin token", "admin") for verb in ("create", "rotate", "revoke")]


def test_a_topics_reader_gets_no_more_when_its_key_is_revoked(http: httpx.Client, admin: httpx.Client) -> None:
    made = admin.post("/keys", json={"rules": {"operator": True}}).json()
    with http.stream("GET", "/topics/runs", headers=auth(made["key"])) as answer:
        assert answer.status_code == 200
        admin.delete(f"/keys/{made['id']}")
        silent = 0
        for line in answer.iter_lines():  # until the gateway ends it
            silent += line.startswith(":")
            assert silent < 20, "keep-alives for a reader whose key is revoked"


@pytest.mark.parametrize("how", ["revoked", "rotated"])
def test_a_socket_that_is_open_ends_with_its_key(http: httpx.Client, admin: httpx.Client, how: str) -> None:
    made = admin.post("/keys", json={}).json()
    address = str(http.base_url).replace("http", "ws", 1).rstrip("/") + "/v1/responses"

    def last(socket: ClientConnection) -> str:
        socket.send(json.dumps({"type": "response.create", "model": "anthropic/text", "input": "hello"}))
        for frame in socket:
            event = json.loads(frame)
            if event["type"] in ("response.completed", "error"):
                return event["type"]
        raise AssertionError("the socket was closed")

    with pytest.raises(InvalidStatus) as refused, connect(address):
        pass
    assert refused.value.response.status_code == 401
    with connect(address, additional_headers=auth(made["key"])) as socket:
        assert last(socket) == "response.completed"
        if how == "revoked":
            admin.delete(f"/keys/{made['id']}")
        else:
            admin.post(f"/keys/{made['id']}/rotate", json={"grace_s": 0})
        eventually_sync(lambda: last(socket) == "error")
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=30)
    assert closed.value.rcvd
    assert closed.value.rcvd.code == 1008


def test_a_chat_socket_ends_with_the_key_of_its_handshake(http: httpx.Client, admin: httpx.Client) -> None:
    made = admin.post("/keys", json={}).json()
    address = str(http.base_url).replace("http", "ws", 1).rstrip("/") + "/api/chat"
    with connect(address, additional_headers=auth(made["key"])) as socket:
        assert answer_to(socket, chat_send("r0", chat="c9"))[-1]["type"] == "end"
        admin.post(f"/keys/{made['id']}/rotate", json={"grace_s": 0})
        numbers = iter(range(1, 10_000))
        eventually_sync(lambda: answer_to(socket, chat_send(f"r{next(numbers)}", chat="c9"))[-1]["type"] == "error")
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=30)
    assert closed.value.rcvd
    assert closed.value.rcvd.code == 1008


def test_a_changed_key_has_its_new_rules(http: httpx.Client, admin: httpx.Client) -> None:
    made = admin.post("/keys", json={}).json()
    assert chat(http, made["key"]).status_code == 200
    assert admin.put(f"/keys/{made['id']}", json={"blocked": True}).json()["state"] == "blocked"
    eventually_sync(lambda: chat(http, made["key"]).status_code == 403)
    assert code_of(chat(http, made["key"])) == "key_blocked"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"rules": {"rpm": 3}}, "rpm"),
        ({"rules": {"max_budget": -1}}, "max_budget"),
        ({"rules": {"surfaces": ["x"]}}, "surfaces"),
        ({"sha256": "x"}, "sha256"),
        ([], "object"),
    ],
)
def test_a_wrong_body_is_refused_with_what_is_wrong(admin: httpx.Client, body: Any, expected: str) -> None:
    answer = admin.post("/keys", json=body)
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]


def test_keys_of_the_settings_are_shown_and_not_changed(admin: httpx.Client) -> None:
    assert admin.get("/keys/ada").json()["source"] == "settings"
    for answer in (admin.delete("/keys/ada"), admin.put("/keys/ada", json={}), admin.get("/keys/nobody")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "key_not_found")
    assert admin.get("/nothing").status_code == 404
    assert admin.patch("/keys").status_code == 405


async def test_two_gateways_share_the_limits_of_a_key_and_its_runs(bus: LocalBus, tmp_path: Path) -> None:
    keys = f'[gateway.keys.pair]\nsha256 = "{PAIR.sha256}"\nmax_parallel_requests = 1\nmetrics = true\n'
    keys += f'[gateway.keys.bob]\nsha256 = "{BOB.sha256}"\n'
    provider = '[providers.anthropic]\napi = "anthropic"\nbase_url = "http://127.0.0.1:1"\napi_key_env = ""\n'
    config = tmp_path / "tokenbus.toml"
    config.write_text(f'redis_url = "{bus.url}"\ndata_dir = "{tmp_path}"\n{provider}{keys}')
    arguments = ("worker", "gateway", "--port", "0")
    async with running(tmp_path / "gateway.log", *arguments, TOKENBUS_CONFIG=str(config)) as worker:
        other = (await worker.says("ready gateway")).split()[2]
        async with httpx.AsyncClient(timeout=60, headers=auth(PAIR)) as client:
            slow = {**HELLO, "model": "anthropic/slow", "stream": True}
            async with client.stream("POST", f"{bus.gateway}/v1/chat/completions", json=slow) as held:
                lines = held.aiter_lines()  # httpx closes the connection once this iterator is dropped
                await anext(lines)
                run = held.headers["x-tokenbus-run"]
                refused = await client.post(f"{other}/v1/chat/completions", json=HELLO)
                assert (refused.status_code, code_of(refused)) == (429, "too_many_runs")
                assert (await client.get(f"{other}/runs/{run}")).status_code == 200
                assert (await client.get(f"{other}/runs/{run}", headers=auth(BOB))).status_code == 404

            async def admitted() -> bool:
                return (await client.post(f"{other}/v1/chat/completions", json=HELLO)).status_code == 200

            await eventually(admitted)
            metrics = (await client.get(f"{other}/metrics")).text
            refused = await client.get(f"{other}/metrics", headers=auth(BOB))
            unknown = await client.get(f"{other}/metrics", headers=auth("nobody"))
            rebound = await client.get(f"{other}/metrics", headers={"host": "rebound.example"})
    assert (refused.status_code, code_of(refused)) == (403, "metrics_not_allowed")
    assert (unknown.status_code, rebound.status_code) == (401, 421)
    assert 'tokenbus_gateway_key_answers_total{key="pair",status="200"}' in metrics
    assert 'tokenbus_gateway_key_answers_total{key="pair",status="429"}' in metrics
    assert 'tokenbus_gateway_key_tokens_total{key="pair",kind="output"}' in metrics


def chat_frame(kind: str, request: str, chat: str = "c1", *, key: str = "", **more: Any) -> str:
    headers = auth(key) if key else {}
    return json.dumps({"type": kind, "requestId": request, "id": chat, "headers": headers, "body": {}, **more})


def chat_send(request: str, model: str = "text", **more: Any) -> str:
    messages = [{"id": "u1", "role": "user", "parts": [{"type": "text", "text": "hello"}]}]
    more = {"trigger": "submit-message", "messages": messages, "body": {"model": f"anthropic/{model}"}, **more}
    return chat_frame("send", request, **more)


def answer_to(socket: ClientConnection, frame: str) -> list[dict[str, Any]]:
    """The frames up to the end of a request's answer."""
    socket.send(frame)
    return until_end(socket)


def until_end(socket: ClientConnection) -> list[dict[str, Any]]:
    frames: list[dict[str, Any]] = []
    while not frames or frames[-1]["type"] not in ("end", "error", "no-active"):
        frames.append(json.loads(socket.recv(timeout=30)))
    return frames


def test_each_frame_of_a_chat_socket_may_bring_its_own_key(http: httpx.Client) -> None:
    address = str(http.base_url).replace("http", "ws", 1).rstrip("/") + "/api/chat"
    with pytest.raises(InvalidStatus) as refused, connect(address, additional_headers=auth("tb-00000000-wrong")):
        pass
    assert refused.value.response.status_code == 401
    with connect(address) as socket:
        (error,) = answer_to(socket, chat_send("r1"))
        assert (error["type"], error["errorText"]) == ("error", "the API key is missing or not valid")
        assert [frame["type"] for frame in answer_to(socket, chat_send("r2", key=TIGHT.text))] == ["error"]
        start, *chunks, end = answer_to(socket, chat_send("r3", key=ADA.text))
        assert (start["type"], end["type"]) == ("start", "end")
        assert [chunk["sequence"] for chunk in chunks] == list(range(len(chunks)))
        assert chunks[-1]["chunk"]["type"] == "finish"
        socket.send(chat_frame("frobnicate", "r4"))
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=30)
        assert closed.value.rcvd
        assert closed.value.rcvd.code == 1008


def test_a_chat_socket_resumes_after_a_number_and_its_abort_cancels_the_run(http: httpx.Client) -> None:
    address = str(http.base_url).replace("http", "ws", 1).rstrip("/") + "/api/chat"
    with connect(address, additional_headers=auth(ADA.text)) as first:
        first.send(chat_send("r1", "slow", chat="c2"))
        seen = [json.loads(first.recv(timeout=30))]
        while seen[-1].get("chunk", {}).get("type") != "text-delta":
            seen.append(json.loads(first.recv(timeout=30)))
    with connect(address) as again:
        assert [frame["type"] for frame in answer_to(again, chat_frame("resume", "r2", "c2", key=BOB.text))] == [
            "no-active"
        ]
        again.send(chat_frame("resume", "r3", "c2", key=ADA.text, lastSequence=seen[-2]["sequence"]))
        assert json.loads(again.recv(timeout=30)) == {"type": "start", "requestId": "r3"}
        assert json.loads(again.recv(timeout=30)) == {**seen[-1], "requestId": "r3"}
        again.send(json.dumps({"type": "abort", "requestId": "r3"}))
        assert [frame.get("chunk", frame)["type"] for frame in until_end(again)][-2:] == ["abort", "end"]
        assert [frame["type"] for frame in answer_to(again, chat_frame("resume", "r4", "c2", key=ADA.text))] == [
            "no-active"
        ]
