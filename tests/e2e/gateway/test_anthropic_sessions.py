"""Sessions with Anthropic's own Python client, its answers strictly validated: only the base URL is another one."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.e2e.gateway.served import auth
from tests.waiting import eventually_sync
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.mock_provider import Reply, Stall, Status, ToolCall, Turn

ADA, EVE = new_key(), new_key()
KEYS = {"ada": ADA, "eve": EVE}
SETTINGS = (
    "[gateway]\n"
    'tools = ["weather", "pay", "show"]\n'
    + "".join(f'[gateway.keys.{name}]\nsha256 = "{key.sha256}"\ntenant = "{name}"\n' for name, key in KEYS.items())
    + """
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
[tools.pay]
kind = "python"
call = "tests.services.tools.sample_tools:echo"
approval = "always"
[tools.show]
kind = "client"
"""
)
SAID: Any = {"type": "user.message", "content": [{"type": "text", "text": "hello"}]}


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        yield running


def client_of(bus: LocalBus, key: Any, base: str = "/anthropic") -> anthropic.Anthropic:
    return anthropic.Anthropic(
        auth_token=key.text,
        api_key=None,
        base_url=f"{bus.gateway}{base}",
        max_retries=0,
        _strict_response_validation=True,
    )


@pytest.fixture
def client(bus: LocalBus) -> Generator[anthropic.Anthropic]:
    call = ToolCall(name="weather", arguments={"city": "Rome"})
    bus.model_says("talk", Reply(thinking="hm", text="one two three"), *["four"] * 9)
    bus.model_says("calls", Reply(text="I look.", tool_calls=(call,)), "Sunny.")
    bus.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")), *["four"] * 9)
    bus.model_says("fails", Turn(says=Reply(), fault=Status(status=400)))
    with client_of(bus, ADA) as made:
        yield made


def session_of(client: anthropic.Anthropic, model: str, **more: Any) -> Any:
    beta = client.beta
    agent = beta.agents.create(name="helper", model=model, system="Be brief.", **more)
    environment = beta.environments.create(name="here")
    assert beta.environments.retrieve(environment.id).name == "here"
    return beta.sessions.create(agent=agent.id, environment_id=environment.id, title="A talk", metadata={"room": "7"})


def until_idle(stream: Iterator[Any]) -> list[Any]:
    seen: list[Any] = []
    for event in stream:
        seen.append(event)
        if event.type in ("session.status_idle", "session.deleted"):
            break
    return seen


def said(events: Iterable[Any]) -> list[str]:
    """The texts of the agent's messages."""
    return [event.content[0].text for event in events if event.type == "agent.message"]


def test_a_conversation_is_streamed_with_previews_and_listed_again(bus: LocalBus, client: anthropic.Anthropic) -> None:
    session = session_of(client, "anthropic/talk")
    assert (session.status, session.agent.name, session.agent.system) == ("idle", "helper", "Be brief.")
    events = client.beta.sessions.events
    with events.stream(session.id, event_deltas=["agent.message", "agent.thinking"]) as stream:
        sent = events.send(session.id, events=[SAID])
        seen = until_idle(stream)
    types = [event.type for event in seen]
    assert [each for each in types if each != "event_delta"] == [
        *("user.message", "session.status_running", "user.message"),
        *("span.model_request_start", "event_start", "agent.thinking", "event_start", "agent.message"),
        *("span.model_request_end", "session.status_idle"),
    ]
    (stored,) = sent.data or []
    first, again = (event for event in seen if event.type == "user.message")
    assert stored.id == first.id == again.id
    assert (stored.processed_at, first.processed_at, again.processed_at is None) == (None, None, False)
    message = next(event for event in seen if event.type == "agent.message")
    deltas = [event for event in seen if event.type == "event_delta"]
    assert {event.event_id for event in deltas} == {message.id}
    assert "".join(event.delta.content.text for event in deltas) == message.content[0].text == "one two three"
    assert seen[-1].stop_reason.type == "end_turn"
    assert next(event for event in seen if event.type == "span.model_request_end").model_usage.input_tokens > 0
    assert bus.requests[-1]["system"][0]["text"] == "Be brief."
    events.send(session.id, events=[SAID])
    eventually_sync(lambda: list(events.list(session.id))[-1].type == "session.status_idle")
    listed: list[Any] = list(events.list(session.id, limit=3))  # in pages
    buffered = [event.model_dump() for event in seen if not event.type.startswith("event_")]
    assert [event.model_dump() for event in listed][: len(buffered)] == buffered
    assert [event.id for event in events.list(session.id, order="desc")] == [event.id for event in reversed(listed)]
    assert said(events.list(session.id, types=["agent.message"])) == ["one two three", "four"]
    (room,) = (found for found in client.beta.sessions.list() if found.id == session.id)
    assert (room.title, room.metadata) == ("A talk", {"room": "7"})
    changed = client.beta.sessions.update(session.id, title="Another", metadata={"room": None, "floor": "1"})
    assert (changed.title, changed.metadata, changed.agent.name) == ("Another", {"floor": "1"}, "helper")
    assert client.beta.sessions.delete(session.id).type == "session_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.beta.sessions.retrieve(session.id)


def test_a_tool_of_the_deployment_runs_between_two_requests_of_the_model(client: anthropic.Anthropic) -> None:
    tools = {"tokenbus": {"tools": ["weather"]}}
    session = session_of(client, "anthropic/calls", extra_body=tools)
    with client.beta.sessions.events.stream(session.id) as stream:
        client.beta.sessions.events.send(session.id, events=[SAID])
        seen = until_idle(stream)
    use = next(event for event in seen if event.type == "agent.tool_use")
    result = next(event for event in seen if event.type == "agent.tool_result")
    assert (use.name, use.input, result.tool_use_id, result.is_error) == ("weather", {"city": "Rome"}, use.id, False)
    assert said(seen) == ["I look.", "Sunny."]
    assert [event.type for event in seen].count("span.model_request_end") == 2


def test_a_clients_own_tools_are_answered_together_and_the_run_goes_on(
    client: anthropic.Anthropic, bus: LocalBus
) -> None:
    calls = tuple(ToolCall(name="place", arguments={"of": name}) for name in ("Ann", "Bob"))
    bus.model_says("owns", Reply(text="I look.", tool_calls=calls), "Bonn and Rome.")
    schema: Any = {"type": "object", "properties": {"of": {"type": "string"}}}
    tool: Any = {"type": "custom", "name": "place", "description": "Where somebody is", "input_schema": schema}
    session = session_of(client, "anthropic/owns", tools=[tool])
    assert [found.name for found in session.agent.tools] == ["place"]
    events = client.beta.sessions.events
    with events.stream(session.id) as stream:
        events.send(session.id, events=[SAID])
        seen = until_idle(stream)
        uses = [event for event in seen if event.type == "agent.custom_tool_use"]
        assert [use.input for use in uses] == [{"of": "Ann"}, {"of": "Bob"}]
        assert (seen[-1].stop_reason.type, seen[-1].stop_reason.event_ids) == (
            "requires_action",
            [use.id for use in uses],
        )
        answers: list[Any] = [
            {
                "type": "user.custom_tool_result",
                "custom_tool_use_id": use.id,
                "content": [{"type": "text", "text": place}],
            }
            for use, place in zip(uses, ("Bonn", "Rome"), strict=True)
        ]
        first = events.send(session.id, events=answers[:1])
        assert [event.custom_tool_use_id for event in first.data or () if event.type == "user.custom_tool_result"] == [
            uses[0].id
        ]
        with pytest.raises(anthropic.BadRequestError, match="waits"):
            events.send(session.id, events=answers[:1])
        events.send(session.id, events=answers[1:])
        seen = until_idle(stream)
    assert (said(seen), seen[-1].stop_reason.type) == (["Bonn and Rome."], "end_turn")
    told = [event.custom_tool_use_id for event in events.list(session.id) if event.type == "user.custom_tool_result"]
    assert set(told) == {use.id for use in uses}
    assert "Rome" in str(bus.requests[-1]["messages"][-1])


def asked(client: anthropic.Anthropic, bus: LocalBus, *calls: ToolCall) -> tuple[Any, list[Any]]:
    """A session that waits for somebody, and its events."""
    bus.model_says("asks", Reply(text="I pay.", tool_calls=calls), "Done.")
    session = session_of(client, "anthropic/asks", extra_body={"tokenbus": {"tools": ["pay", "show"]}})
    with client.beta.sessions.events.stream(session.id) as stream:
        client.beta.sessions.events.send(session.id, events=[SAID])
        return session, until_idle(stream)


def confirmed(use: str, result: str, **more: Any) -> Any:
    return {"type": "user.tool_confirmation", "tool_use_id": use, "result": result, **more}


PAYS = tuple(ToolCall(name="pay", arguments={"amount": amount}) for amount in (500, 900))


def test_calls_that_wait_are_confirmed_and_denied(client: anthropic.Anthropic, bus: LocalBus) -> None:
    session, seen = asked(client, bus, *PAYS)
    uses = [event for event in seen if event.type == "agent.tool_use"]
    assert [use.evaluated_permission for use in uses] == ["ask", "ask"]
    assert (seen[-1].stop_reason.type, seen[-1].stop_reason.event_ids) == ("requires_action", [use.id for use in uses])
    assert client.beta.sessions.retrieve(session.id).status == "idle"
    events = client.beta.sessions.events
    assert [event.id for event in events.list(session.id)][-1] == seen[-1].id, "the list tells it too"
    with events.stream(session.id) as stream:
        first = events.send(session.id, events=[confirmed(uses[1].id, "deny", deny_message="too dear")])
        told: Any = (first.data or [None])[0]
        assert (told.type, told.processed_at) == ("user.tool_confirmation", None)
        events.send(session.id, events=[confirmed(uses[0].id, "allow")])
        after = until_idle(stream)
        while after[-1].stop_reason.type == "requires_action":  # the denied one was told before
            after += until_idle(stream)
    assert said(after) == ["Done."]
    decided = [event for event in events.list(session.id) if event.type == "user.tool_confirmation"]
    assert [(event.tool_use_id, event.result, event.deny_message) for event in decided] == [
        (uses[1].id, "deny", "too dear"),
        (uses[0].id, "allow", None),
    ]
    assert told.id == decided[0].id
    assert decided[0].processed_at
    results = [event for event in after if event.type == "agent.tool_result"]
    assert [(result.tool_use_id, result.is_error) for result in results] == [(uses[0].id, False), (uses[1].id, True)]
    listed = [event.id for event in events.list(session.id) if event.type != "user.message"]  # which is told twice
    assert len(listed) == len(set(listed))
    assert {event.id for event in (*seen, *after) if event.type != "user.message"} <= {*listed}


def test_a_confirmation_that_came_too_late_and_one_of_nothing_are_errors(
    client: anthropic.Anthropic, bus: LocalBus
) -> None:
    session, seen = asked(client, bus, PAYS[0])
    other, _ = asked(client, bus, PAYS[0])
    (use,) = (event for event in seen if event.type == "agent.tool_use")
    events = client.beta.sessions.events
    run = use.id.removeprefix("sevt_").rpartition(".")[0]
    at = f"{bus.gateway}/runs/{run}/waiting"
    (wait,) = httpx.get(at, headers=auth(ADA)).json()["waiting"]
    decision = {"type": "approval", "decision": "deny", "by": "bob"}
    for name in ("sevt_1", use.id + "9", "sevt_🌤️", use.id.rpartition(".")[0], seen[-1].id):
        with pytest.raises(anthropic.BadRequestError, match="nothing in this session waits"):
            events.send(session.id, events=[confirmed(name, "allow")])
    with pytest.raises(anthropic.BadRequestError, match="nothing in this session waits"):
        events.send(other.id, events=[confirmed(use.id, "allow")])
    with pytest.raises(anthropic.BadRequestError, match="deny_message"):
        events.send(session.id, events=[confirmed(use.id, "allow", deny_message="x")])
    result: Any = {"type": "user.custom_tool_result", "custom_tool_use_id": use.id}
    with pytest.raises(anthropic.BadRequestError, match="another kind of event"):
        events.send(session.id, events=[result])
    assert httpx.post(f"{at}/{wait['wait']}", json=decision, headers=auth(ADA)).status_code == 200
    with pytest.raises(anthropic.ConflictError, match="was decided before: deny by bob"):
        events.send(session.id, events=[confirmed(use.id, "allow")])


def test_the_same_confirmation_twice_is_one(client: anthropic.Anthropic, bus: LocalBus) -> None:
    session, seen = asked(client, bus, PAYS[0])
    (use,) = (event for event in seen if event.type == "agent.tool_use")
    events = client.beta.sessions.events
    with events.stream(session.id) as stream:
        for _ in range(2):
            events.send(session.id, events=[confirmed(use.id, "allow")])
        assert said(until_idle(stream)) == ["Done."]
    assert [event.type for event in events.list(session.id)].count("user.tool_confirmation") == 1


def test_a_tool_of_kind_client_is_a_custom_tool_of_the_open_run(client: anthropic.Anthropic, bus: LocalBus) -> None:
    session, seen = asked(client, bus, ToolCall(name="show"))
    (use,) = (event for event in seen if event.type == "agent.custom_tool_use")
    assert seen[-1].stop_reason.event_ids == [use.id]
    events = client.beta.sessions.events
    result: Any = {"type": "user.custom_tool_result", "custom_tool_use_id": use.id}
    with events.stream(session.id) as stream:
        result["content"] = [{"type": "text", "text": "seen"}]
        events.send(session.id, events=[result])
        after = until_idle(stream)
    assert said(after) == ["Done."]
    (told,) = (event for event in after if event.type == "user.custom_tool_result")
    assert (told.custom_tool_use_id, told.content[0].text) == (use.id, "seen")
    assert "seen" in str(bus.requests[-1]["messages"][-1])


def test_an_interrupt_ends_the_run_and_what_was_said_meanwhile_is_answered(client: anthropic.Anthropic) -> None:
    session = client.beta.sessions.create(agent="anthropic/slow", environment_id="env_x", initial_events=[SAID])
    events = client.beta.sessions.events
    with events.stream(session.id, event_deltas=["agent.message"]) as stream:
        eventually_sync(lambda: client.beta.sessions.retrieve(session.id).status == "running")
        events.send(session.id, events=[{"type": "user.interrupt"}, SAID])
        seen: list[Any] = []
        while not said(seen) or said(seen)[-1] != "four":  # it may be idle in between
            seen += until_idle(stream)
    assert "user.interrupt" in [event.type for event in seen]
    assert seen[-1].stop_reason.type == "end_turn"
    with events.stream(session.id) as stream:
        client.beta.sessions.delete(session.id)
        assert until_idle(stream)[-1].type == "session.deleted"


def test_an_archived_session_is_read_and_not_written(client: anthropic.Anthropic) -> None:
    session = session_of(client, "anthropic/slow")
    sessions = client.beta.sessions
    with sessions.events.stream(session.id) as stream:
        sessions.events.send(session.id, events=[SAID])
        next(event for event in stream if event.type == "session.status_running")
        with pytest.raises(anthropic.BadRequestError, match="running"):
            sessions.archive(session.id)
        sessions.events.send(session.id, events=[{"type": "user.interrupt"}])
        until_idle(stream)
    archived = sessions.archive(session.id)
    assert archived.archived_at is not None
    assert sessions.archive(session.id).archived_at == sessions.retrieve(session.id).archived_at == archived.archived_at
    assert [event.type for event in sessions.events.list(session.id)][:1] == ["user.message"]
    with pytest.raises(anthropic.BadRequestError, match="archived"):
        sessions.events.send(session.id, events=[SAID])
    with pytest.raises(anthropic.BadRequestError, match="archived"):
        sessions.update(session.id, title="Another")
    assert session.id not in [each.id for each in sessions.list()]
    assert session.id in [each.id for each in sessions.list(include_archived=True)]
    agents = client.beta.agents
    assert agents.archive(session.agent.id).archived_at is not None
    assert session.agent.id not in [each.id for each in agents.list()]
    with pytest.raises(anthropic.BadRequestError, match="archived"):
        sessions.create(agent=session.agent.id, environment_id=session.environment_id)
    sessions.delete(session.id)
    with pytest.raises(anthropic.NotFoundError):
        sessions.retrieve(session.id)


def test_a_failure_is_an_error_of_the_session(client: anthropic.Anthropic) -> None:
    session = client.beta.sessions.create(agent="anthropic/fails", environment_id="env_x")
    with client.beta.sessions.events.stream(session.id) as stream:
        client.beta.sessions.events.send(session.id, events=[SAID])
        seen = until_idle(stream)
    error = next(event for event in seen if event.type == "session.error")
    assert (error.error.type, error.error.retry_status.type) == ("model_request_failed_error", "exhausted")
    assert seen[-1].stop_reason.type == "retries_exhausted"


def test_what_cannot_be_is_refused_in_the_apis_words(bus: LocalBus, client: anthropic.Anthropic) -> None:
    session = client.beta.sessions.create(agent="anthropic/talk", environment_id="env_x")
    headers = {**auth(ADA), "anthropic-version": "2026-10-21"}

    def refused(path: str, body: Any) -> tuple[int, str]:
        answer = httpx.post(f"{bus.gateway}/v1{path}", json=body, headers=headers)
        error = answer.json()["error"]
        return answer.status_code, f"{error['type']} {error['message']}"

    for path, body, status, what in (
        (
            "/agents",
            {"name": "x", "model": "anthropic/talk", "tools": [{"type": "agent_toolset_20260401"}]},
            400,
            "tools[0].type",
        ),
        ("/agents", {"name": "x", "model": "nobody/x"}, 404, "model"),
        ("/agents", {"name": "x", "model": "anthropic/talk", "skills": [{"type": "custom"}]}, 400, "skills"),
        ("/environments", {"name": "x", "config": {"type": "cloud", "packages": {"pip": ["x"]}}}, 400, "config"),
        ("/sessions", {"agent": "agent_none", "environment_id": "env_x"}, 404, "agent_none"),
        ("/sessions", {"agent": "anthropic/talk"}, 400, "environment_id"),
        (f"/sessions/{session.id}/events", {"events": []}, 400, "events"),
        (f"/sessions/{session.id}/events", {"events": [{"type": "user.define_outcome"}]}, 400, "events[0].type"),
        (
            f"/sessions/{session.id}/events",
            {"events": [{"type": "user.tool_confirmation", "tool_use_id": "sevt_1", "result": "allow"}]},
            400,
            "waits",
        ),
        (f"/sessions/{session.id}/events", {"events": [SAID, {"type": "user.message", "content": 7}]}, 400, "content"),
        ("/sessions/nobody/events", {"events": [SAID]}, 404, "nobody"),
    ):
        found, text = refused(path, body)
        assert found == status, text
        assert what in text
    assert list(client.beta.sessions.events.list(session.id)) == []
    with client_of(bus, EVE, base="") as eve:
        for call in (
            eve.beta.sessions.retrieve,
            eve.beta.sessions.delete,
            lambda name: list(eve.beta.sessions.events.list(name)),
        ):
            with pytest.raises(anthropic.NotFoundError):
                call(session.id)
        assert list(eve.beta.sessions.list()) == []
