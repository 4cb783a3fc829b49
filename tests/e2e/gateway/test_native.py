"""The bus's own protocol through the gateway, and what every route of the gateway has, over plain HTTP."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import httpx
import msgspec
import pytest

from tests.waiting import eventually_sync
from tokenbus.events.public import Completed, PublicEvent, decode
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Picture, Reply, Stall, Status, Turn

SETTINGS = """
[gateway]
models = ["anthropic/text", "gemini/other"]
origins = ["https://app.example.com"]
keep_alive_s = 0.1
rejoin_s = 0.3
body_bytes = 20000
[gateway.aliases]
house = ["anthropic/text"]
"""
ORIGIN = {"origin": "https://app.example.com"}


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("text", Reply(thinking="let me see", text="one two three"))
        running.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
        running.model_says("fails", Turn(says=Reply(), fault=Status(status=400)))
        running.model_says("image", Reply(text="Here.", pictures=(Picture(data=b"\x89PNG not really"),)))
        yield running


@pytest.fixture
def http(bus: LocalBus) -> Generator[httpx.Client]:
    with httpx.Client(base_url=bus.gateway, timeout=60) as client:
        yield client


def request(model: str = "anthropic/text", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


def published(http: httpx.Client, model: str = "anthropic/text", **more: Any) -> str:
    answer = http.post("/runs", json=request(model, **more))
    assert answer.status_code == 202, answer.text
    return answer.json()["run"]


def lines_of(text: str) -> list[tuple[int, str, PublicEvent]]:
    """The events of a stream: id, name, and the event."""
    found: list[tuple[int, str, PublicEvent]] = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((int(fields["id"]), fields["event"], decode(fields["data"].encode())))
    return found


def test_a_run_is_published_followed_and_read_whole(http: httpx.Client, bus: LocalBus) -> None:
    run = published(http, metadata={"mine": 1, "tenant": "other", "gateway": {}})
    stream = http.get(f"/runs/{run}/events")
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["cache-control"] == "no-cache, no-transform"
    events = lines_of(stream.text)
    assert [seq for seq, _, _ in events] == list(range(len(events)))
    assert [event.seq for _, _, event in events] == [seq for seq, _, _ in events]
    assert isinstance(events[-1][2], Completed)
    whole = http.get(f"/runs/{run}", params={"wait": "true"}).json()
    assert (whole["status"], whole["text"]) == ("completed", "one two three")
    assert whole["messages"][0]["role"] == "assistant"
    with bus.sync_client() as direct:
        started: Any = next(iter(direct.follow(run)))
    assert started.metadata["mine"] == 1
    assert "tenant" not in started.metadata
    assert started.metadata["gateway"]["surface"] == "native"


def test_a_reader_resumes_after_its_last_event_and_gets_204_after_the_end(http: httpx.Client) -> None:
    run = published(http)
    events = lines_of(http.get(f"/runs/{run}/events").text)
    for after in (0, len(events) // 2):
        rest = http.get(f"/runs/{run}/events", headers={"last-event-id": str(after)})
        assert lines_of(rest.text) == events[after + 1 :]
        assert lines_of(http.get(f"/runs/{run}/events", params={"after": after}).text) == events[after + 1 :]
    assert http.get(f"/runs/{run}/events", params={"after": len(events) - 1}).status_code == 204
    assert http.get(f"/runs/{run}/events", params={"after": "x"}).status_code == 400


def test_runs_are_listed_page_by_page_and_wrong_parameters_named(http: httpx.Client) -> None:
    runs = [published(http, metadata={"n": n}) for n in range(3)]
    for run in runs:
        http.get(f"/runs/{run}", params={"wait": "true"})

    def listed() -> bool:
        found = http.get("/runs", params={"state": "completed", "provider": "anthropic", "limit": 200}).json()["runs"]
        return set(runs) <= {info["run"] for info in found}

    eventually_sync(listed)  # the end is in the log a moment before it counts in the index of a replica's reader
    every, after = list[str](), None
    while True:
        page = http.get("/runs", params={"limit": 2, **({"after": after} if after else {})}).json()
        every += [info["run"] for info in page["runs"]]
        if not (after := page["next"]):
            break
    assert len(every) == len(set(every))
    assert set(runs) <= set(every)
    info = next(info for info in http.get("/runs").json()["runs"] if info["run"] == runs[0])
    assert (info["state"], info["model"], info["finish"]) == ("completed", "text", "stop")
    for wrong, problem in (
        ({"state": "fialed"}, "did you mean 'failed'"),
        ({"limit": "900"}, "1 to 200"),
        ({"after": "x"}, "earlier answer"),
        ({"older_than": "soon"}, "seconds"),
        ({"tennant": "a"}, "did you mean 'tenant'"),
    ):
        answer = http.get("/runs", params=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, *wrong)
        assert problem in answer.json()["error"]["message"]


def test_a_post_that_accepts_a_stream_gets_the_events(http: httpx.Client) -> None:
    answer = http.post("/runs", json=request("house"), headers={"accept": "text/event-stream"})
    assert answer.status_code == 200
    assert lines_of(answer.text)[-1][1] == "completed"
    assert answer.headers["x-tokenbus-run"] == lines_of(answer.text)[0][2].run


def test_a_silent_stream_is_kept_alive_and_a_reader_that_leaves_cancels_nothing(
    http: httpx.Client, bus: LocalBus
) -> None:
    run = published(http, "anthropic/slow")
    with http.stream("GET", f"/runs/{run}/events") as stream:
        received = ""
        for text in stream.iter_text():
            received += text
            if received.endswith(": \n\n: \n\n"):
                break
    assert http.get(f"/runs/{run}").json()["status"] == "open"
    refused = http.post(f"/runs/{run}/cancel", json={"heard_through": 999})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "heard_through"), refused.text
    heard = {"heard_through": 1, "heard_characters": 0}
    answer = http.post(f"/runs/{run}/cancel", json={"reason": "enough", **heard})
    assert answer.status_code == 202
    whole = http.get(f"/runs/{run}", params={"wait": "true"}).json()
    assert (whole["status"], whole["reason"], whole["heard_through"]) == ("cancelled", "enough", 1)
    assert (whole["messages"], whole["heard"]) == ([], {}), "nothing was heard of the text"
    eventually_sync(lambda: bus.exchanges[-1].state == "disconnected")
    again = http.post(f"/runs/{run}/retry").json()["run"]
    assert http.post(f"/runs/{run}/retry").json()["run"] == again != run
    http.post(f"/runs/{again}/cancel")


def test_a_run_that_completed_cannot_be_tried_again_and_an_unknown_one_is_not_found(http: httpx.Client) -> None:
    run = published(http)
    http.get(f"/runs/{run}/events")
    answer = http.post(f"/runs/{run}/resume")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "run_not_repeatable")
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("POST", "/retry"), ("GET", "/blobs/x")):
        answer = http.request(method, f"/runs/nobody{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "run_not_found"), path


def test_a_request_that_no_deployment_accepts_is_refused_by_name(http: httpx.Client) -> None:
    answer = http.post("/runs", json=request(temperature=-1))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
    assert http.post("/runs", json=request(extra={"x": 1})).json()["error"]["param"] == "extra.x"
    assert http.post("/runs", json=request("nobody")).status_code == 404
    assert http.post("/runs", content=b"[").json()["error"]["code"] == "invalid_json"


def test_an_image_of_a_run_is_served_to_those_who_may_read_the_run(http: httpx.Client) -> None:
    run = published(http, "gemini/image", images={})
    whole = http.get(f"/runs/{run}", params={"wait": "true"}).json()
    blob = next(block["image"]["blob_id"] for block in whole["blocks"] if block["kind"] == "image")
    answer = http.get(f"/runs/{run}/blobs/{blob}")
    assert (answer.content, answer.headers["content-type"]) == (b"\x89PNG not really", "image/png")
    assert answer.headers["content-security-policy"] == "sandbox"


def test_a_blob_is_not_served_for_its_id_in_a_text_of_a_run(http: httpx.Client, bus: LocalBus) -> None:
    run = published(http, "gemini/image", images={})
    whole = http.get(f"/runs/{run}", params={"wait": "true"}).json()
    blob = next(block["image"]["blob_id"] for block in whole["blocks"] if block["kind"] == "image")
    bus.model_says("quotes", Reply(text=f'{{"blob_id": "{blob}"}} {blob}'))
    other = published(http, "anthropic/quotes", metadata={"image": {"blob_id": blob}, blob: blob, "blob_id": blob})
    assert blob in http.get(f"/runs/{other}/events").text
    assert http.get(f"/runs/{other}/blobs/{blob}").status_code == 404
    assert http.get(f"/runs/{run}/blobs/{blob}").status_code == 200


def test_an_operator_reads_a_topic(http: httpx.Client) -> None:
    run = published(http)
    with http.stream("GET", "/topics/runs", params={"from": "start"}) as stream:
        received = ""
        for text in stream.iter_text():
            received += text
            if run in received:
                break
    assert "event: started\ndata: {" in received
    configured = http.post(
        "/sessions/heard/events", json={"item": {"type": "configure", "request": {"model": "house"}}}
    )
    assert configured.is_success, configured.text
    with http.stream("GET", "/topics/sessions", params={"from": "start"}) as stream:
        lines = stream.iter_lines()
        while next(lines) != "event: configured":
            pass
        assert '"session":"heard"' in next(lines)
    assert http.get("/topics/raw").status_code == 404


def test_models_are_listed_and_looked_up_with_their_slashes(http: httpx.Client) -> None:
    for prefix in ("/v1", ""):
        names = [model["id"] for model in http.get(f"{prefix}/models").json()["data"]]
        assert names == ["house", "anthropic/text", "gemini/other"]
        assert http.get(f"{prefix}/models/anthropic%2Fany").json()["owned_by"] == "anthropic"
    assert http.get("/v1/models/nobody").json()["error"]["code"] == "model_not_found"
    listed = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (listed["first_id"], listed["data"][0]["type"]) == ("house", "model")


def test_every_path_answers_json_with_a_request_id(http: httpx.Client) -> None:
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/chat/completions", 405)):
        answer = http.request(method, path, headers={"x-request-id": "mine-1"})
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert answer.headers["x-request-id"] == "mine-1"
    made = http.get("/nowhere", headers={"x-request-id": "a b\tc"}).headers["x-request-id"]
    assert made.startswith("req_")


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", content=b"x" * 20001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    deep = b'{"model":' + b"[" * 9000 + b"]" * 9000 + b"}"
    assert http.post("/v1/chat/completions", content=deep).status_code == 400
    gzip = http.post("/v1/chat/completions", content=b"x", headers={"content-encoding": "gzip"})
    assert gzip.status_code == 415


def test_pages_of_listed_origins_may_call_and_no_others(http: httpx.Client) -> None:
    request_headers = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-stainless-os, x-evil",
    }
    answer = http.options("/v1/chat/completions", headers={**ORIGIN, **request_headers})
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == ORIGIN["origin"]
    assert answer.headers["access-control-allow-headers"] == "x-stainless-os"
    assert "access-control-allow-credentials" not in answer.headers
    got = http.post("/runs", json=request(), headers={**ORIGIN, "sec-fetch-site": "cross-site"})
    assert got.status_code == 202
    assert "x-tokenbus-run" in got.headers["access-control-expose-headers"]
    other = {"origin": "https://evil.example.com"}
    assert http.options("/v1/chat/completions", headers={**other, **request_headers}).status_code == 403
    assert http.post("/runs", json=request(), headers=other).status_code == 403
    assert http.get("/v1/models", headers={"host": "evil.example.com"}).status_code == 421
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=other).headers


def test_the_same_idempotency_key_twice_is_one_run(http: httpx.Client) -> None:
    body = {"model": "anthropic/text", "messages": [{"role": "user", "content": "hi"}]}
    key = {"idempotency-key": "once"}
    first = http.post("/v1/chat/completions", json=body, headers=key)
    again = http.post("/v1/chat/completions", json=body, headers=key)
    assert first.headers["x-tokenbus-run"] == again.headers["x-tokenbus-run"]
    assert first.content == again.content
    other = http.post("/v1/chat/completions", json={**body, "temperature": 0.5}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")


def test_a_run_with_a_key_waits_for_a_retry_of_its_client_and_then_is_cancelled(
    http: httpx.Client, bus: LocalBus
) -> None:
    body = {"model": "anthropic/slow", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    key = {"idempotency-key": "joined"}
    with http.stream("POST", "/v1/chat/completions", json=body, headers=key) as first:
        run = first.headers["x-tokenbus-run"]
    with http.stream("POST", "/v1/chat/completions", json=body, headers=key) as again:
        assert again.headers["x-tokenbus-run"] == run
        assert "one" in next(text for text in again.iter_text() if '"one' in text)
    whole = http.get(f"/runs/{run}", params={"wait": "true"}).json()
    assert (whole["status"], whole["reason"]) == ("cancelled", "client_disconnected")
    with http.stream("POST", "/v1/chat/completions", json=body, headers=key) as third:
        assert third.headers["x-tokenbus-run"] != run, "a cancelled run is tried again"


def test_the_pages_of_every_service_are_there(http: httpx.Client) -> None:
    published(http)
    assert http.get("/ready").json()["service"] == "gateway"
    assert 'tokenbus_gateway_answers_total{status="202",surface="native"}' in http.get("/metrics").text
    assert msgspec.json.decode(http.get("/asyncapi.json").content)
