"""Clients of the gateway for Node: the AI SDK's chats of three versions."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import node
from tokenbus import Appended
from tokenbus.events.requests import SessionMessage
from tokenbus.testing import CutOff, Delivery, ErrorEvent, LocalBus, Reply, Stall, Status, ToolCall, Turn

SOURCES = Path(__file__).parent / "gateway"
GUIDES = Path(__file__).parents[2] / "docs" / "guides"
TEXT = "Yes, take it along. It should be dry from six in the evening on. 🌤️ Then you may go without."
LOOKS = "Let me look, it takes a moment or two."
SETTINGS = """
[gateway]
tools = ["weather", "pay", "show"]
early_status_s = 60  # however busy the machine is, a run that fails before its first event has its own status
[tools.weather]
kind = "python"
call = "tests.clients.gateway_tools:weather"
[tools.weather.parameters]
type = "object"
[tools.pay]
kind = "python"
call = "tests.clients.gateway_tools:pay"
approval = "always"
parameters = { type = "object", properties = { amount = { type = "integer" } } }
[tools.show]
kind = "client"
approval = "always"
parameters = { type = "object" }
"""


@pytest.fixture(scope="module")
def project(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts, and the code of the guides as PAGE.N.mjs."""
    directory = tmp_path_factory.mktemp("clients")
    (directory / "node_modules").symlink_to(node.packages(SOURCES))
    for source in (*SOURCES.glob("*.mjs"), SOURCES / "package.json"):
        shutil.copy(source, directory)
    for page in ("use-chat", "ag-ui", "durable-streams"):
        text = (GUIDES / f"{page}.md").read_text()
        for n, code in enumerate(re.findall(r"^```js\n(.*?)^```", text, re.DOTALL | re.MULTILINE), start=1):
            (directory / f"{page}.{n}.mjs").write_text(_at(base, code))
    return directory


@pytest.fixture(scope="module")
def bus() -> Iterator[LocalBus]:
    answer = Reply(thinking="Hm.", text=TEXT)
    with LocalBus(SETTINGS) as local:
        local.model_says("text", answer)
        local.model_says(
            "bus-tool", Reply(tool_calls=(ToolCall(name="weather", arguments={"city": "Bonn"}),)), "So: {tool_result}"
        )
        pays, places = ToolCall(name="pay", arguments={"amount": 500}), ToolCall(name="place")
        more = ToolCall(name="pay", arguments={"amount": 900})
        local.model_says("pays", Reply(text="I pay.", tool_calls=(pays,)), "So: {tool_result}")
        local.model_says("pays-twice", Reply(tool_calls=(pays, more)), Reply(text="Both are over."))
        local.model_says("pays-in-place", Reply(tool_calls=(places, pays)), Reply(text="Both are over."))
        local.model_says("shows", Reply(tool_calls=(ToolCall(name="show"),)), "So: {tool_result}")
        local.model_says("own-tool", Reply(text="I look.", tool_calls=(ToolCall(name="place"),)), "So: {tool_result}")
        local.model_says("failing", Turn(says=answer, fault=Status(status=400)))
        local.model_says("cut", Turn(says=answer, fault=CutOff(after_text="evening")))
        local.model_says("retried", Turn(says=answer, first=(ErrorEvent(after_text="Hm"),)))
        writes = Reply(tool_calls=(ToolCall(name="write", arguments={"text": TEXT}),))
        writing = {"delivery": Delivery(pace=30), "first": (ErrorEvent(after_text=" it al"),)}
        local.model_says("writing", Turn(says=writes, **writing))
        local.model_says("cut-call", Turn(says=writes, fault=CutOff(after_text=" it al")))
        local.model_says("stalled", Turn(says=answer, fault=Stall(after_text="evening")))
        local.model_says("counting", lambda request: Reply(text=str(len(request.body["messages"]))))
        looks = Reply(text=LOOKS, tool_calls=(ToolCall(name="weather", arguments={"city": "Bonn"}),))
        local.model_says("steerable", Turn(says=looks, delivery=Delivery(pace=8)), "20 °C.")
        local.model_says("paced", Turn(says=answer, delivery=Delivery(pace=20)))
        local.model_says("slow", Turn(says=answer, delivery=Delivery(pace=6)))  # continues while a client comes back
        yield local


@pytest.fixture(scope="module")
def base(bus: LocalBus) -> str:
    return bus.gateway


def _at(base: str, code: str) -> str:
    """The code of a page with this gateway and its models for those that the page names."""
    code = code.replace("http://127.0.0.1:8088", base).replace("anthropic/claude-sonnet-4-6", "anthropic/slow")
    return code.replace("mock-anthropic/claude-haiku-4-5", "anthropic/text")


def output_of(project: Path, script: str, *args: str) -> dict[str, Any]:
    done = node.run(script, *args, cwd=project, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_lock_names_no_registry() -> None:
    lock = json.loads((SOURCES / "package-lock.json").read_text())
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]


@pytest.fixture(scope="module", params=["ai5", "ai6", "ai", "ai socket"])
def chats(request: pytest.FixtureRequest, base: str, project: Path) -> dict[str, Any]:
    """What the chats of one version of the AI SDK ended with; the last ones over `WebSocketChatTransport`."""
    name, *over = request.param.split()
    return output_of(project, "ui.mjs", name, base, *over) | {"over": over}


def test_a_chat_has_its_text_and_its_thinking_and_continues(chats: dict[str, Any]) -> None:
    chat = chats["text"]
    assert (chat["status"], chat["text"]) == ("ready", TEXT)
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "user", "assistant"]
    thinking = chat["messages"][1]["parts"][1]
    assert (thinking["text"], thinking["state"]) == ("Hm.", "done")
    assert thinking["providerMetadata"]["tokenbus"]["signature"]


def test_a_tool_of_the_bus_is_shown_and_does_not_run_in_the_browser(chats: dict[str, Any]) -> None:
    chat = chats["bus_tool"]
    assert (chat["text"], chat["ran"]) == ("So: Rain in Bonn.", [])
    tool = next(part for part in chat["messages"][-1]["parts"] if part["type"] == "dynamic-tool")
    assert (tool["state"], tool["input"], tool["output"]) == ("output-available", {"city": "Bonn"}, "Rain in Bonn.")


def test_a_tool_of_the_browser_runs_there_and_the_answer_continues_in_the_same_message(chats: dict[str, Any]) -> None:
    chat = chats["own_tool"]
    assert chat["status"] == "ready"
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]
    assert chat["text"] == 'I look.So: {"city":"Bonn"}'


def test_the_input_of_a_browsers_tool_is_shown_as_it_comes_and_a_void_call_does_not_run(chats: dict[str, Any]) -> None:
    chat = chats["writing"]
    assert (chat["status"], chat["calls"], chat["asks"]) == ("ready", [{"text": TEXT}], 0)
    assert any(text != TEXT and TEXT.startswith(text) for text in chat["inputs"])
    states = [part["state"] for part in chat["messages"][-1]["parts"] if part["type"] == "tool-write"]
    assert [state for state in states if state != "output-error"] == ["input-available"]


@pytest.fixture
def asked(chats: dict[str, Any]) -> dict[str, Any]:
    if "approved" not in chats:
        pytest.skip("version 5 has no approvals")
    return chats


def parts_of(chat: dict[str, Any]) -> list[tuple[str, str]]:
    tools = [part for part in chat["messages"][1]["parts"] if "toolCallId" in part]
    return [(part["state"], part.get("output", "")) for part in tools]


def test_a_page_allows_a_call_and_the_answer_goes_on_in_the_same_message(asked: dict[str, Any]) -> None:
    chat = asked["approved"]
    assert (chat["before"], chat["error"]) == (["approval-requested"], None)
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]
    assert chat["text"] == "I pay.So: Paid 500."
    assert parts_of(chat) == [("output-available", "Paid 500.")]
    (fate,) = chat["resumed"]
    assert (fate["decision"], fate["door"]) == ("allow", "ai_sdk")


def test_a_page_denies_a_call_and_the_model_reads_why(asked: dict[str, Any]) -> None:
    chat = asked["denied"]
    assert chat["text"] == "I pay.So: the call was denied, and did not run: too dear"
    assert parts_of(chat) == [("output-denied", "")]


def test_several_calls_are_decided_by_one_request(asked: dict[str, Any]) -> None:
    chat = asked["twice"]
    assert (chat["text"], chat["posts"]) == ("Both are over.", 2)
    assert parts_of(chat) == [("output-available", "Paid 500."), ("output-denied", "")]


def test_a_page_that_comes_back_is_asked_again_and_decides(asked: dict[str, Any]) -> None:
    chat = asked["reloaded"]
    assert chat["before"] == ["approval-requested"]
    assert parts_of(chat) == [("output-available", "Paid 500.")]
    assert chat["text"] == "I pay.So: Paid 500."


def test_an_answer_that_came_too_late_is_an_error_and_the_page_reads_what_was_decided(asked: dict[str, Any]) -> None:
    chat = asked["overtaken"]
    assert (chat["late"]["status"], chat["by"]) == ("error", "deny")
    assert "was decided before: deny by bob" in chat["late"]["error"]
    assert chat["text"] == "I pay.So: the call was denied, and did not run"
    assert parts_of(chat) == [("output-denied", "")]
    assert [fate["by"] for fate in chat["resumed"]] == ["bob"]


def test_the_same_answer_twice_is_one(asked: dict[str, Any]) -> None:
    assert [answer["status"] for answer in asked["repeated"]["answers"]] == [200, 200]
    assert all("So: Paid 500." in answer["text"] for answer in asked["repeated"]["answers"])
    assert len(asked["repeated"]["resumed"]) == 1


def test_an_answer_to_nothing_of_this_chat_is_a_named_error(asked: dict[str, Any]) -> None:
    chat = asked["hostile"]
    assert [answer["status"] for answer in chat["answers"]] == [404] * len(chat["answers"])
    assert all("nothing in this conversation waits for" in answer["text"] for answer in chat["answers"])
    assert chat["malformed"] == [400, 400]
    assert chat["resumed"] == []


def test_a_tool_of_the_page_beside_one_of_the_bus_gives_its_result_to_the_run(chats: dict[str, Any]) -> None:
    if "in_place" not in chats:
        pytest.skip("version 5 has no approvals")
    chat = chats["in_place"]
    assert (chat["text"], chat["ran"]) == ("Both are over.", ["place"])
    assert parts_of(chat) == [("output-available", "Paid 500."), ("output-available", {"city": "Bonn"})]


def test_a_tool_of_the_page_that_must_be_allowed_runs_after_that(asked: dict[str, Any]) -> None:
    chat = asked["shown"]
    assert (chat["ran_before"], chat["ran"]) == (0, 1)
    assert chat["text"] == "So: seen"


def test_an_answer_may_come_with_the_next_message(asked: dict[str, Any]) -> None:
    chat = asked["typed"]
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "user", "assistant"]
    assert [fate["decision"] for fate in chat["resumed"]] == ["allow"]
    assert chat["text"] == "So: Paid 500."


@pytest.mark.parametrize(
    ("story", "sentence"),
    [
        ("refused", "'frobnicate' is not supported by this gateway"),
        ("failed", "The request was not accepted."),
        ("unknown_model", "the model 'nobody/knows' is neither PROVIDER/MODEL of a configured provider nor an alias"),
    ],
)
def test_a_refusal_is_a_sentence_for_the_user(chats: dict[str, Any], story: str, sentence: str) -> None:
    assert chats[story]["status"] == "error"
    assert chats[story]["error"] == sentence


def test_a_cut_keeps_the_text_and_is_an_error(chats: dict[str, Any]) -> None:
    chat = chats["cut"]
    assert (chat["status"], chat["error"]) == ("error", "The answer was cut short.")
    assert chat["text"]
    assert TEXT.startswith(chat["text"])


def test_a_retry_before_any_visible_text_is_not_seen(chats: dict[str, Any]) -> None:
    assert (chats["retried"]["status"], chats["retried"]["text"]) == ("ready", TEXT)


def test_a_stop_ends_the_run_and_is_no_error(chats: dict[str, Any]) -> None:
    chat = chats["stopped"]
    assert chat["status"] == "ready"
    assert (chat["stop"], chat["again"]) == ({"stopped": True}, {"stopped": False})
    assert chat["messages"][-1]["parts"][-1]["state"] == "done"


def test_stopping_a_chat_reaches_the_run_over_a_socket_alone(chats: dict[str, Any]) -> None:
    chat = chats["aborted"]
    assert (chat["status"], chat["stop"]["stopped"]) == ("ready", not chats["over"])


def test_a_chat_resumes_after_its_page_was_closed(chats: dict[str, Any]) -> None:
    chat = chats["resumed"]
    assert (chat["status"], chat["text"]) == ("ready", TEXT)
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]
    assert (chat["late"]["status"], chat["late"]["text"], chat["fetched"]) == ("ready", TEXT, 204)


def test_a_second_request_of_a_chat_ends_the_first_one(chats: dict[str, Any]) -> None:
    chat = chats["superseded"]
    assert (chat["status"], chat["text"]) == ("ready", TEXT)
    assert chat["first"]["status"] == "ready"
    assert TEXT.startswith(chat["first"]["text"])


def test_a_chat_whose_user_wants_another_answer_has_the_history_that_is_on_the_screen(chats: dict[str, Any]) -> None:
    chat = chats["rewritten"]
    assert (chat["twice"], chat["again"], chat["text"]) == ("3", "3", "1")
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]


@pytest.fixture(scope="module")
def agents(base: str, project: Path) -> dict[str, Any]:
    """What the agents of AG-UI ended with; each stream passed the client's own `verifyEvents` and schemas."""
    return output_of(project, "agui.mjs", base)


def test_an_agent_has_its_text_and_its_thinking(agents: dict[str, Any]) -> None:
    agent = agents["text"]
    assert (agent["text"], agent["outcome"]) == (TEXT, {"type": "success"})
    reasoning = next(message for message in agent["messages"] if message["role"] == "reasoning")
    assert reasoning["content"] == "Hm."
    assert "signature" in reasoning["encryptedValue"]


def test_an_agent_is_shown_the_tools_that_the_bus_runs(agents: dict[str, Any]) -> None:
    agent = agents["bus_tool"]
    assert (agent["text"], agent["outcome"]) == ("So: Rain in Bonn.", {"type": "success"})
    assert [message["role"] for message in agent["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_an_agent_runs_its_own_tools_between_two_runs(agents: dict[str, Any]) -> None:
    agent = agents["own_tool"]
    assert len(agent["asked"]["outcome"]["pendingToolCallIds"]) == 1
    assert agent["text"] == "I look.So: Bonn"


def arguments_in_log(base: str, run: str) -> list[str]:
    """The arguments that a run's log has, in the pieces in which they came; those of a call that is void, too."""
    with httpx.stream("GET", f"{base}/runs/{run}/events", timeout=60) as log:
        events = [json.loads(line.removeprefix("data: ")) for line in log.iter_lines() if line.startswith("data: {")]
    return [event["text"] for event in events if event["type"] == "chunk" and event.get("tool_call_part") == "input"]


def test_an_agent_reads_arguments_as_they_come_and_loses_a_call_that_is_void_or_cut(
    agents: dict[str, Any], base: str
) -> None:
    writing, cut = agents["writing"], agents["cut_call"]
    assert writing["args"] == arguments_in_log(base, writing["run"])
    (call,) = (call for message in writing["messages"] for call in message.get("toolCalls", ()))
    assert json.loads(call["function"]["arguments"]) == {"text": TEXT}
    assert writing["outcome"]["pendingToolCallIds"] == [call["id"]]
    assert cut["types"][-1] == "RUN_ERROR"
    assert "TOOL_CALL_ARGS" in cut["types"]
    assert not any(message.get("toolCalls") for message in cut["messages"])


def test_an_agent_gets_refusals_failures_and_cuts_as_errors(agents: dict[str, Any]) -> None:
    assert agents["refused"]["failed"]["status"] == 400
    assert "frobnicate" in agents["refused"]["failed"]["message"]
    assert agents["failed"]["failed"]["status"] == 400
    cut = agents["cut"]
    assert cut["types"][-1] == "RUN_ERROR"
    assert cut["text"]
    assert TEXT.startswith(cut["text"])
    assert agents["retried"]["text"] == TEXT


def test_an_agents_run_is_cancelled_by_its_id(agents: dict[str, Any]) -> None:
    assert agents["cancelled"]["status"] == 204
    assert agents["cancelled"]["outcome"] == {"type": "cancelled"}


def test_a_second_run_of_a_thread_waits_for_the_first_one_and_knows_its_answer(agents: dict[str, Any]) -> None:
    queued = agents["queued"]
    assert (queued["first"]["text"], queued["first"]["outcome"]) == (TEXT, {"type": "success"})
    assert (queued["second"]["text"], queued["second"]["outcome"]) == ("3", {"type": "success"})


def test_a_run_that_steers_goes_on_where_the_first_one_ends(agents: dict[str, Any], bus: LocalBus) -> None:
    first, second = agents["steered"]["first"], agents["steered"]["second"]
    assert (first["text"], first["outcome"]) == (LOOKS, {"type": "success"})
    assert (second["text"], second["outcome"]) == ("20 °C.", {"type": "success"})
    assert second["types"][0] == "RUN_STARTED"
    assert "TOOL_CALL_RESULT" in first["types"]


def test_an_agent_is_interrupted_and_resumes_with_other_arguments(agents: dict[str, Any]) -> None:
    asked, agent = agents["interrupted"]["asked"], agents["interrupted"]
    assert asked["outcome"]["type"] == "interrupt"
    (interrupt,) = asked["interrupts"]
    assert (interrupt["reason"], interrupt["toolCallId"]) == ("tool_call", asked["messages"][1]["toolCalls"][0]["id"])
    assert "editedArgs" in interrupt["responseSchema"]["properties"]
    assert agent["types"][:3] == ["RUN_STARTED", "STEP_STARTED", "TOOL_CALL_RESULT"]
    assert (agent["outcome"], agent["interrupts"]) == ({"type": "success"}, [])
    assert [message["role"] for message in agent["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert agent["messages"][2]["content"].startswith("Paid 400.")


def test_several_interrupts_are_denied_and_cancelled_at_once(agents: dict[str, Any]) -> None:
    agent = agents["denied"]
    assert len(agent["asked"]["interrupts"]) == 2
    results = [message["content"] for message in agent["messages"] if message["role"] == "tool"]
    denied = "the call was denied, and did not run"
    assert results == [f"{denied}: too dear", denied]
    assert agent["outcome"] == {"type": "success"}


def test_an_answer_to_an_interrupt_that_came_too_late_is_an_error_and_the_agent_joins(agents: dict[str, Any]) -> None:
    overtaken = agents["overtaken"]
    assert overtaken["late"]["failed"]["status"] == 409
    assert "was decided before: deny by bob" in overtaken["late"]["failed"]["message"]
    assert overtaken["text"] == "I pay.So: the call was denied, and did not run"


def test_the_function_of_the_page_approves(agents: dict[str, Any]) -> None:
    assert agents["approved"] == "I pay.So: Paid 500."


def test_the_same_resume_twice_is_one(agents: dict[str, Any]) -> None:
    assert agents["replayed"]["texts"] == [True, True]


def test_a_resume_of_nothing_of_this_thread_is_a_named_error(agents: dict[str, Any]) -> None:
    hostile = agents["hostile"]
    assert hostile["unknown"] == [[404, "wait_not_found"]] * 4
    assert hostile["invalid"] == [[400, "invalid_value"], [400, "invalid_value"], [400, "request_invalid"]]
    assert hostile["ignored"] == [409, "interrupts_open"]


def test_an_agents_own_tool_beside_one_of_the_bus_gives_its_result_to_the_run(agents: dict[str, Any]) -> None:
    agent = agents["in_place"]
    assert agent["asked"]["outcome"]["type"] == "interrupt"
    assert len(agent["called"]["outcome"]["pendingToolCallIds"]) == 1
    assert (agent["text"], agent["outcome"]) == ("Both are over.", {"type": "success"})
    assert agent["run"] == agent["asked"]["run"]


def test_an_agent_whose_messages_were_changed_has_its_thread_changed(agents: dict[str, Any]) -> None:
    assert agents["edited"] == {"twice": "13", "again": "1"}


def test_an_agent_joins_a_run_that_it_had_left(agents: dict[str, Any]) -> None:
    joined = agents["joined"]
    assert TEXT.startswith(joined["before"])
    assert (joined["text"], joined["unknown"]) == (TEXT, 404)
    assert [message["role"] for message in joined["late"]] == ["user", "reasoning", "assistant"]


def test_a_runs_log_is_a_durable_stream(bus: LocalBus, project: Path) -> None:
    with bus.sync_client() as client:
        published = client.publish(bus.request("paced"))
        read = output_of(project, "streams.mjs", bus.gateway, published.id)  # it begins while the run continues
        seqs = list(range(published.result().events))
    for way in ("poll", "sse"):
        assert [event["seq"] for event in read[way]] == seqs
    assert [event["seq"] for event in read["rest"]] == seqs[3:]
    assert [event["seq"] for event in read["once"]] == seqs[: len(read["once"])]
    assert read["poll"][-1]["type"] == "completed"
    status, headers = read["head"]
    assert (status, headers["cache-control"]) == (200, "no-store")
    status, headers, body = read["tail"]
    assert (status, body, headers["stream-closed"]) == (200, "[]", "true")
    assert headers["stream-next-offset"] == f"{len(seqs):016d}"
    assert [read[name] for name in ("wrong", "twice", "beyond", "needs", "written", "unknown")] == [400] * 4 + [
        405,
        404,
    ]


# --- Responses: OpenAI's client for Node ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def responses(base: str, project: Path) -> dict[str, Any]:
    """The events that clients of the Responses API received."""
    return output_of(project, "responses.mjs", base)


def test_openais_client_for_node_reads_and_resumes_a_response(responses: dict[str, Any]) -> None:
    assert responses["text"] == TEXT
    assert responses["raw"] == list(range(len(responses["raw"])))
    assert responses["same"]


def test_openais_client_for_node_runs_a_tool_and_sends_the_output_back(responses: dict[str, Any]) -> None:
    assert responses["call"] == {"name": "place", "arguments": "{}"}
    assert responses["answer"] == "So: here"


def test_openais_client_for_node_gets_an_error_for_every_bad_end(responses: dict[str, Any]) -> None:
    assert (responses["queued"], responses["cancelled"]) == ("queued", "cancelled")
    assert responses["cut"] == "failed"
    assert responses["refused"] == {"status": 400, "param": "max_tool_calls", "code": "unsupported_parameter"}
    assert responses["failing"]["status"] == 400


def test_the_page_of_durable_streams_prints_the_text(bus: LocalBus, project: Path) -> None:
    with bus.sync_client() as client:
        published = client.publish(bus.request("paced"))
        done = node.run("durable-streams.1.mjs", cwd=project, env={"GATEWAY": bus.gateway, "RUN": published.id})
    assert (done.returncode, done.stdout) == (0, TEXT), done.stderr


def test_the_page_of_durable_streams_writes_into_a_session_once(bus: LocalBus, project: Path) -> None:
    for _ in range(2):  # the second time it is the same append of the same producer
        done = node.run("durable-streams.2.mjs", cwd=project, env={"GATEWAY": bus.gateway})
        assert done.returncode == 0, done.stderr
    with bus.sync_client() as client:
        asked = [
            event.item
            for step in client.session("rain").follow(live=False)
            if isinstance(event := step.event, Appended)
        ]
    assert asked == [SessionMessage(content="Is it raining in Bonn?")]


@pytest.fixture(scope="module")
def use_chat(project: Path) -> dict[str, Any]:
    """What `useChat` of the page had on the screen."""
    return output_of(project, "react.mjs")


def test_use_chat_of_the_page_resumes_in_a_browsers_document(use_chat: dict[str, Any]) -> None:
    chats = use_chat
    assert chats["sent"] == {"status": "ready", "text": TEXT}
    assert TEXT.startswith(chats["left"])
    assert chats["resumed"] == {"status": "ready", "text": TEXT}
    assert chats["stopped"]["status"] == "ready"
    assert chats["stopped"]["text"] != TEXT


def test_use_chat_of_the_page_queues_and_steers_and_ends_no_answer(use_chat: dict[str, Any]) -> None:
    assert use_chat["queued"] == [["user", "Hello"], ["assistant", TEXT], ["user", "And now?"], ["assistant", "3"]]
    assert use_chat["steered"] == [
        ["user", "Hello"],
        ["assistant", LOOKS],
        ["user", "In Celsius."],
        ["assistant", "20 °C."],
    ]
    assert use_chat["elsewhere"] == {"here": TEXT, "back": "3"}


def test_a_chat_over_the_web_socket_transport_of_the_page_has_its_text(project: Path) -> None:
    assert output_of(project, "socket.mjs") == {"status": "ready", "text": TEXT}


def test_the_agent_of_the_page_prints_the_text(project: Path) -> None:
    done = node.run("ag-ui.1.mjs", cwd=project)
    assert (done.returncode, done.stdout) == (0, f"{TEXT}\n"), done.stderr
