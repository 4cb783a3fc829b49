"""The console at a gateway with keys: who logs in, what each sees and may do, and the sampled stream of all runs."""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import Any, TypeAlias

import httpx
import msgspec
import pytest
import redis

from tests.e2e.gateway.served import gateway_routes
from tests.waiting import eventually_sync
from tokenbus.testing import LocalBus
from tokenbus_services.console.routes.stream import MAX_PAGES
from tokenbus_services.console.runs import run_table
from tokenbus_services.gateway.keys.key import NewKey, new_key
from tokenbus_services.mock_provider import Reply, Stall, Status, ToolCall, Turn

ADA, BOB, CAT, DAN, OPS, PLAIN = (new_key() for _ in range(6))
SETTINGS = f"""
[retry]
max_attempts = 1
[console]
[gateway]
tools = ["pay"]
[gateway.prices."anthropic/"]
input = 1000
output = 1000
[gateway.keys.ada]
sha256 = "{ADA.sha256}"
console = ["see_runs", "act"]
[gateway.keys.bob]
sha256 = "{BOB.sha256}"
console = ["see_content"]
[gateway.keys.cat]
sha256 = "{CAT.sha256}"
tenant = "ada"
console = ["decide"]
[gateway.keys.dan]
sha256 = "{DAN.sha256}"
tenant = "ada"
approve = false
console = ["decide", "see_content"]
[gateway.keys.ops]
sha256 = "{OPS.sha256}"
console = ["see_content", "act", "admin"]
[gateway.keys.plain]
sha256 = "{PLAIN.sha256}"
[tools.pay]
kind = "python"
call = "tests.services.tools.sample_tools:echo"
description = "Pays."
parameters = {{ type = "object", properties = {{ to = {{ type = "string" }} }} }}
approval = "always"
"""
SECRET = "raspberries"
Console: TypeAlias = "Callable[..., Person]"


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("text", Reply(text=f"one {SECRET} three"))
        running.model_says("slow", Turn(says=Reply(text=f"one {SECRET} three"), fault=Stall(after_text=SECRET)))
        running.model_says("pays", Reply(tool_calls=(ToolCall(name="pay", arguments={"to": SECRET}),)), "Paid.")
        running.model_says("broken", Turn(says=Reply(), fault=Status(status=529)))
        yield running


@pytest.fixture
def person(bus: LocalBus) -> Iterator[Console]:
    with ExitStack() as stack:

        def made(key: NewKey | None = None, *, ticket: str = "") -> Person:
            one = Person(bus, key, ticket=ticket)
            stack.callback(one.http.close)
            return one

        yield made


class Person:
    """A browser with a page of the console."""

    def __init__(self, bus: LocalBus, key: NewKey | None = None, *, ticket: str = "") -> None:
        headers = {"x-console-ticket": ticket} if ticket else {}
        self.http = httpx.Client(base_url=f"{bus.gateway}/console/api", timeout=60, headers=headers)
        self.csrf = self.get("/session")["csrf"]
        if key:
            answer = self.login(key)
            assert answer.status_code == 200, answer.text
            self.csrf = answer.json()["csrf"]

    def login(self, key: NewKey) -> httpx.Response:
        return self.post("/login", key=key.text)

    def get(self, path: str) -> Any:
        return self.http.get(path).json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body, headers={"x-console-csrf": self.csrf})

    def code(self, path: str) -> str:
        return self.get(path)["error"]["code"]

    def sees(
        self, wanted: Callable[[dict[str, Any]], bool], query: str = "", *, event: str = "river"
    ) -> dict[str, Any]:
        """The first of these events of the page's stream that is as wanted."""
        with self.http.stream("GET", f"/stream?{query}") as answer:
            assert answer.status_code == 200
            name = ""
            for line in answer.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                if field == "data" and name == event and wanted(found := json.loads(value)):
                    return found
        raise AssertionError("the stream ended")

    def events(self, run: str) -> list[dict[str, Any]]:
        with self.http.stream("GET", f"/runs/{run}/events") as answer:
            return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]


def published(bus: LocalBus, key: NewKey, model: str = "text", **more: Any) -> str:
    body = {"model": f"anthropic/{model}", "messages": [{"role": "user", "content": f"about {SECRET}"}], **more}
    headers = {"authorization": f"Bearer {key.text}"}
    return httpx.post(f"{bus.gateway}/runs", json=body, headers=headers, timeout=60).json()["run"]


def state_of(person: Person, run: str) -> str:
    return person.get(f"/runs/{run}").get("row", {}).get("state", "")


def ended(bus: LocalBus, key: NewKey, model: str = "text") -> str:
    run = published(bus, key, model)
    httpx.get(f"{bus.gateway}/runs/{run}?wait=true", headers={"authorization": f"Bearer {key.text}"}, timeout=60)
    return run


def test_pages_of_one_key_leave_room_for_those_of_others(bus: LocalBus, person: Console) -> None:
    def client(one: Person) -> httpx.Client:
        limits = httpx.Limits(max_connections=None)
        return httpx.Client(base_url=one.http.base_url, cookies=one.http.cookies, timeout=60, limits=limits)

    with client(person(ADA)) as ada, client(person(BOB)) as bob, ExitStack() as held:
        pages = [held.enter_context(ada.stream("GET", "/stream")).status_code for _ in range(MAX_PAGES // 2 + 3)]
        assert pages == [200] * (MAX_PAGES // 2) + [503] * 3
        assert held.enter_context(bob.stream("GET", "/stream")).status_code == 200


def ids(sample: dict[str, Any]) -> set[str]:
    return {row["run"] for row in (*sample["rows"], *sample["ended"])}


def test_a_key_with_roles_logs_in_and_the_cookie_is_for_the_console_alone(person: Console) -> None:
    stranger = person()
    assert stranger.get("/session")["roles"] == []
    assert stranger.get("/session")["login"] is True
    assert stranger.code("/runs/any") == "login_needed"
    assert stranger.login(new_key("aaaaaaaa")).status_code == 401
    assert stranger.login(PLAIN).json()["error"]["code"] == "no_console_roles"
    answer = stranger.login(ADA)
    assert answer.json()["roles"] == ["see_runs", "act"]
    assert answer.json()["tenant"] == "ada"
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/console"} <= set(cookie.split("; "))
    assert ADA.text not in cookie
    assert ADA.sha256 not in cookie
    stranger.csrf = answer.json()["csrf"]
    kept = dict(stranger.http.cookies)
    assert stranger.post("/logout").json()["roles"] == []
    assert stranger.get("/session")["roles"] == []
    stranger.http.cookies.update(kept)
    assert stranger.get("/session")["roles"] == [], "a copy of the cookie opens nothing after the logout"


def test_nothing_is_done_without_the_pages_token_or_for_another_site(bus: LocalBus, person: Console) -> None:
    ada, run = person(ADA), published(bus, ADA, "slow")
    bare = ada.http.post(f"/runs/{run}/cancel")
    assert (bare.status_code, bare.json()["error"]["code"]) == (403, "csrf")
    headers = {"x-console-csrf": ada.csrf, "origin": "https://elsewhere.example"}
    assert ada.http.post(f"/runs/{run}/cancel", headers=headers).status_code == 403
    assert ada.http.get("/session", headers={"host": "rebound.example"}).status_code == 421
    assert state_of(ada, run) not in ("cancelled", "failed")
    assert ada.post(f"/runs/{run}/cancel").status_code == 202
    eventually_sync(lambda: state_of(ada, run) == "cancelled")


@pytest.mark.parametrize(
    ("method", "path"),
    [each for each in gateway_routes(console=True) if each[0] != "GET" and "/console/api" in each[1]],
)
def test_each_change_wants_the_pages_token_and_comes_from_no_other_site(
    person: Console, method: str, path: str
) -> None:
    viewer = person(CAT if "waiting" in path else OPS)
    path = re.sub(r"\{[^}]*\}", "1-1", path.removeprefix("/console/api"))
    for headers, code in (({}, "csrf"), ({"x-console-csrf": viewer.csrf, "origin": "https://a.example"}, "cross_site")):
        answer = viewer.http.request(method, path, json={}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, code), answer.text


def test_what_runs_wait_for_is_decided_by_a_viewer_with_that_role_and_tenant_alone(
    bus: LocalBus, person: Console
) -> None:
    run = published(bus, ADA, "pays", tools=[{"name": "pay"}])
    ada, bob, cat, dan, ops = (person(key) for key in (ADA, BOB, CAT, DAN, OPS))
    eventually_sync(lambda: ada.get(f"/runs/{run}/waiting")["waiting"])
    [row] = ada.get("/waiting")["waiting"]
    assert (row["run"], row["tool_name"], row["tenant"]) == (run, "pay", "ada")
    assert SECRET not in str(row)
    assert row["hidden"] > len(SECRET)
    assert bob.get("/waiting")["waiting"] == []
    assert [one.get("/waiting/count")["count"] for one in (ada, bob, ops)] == [1, 0, 1]
    assert bob.code(f"/runs/{run}/waiting") == "run_not_found"
    assert [row["run"] for row in ops.get("/waiting?tenant=ada")["waiting"]] == [run]
    assert ops.get("/waiting?tenant=bob")["waiting"] == []
    [row] = cat.get("/waiting")["waiting"]
    assert row["arguments"] == f'{{"to":"{SECRET}"}}'

    path, allow = f"/runs/{run}/waiting/{row['wait']}", {"type": "approval", "decision": "allow"}
    assert cat.get("/session")["roles"] == ["see_runs", "decide"]
    assert dan.get("/session")["roles"] == ["see_runs", "see_content"], "its key may approve nothing"
    for one in (ada, bob, dan, ops):
        refused = one.post(path, **allow)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "role_missing")
    bare = cat.http.post(path, json=allow)
    assert (bare.status_code, bare.json()["error"]["code"]) == (403, "csrf")
    for wrong in ({"arguments": {"to": "x"}}, {"arguments": "{"}, {"arguments": '{"to": 5}'}, {"by": "somebody else"}):
        assert cat.post(path, **allow, **wrong).status_code == 400
    assert cat.post(path, type="cancel").status_code == 400
    fate = cat.post(path, **allow, arguments='{"to": "x"}', decision_id="d1").json()
    assert (fate["decision"], fate["by"], fate["door"]) == ("allow", "key cat", "console")
    assert cat.post(path, **allow, arguments='{"to": "x"}', decision_id="d1").json() == fate
    late = cat.post(path, type="approval", decision="deny")
    assert (late.status_code, late.json()["error"]["code"]) == (409, "already_decided")
    eventually_sync(lambda: state_of(ada, run) == "completed")
    assert ada.get("/waiting")["waiting"] == []
    assert ada.get("/waiting/count")["count"] == 0


def test_a_run_that_says_nothing_more_comes_first_also_for_a_console_that_begins_to_look_later(
    bus: LocalBus, person: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_table, "QUIET_MS", 500)
    slow, text, ops = published(bus, ADA, "slow"), ended(bus, ADA), person(OPS)

    def said(sample: dict[str, Any]) -> bool:
        return any(row["run"] == slow and (row["quiet_ms"] or 0) >= 500 for row in sample["rows"])

    quiet = ops.sees(said)
    calm = [row["quiet_ms"] is None for row in quiet["rows"]]
    assert calm == sorted(calm)
    found = ops.sees(lambda sample: True, f"finish=stop&since={quiet['at'] - 600_000}&q={text}")
    assert ids(found) == {text}
    assert ids(ops.sees(lambda sample: True, "until=1000")) == set()
    assert ops.code("/stream?sort=best") == "invalid_value"
    assert ops.post(f"/runs/{slow}/cancel").status_code == 202


def test_the_river_shows_a_tenant_its_own_runs_and_words_to_whom_may_see_them(bus: LocalBus, person: Console) -> None:
    adas, bobs, slow = ended(bus, ADA), ended(bus, BOB), published(bus, BOB, "slow")
    ada, bob, ops = person(ADA), person(BOB), person(OPS)
    seen = ada.sees(lambda sample: adas in ids(sample))
    assert bobs not in ids(seen)
    assert slow not in ids(seen)
    assert all(row["words"] is None and row["tenant"] == "ada" for row in (*seen["rows"], *seen["ended"]))

    def says(sample: dict[str, Any]) -> bool:
        return any(row["run"] == slow and SECRET in (row["words"] or "") for row in sample["rows"])

    row = next(row for row in bob.sees(says)["rows"] if row["run"] == slow)
    assert (row["state"], row["provider"], row["model"], row["ended_at"]) == ("speaking", "anthropic", "slow", None)
    everything = ops.sees(lambda sample: {adas, bobs, slow} <= ids(sample))
    done = next(row for row in everything["ended"] if row["run"] == bobs)
    assert (done["state"], done["finish"]) == ("completed", "stop")
    assert done["cost"] > 0
    assert done["usage"]["output"] > 0
    only = ops.sees(lambda sample: adas in ids(sample), f"q={adas[:30]}")
    assert ids(only) == {adas}
    assert bobs not in ids(ops.sees(lambda sample: bool(sample["ended"]), "tenant=ada"))
    assert ops.post(f"/runs/{slow}/cancel").status_code == 202


def test_a_failed_run_is_found_by_its_error_code_and_retried(bus: LocalBus, person: Console) -> None:
    run, ada = ended(bus, ADA, "broken"), person(ADA)
    shown = ada.get(f"/runs/{run}")
    assert shown["row"]["state"] == "failed"
    assert shown["actions"] == ["retry"], "this provider continues no partial answer"
    assert shown["request"] is None
    code = shown["row"]["error"]
    assert run in ids(ada.sees(lambda sample: run in ids(sample), f"error={code}&state=failed"))
    again = ada.post(f"/runs/{run}/retry")
    assert again.status_code == 202
    assert again.json()["run"] != run
    eventually_sync(lambda: state_of(ada, again.json()["run"]) == "failed")


def test_events_have_lengths_in_place_of_content_for_those_who_may_not_see_it(bus: LocalBus, person: Console) -> None:
    run = ended(bus, ADA)
    hidden, whole = person(ADA).events(run), person(OPS).events(run)
    assert SECRET not in json.dumps(hidden)
    assert SECRET in json.dumps(whole)
    assert [event["seq"] for event in hidden] == [event["seq"] for event in whole]
    assert sum(event["hidden"] for event in hidden if event["type"] == "chunk") == len(f"one {SECRET} three")
    ops = person(OPS)
    assert SECRET in json.dumps(ops.get(f"/runs/{run}")["request"])
    last = {"last-event-id": str(whole[-1]["seq"])}
    assert ops.http.get(f"/runs/{run}/events", headers=last).status_code == 204
    assert person(ADA).code(f"/runs/{run}/decisions") == "role_missing"
    assert ops.get(f"/runs/{run}/decisions") == {"decisions": [], "complete": True}


def test_another_tenants_run_is_not_found_on_any_path(bus: LocalBus, person: Console) -> None:
    run, bob = ended(bus, ADA), person(BOB)
    for path in ("", "/events", "/decisions", "/blobs/any"):
        assert bob.http.get(f"/runs/{run}{path}").status_code == 404, path
    ada, other = person(ADA), ended(bus, BOB)
    for path in ("cancel", "retry", "resume"):
        assert ada.post(f"/runs/{other}/{path}").status_code == 404, path
    assert ada.post("/tickets", run=other).status_code == 404


def test_a_link_shows_one_run_to_a_colleague_without_a_key(bus: LocalBus, person: Console) -> None:
    run, other = ended(bus, ADA), ended(bus, ADA)
    link = person(ADA).post("/tickets", run=run, seq=3).json()
    assert link["url"].startswith(f"/console/#run={run}&seq=3&ticket=")
    guest = person(ticket=link["url"].partition("&ticket=")[2])
    session = guest.get("/session")
    assert (session["roles"], session["run"]) == (["see_runs"], run)
    assert SECRET not in json.dumps(guest.events(run))
    assert guest.http.get(f"/runs/{other}").status_code == 404
    assert guest.http.get("/stream").status_code == 403
    assert guest.http.get("/dead").status_code == 403
    assert guest.post(f"/runs/{run}/cancel").status_code == 403
    assert person(ADA).http.get("/session", headers={"x-console-ticket": "made-up"}).status_code == 401


def test_admins_see_keys_spend_and_dead_letters_and_no_secret(bus: LocalBus, person: Console) -> None:
    ops, ada = person(OPS), person(ADA)
    for path in ("/keys", "/spend"):
        assert ada.code(path) == "role_missing"
        text = ops.http.get(path).text
        assert not [key for key in (ADA, BOB, OPS, PLAIN) if key.sha256 in text or key.text in text]
    assert {key["id"] for key in ops.get("/keys")["keys"]} == {"ada", "bob", "cat", "dan", "ops", "plain"}
    body = {"type": "generate", "provider": "anthropic", "model": "text", "messages": "none", "secret": SECRET}
    add_dead_letter(bus, body)
    eventually_sync(lambda: ops.get("/dead")["entries"])
    [entry, *_] = ops.get("/dead")["entries"]
    assert entry["bytes"]
    assert ada.get("/dead")["entries"] == []
    assert ada.post(f"/dead/{entry['id']}/drop").status_code == 403
    assert ops.post(f"/dead/{entry['id']}/retry").status_code == 409
    assert ops.post(f"/dead/{entry['id']}/drop").status_code == 200
    assert ops.post(f"/dead/{entry['id']}/drop").status_code == 404


def test_a_tenants_viewer_sees_no_dead_letter_and_neither_repeats_nor_drops_one(bus: LocalBus, person: Console) -> None:
    ops, ada, bob = person(OPS), person(ADA), person(BOB)
    add_dead_letter(bus, {"type": "generate", "provider": "anthropic", "model": "text", "metadata": {"tenant": "ada"}})
    entry = eventually_sync(lambda: ops.get("/dead")["entries"])[0]["id"]
    for viewer in (ada, bob):
        assert viewer.get("/dead") == {"entries": [], "next": None}
        assert viewer.get(f"/dead?after={entry[:-1]}9") == {"entries": [], "next": None}
        for action in ("retry", "drop"):
            refused = viewer.post(f"/dead/{entry}/{action}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "role_missing")
        for path in ("/keys", "/spend"):
            assert viewer.code(path) == "role_missing"
    assert entry in [each["id"] for each in ops.get("/dead")["entries"]]


def session_of(bus: LocalBus, key: NewKey) -> str:
    """A session in which a question was asked and answered."""
    name = f"talk-{secrets.token_hex(4)}"
    path, headers = f"{bus.gateway}/sessions/{name}", {"authorization": f"Bearer {key.text}"}
    request = {"model": "anthropic/text", "metadata": {"room": SECRET}}
    for item in ({"type": "configure", "request": request}, {"type": "message", "content": f"about {SECRET}"}):
        answer = httpx.post(f"{path}/events", json={"item": item}, headers=headers, timeout=60)
        assert answer.status_code in (200, 202), answer.text
    eventually_sync(lambda: len(httpx.get(f"{path}/messages", headers=headers, timeout=60).json()["messages"]) == 2)
    return name


def told(one: Person, session: str, ends: int, *, query: str = "", after: str | None = None) -> list[tuple[str, Any]]:
    """Cursors and events of a session, until so many of its runs have ended."""
    found: list[tuple[str, Any]] = []
    headers = {"last-event-id": after} if after else {}
    with one.http.stream("GET", f"/sessions/{session}/events{query}", headers=headers) as answer:
        assert answer.status_code == 200
        cursor = ""
        for line in answer.iter_lines():
            field, _, value = line.partition(": ")
            if field == "id":
                cursor = value
            elif field == "data":
                found.append((cursor, json.loads(value)))
                if (ends := ends - (found[-1][1]["type"] == "run_ended")) == 0:
                    break
    return found


def test_a_session_is_found_and_read_by_its_tenant_and_words_by_whom_may_see_them(
    bus: LocalBus, person: Console
) -> None:
    adas, bobs = session_of(bus, ADA), session_of(bus, BOB)
    ada, bob, ops = person(ADA), person(BOB), person(OPS)

    def names(one: Person, query: str) -> set[str]:
        found = {row["session"] for row in one.get(f"/sessions?{query}")["sessions"]}
        return found & {adas, bobs}

    assert (names(ada, ""), names(bob, ""), names(ops, "")) == ({adas}, {bobs}, {adas, bobs})
    assert names(ada, "tenant=bob") == {adas}
    assert (names(ops, "tenant=bob"), names(ops, f"metadata=room={SECRET}")) == ({bobs}, {adas, bobs})
    assert (names(ops, "metadata=room=kitchen"), names(ops, "older_than=3600")) == (set(), set())
    assert (names(bob, f"words={SECRET}"), names(ada, f"words={SECRET}")) == ({bobs}, set())
    assert names(ada, f"words={adas}") == {adas}
    assert SECRET not in ada.http.get("/sessions").text + ada.http.get(f"/sessions/{adas}").text
    hidden, whole = told(ada, adas, 1), told(ops, adas, 1, query="?tenant=ada")
    assert [cursor for cursor, _ in hidden] == [cursor for cursor, _ in whole]
    assert SECRET not in json.dumps(hidden)
    assert SECRET in json.dumps(whole)
    assert told(ops, adas, 1, query="?tenant=ada", after=whole[3][0]) == whole[4:]
    for one, name in ((bob, adas), (ada, bobs), (ops, adas)):
        for path in (f"/sessions/{name}", f"/sessions/{name}/events"):
            assert one.http.get(path).status_code == 404, path


def test_who_may_act_says_something_in_a_session_under_its_own_name(bus: LocalBus, person: Console) -> None:
    name, ada, bob = session_of(bus, ADA), person(ADA), person(BOB)
    path, item = f"/sessions/{name}/events", {"type": "message", "content": "more", "participant": "somebody else"}
    assert bob.post(path, item=item).json()["error"]["code"] == "role_missing"
    assert ada.http.post(path, json={"item": item}).json()["error"]["code"] == "csrf"
    for _ in range(2):
        answer = ada.post(path, item=item, id="once")
        assert (answer.status_code, answer.json()["append"]) == (200, "once")
    events = [event for _, event in told(person(OPS), name, 2, query="?tenant=ada")]
    [said] = [event["item"] for event in events if event["type"] == "appended" and event["append"] == "once"]
    assert (said["content"], said["participant"]) == ("more", "ada")
    assert ada.post(path, item={"type": "interrupt"}).json()["fate"]["reason"] == "nothing_open"
    assert ada.post(path, item={"type": "withdraw", "append": "once"}).json()["fate"]["reason"] == "not_waiting"
    for other in ({"type": "configure", "request": {}}, {"type": "delete"}):
        assert "the console appends messages" in ada.post(path, item=other).text
    assert ada.post("/sessions/nothing/events", item=item).status_code == 404


def add_dead_letter(bus: LocalBus, body: object) -> None:
    """Write a request that no one can accept, past the client."""
    with redis.Redis.from_url(bus.url) as client:
        client.xadd("tokenbus:requests", {"__data__": msgspec.json.encode(body)})


def test_pages_have_an_etag_and_forbid_what_is_not_theirs(bus: LocalBus) -> None:
    page = httpx.get(f"{bus.gateway}/console/", timeout=60)
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    again = httpx.get(f"{bus.gateway}/console/", headers={"if-none-match": page.headers["etag"]}, timeout=60)
    assert (again.status_code, again.content) == (304, b"")
    for path in ("nothing.js", "../app.py", "%2e%2e/app.py", "..%2f..%2fgateway/app.py", "vendor"):
        assert httpx.get(f"{bus.gateway}/console/static/{path}", timeout=60).status_code == 404, path
    api = httpx.get(f"{bus.gateway}/console/api/session", timeout=60)
    assert api.headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in api.headers["content-security-policy"]


def test_health_has_providers_workers_and_lanes_for_those_who_see_all_tenants(bus: LocalBus, person: Console) -> None:
    ended(bus, ADA)
    ended(bus, ADA, "broken")
    ops, ada = person(OPS), person(ADA)

    def counted(health: dict[str, Any]) -> bool:
        attempts, errors = (sum(one[of] for one in health["providers"]) for of in ("attempts_5m", "errors_5m"))
        return attempts > 1 and errors > 0

    health = ops.sees(counted, event="health")
    text = next(one for one in health["providers"] if one["model"] == "text")
    assert text["name"] == "anthropic"
    assert text["first_byte_p50_ms"] is not None
    assert {one["stage"] for one in health["partitions"]} == {"normalizer", "parser"}
    assert all(one["owner"] and one["lag_entries"] is not None for one in health["partitions"])
    assert {"intake", "fetcher", "tools", "normalizer", "parser"} <= {one["stage"] for one in health["workers"]}
    assert {one["queue"] for one in health["queues"]} == {"intake", "fetcher", "tools"}
    plots = ops.sees(lambda plots: True, event="plots")
    assert len(plots["points"]) == 360
    own = ada.sees(lambda health: True, event="health")
    assert (own["providers"], own["partitions"], own["workers"], own["queues"]) == ([], [], [], [])


def test_two_pages_watch_at_once(bus: LocalBus, person: Console) -> None:
    run, found = ended(bus, ADA), list[set[str]]()

    def watch() -> None:
        found.append(ids(person(ADA).sees(lambda sample: run in ids(sample))))

    threads = [threading.Thread(target=watch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [run in one for one in found] == [True, True]
