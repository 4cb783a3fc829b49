"""What becomes of a steer whose response ends before the steer reaches its run."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from tests.services.gateway.logs import DONE, Log, log_of
from tests.unit.core.run.script import RUN, call, text
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus_services.gateway.response_parts import Rest
from tokenbus_services.gateway.routes.sockets.response_socket import OpenResponse, ResponseSocket, Steer
from tokenbus_services.gateway.surfaces.contract import GatewayNote
from tokenbus_services.gateway.surfaces.openai_responses.response_log import ResponseFrames

PARENT = f"resp_{RUN}"
REFUSED = ErrorInfo(code="bad", kind="invalid_request", message="no", retryable=False)
BODY = {"model": "m", "input": "hello", "instructions": "Be brief.", "stream": True}


class Socket:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    async def send_text(self, data: str) -> None:
        self.sent.append(json.loads(data))


async def ended(log: Log) -> tuple[ResponseSocket, OpenResponse, list[dict[str, Any]]]:
    """A response that ended after two steers of it were accepted."""
    note = GatewayNote(surface="openai_responses", version=1, created=0, model="m")
    socket, encoder = Socket(), ResponseFrames(note, RUN)
    for event in log:
        encoder.feed(event)
    gateway = SimpleNamespace(settings=SimpleNamespace(send_timeout_s=9.0, body_bytes=9999))
    served = ResponseSocket(cast("Any", gateway), cast("Any", None), cast("Any", None), cast("Any", socket))
    response = OpenResponse(Rest(RUN, 0), BODY, encoder)
    response.steers.append(Steer("steer_1", PARENT, "in Celsius"))
    response.steers.append(Steer("steer_2", PARENT, [{"role": "user", "content": "now"}]))
    await served._over(response)  # pyright: ignore[reportPrivateUsage]
    return served, response, socket.sent


async def test_a_response_that_completes_is_continued_with_all_that_was_said() -> None:
    _, response, sent = await ended(log_of([*text(0, "one"), DONE]))
    assert sent == []
    said = [{"role": "user", "content": "in Celsius"}, {"role": "user", "content": "now"}]
    assert json.loads(response.successor()) == {
        **BODY,
        "type": "response.create",
        "input": said,
        "previous_response_id": PARENT,
    }


async def test_a_response_that_waits_for_its_calls_keeps_what_was_said_until_the_client_answers() -> None:
    log = log_of([*call(0, "call_1", "weather", "{}"), n.Done("tool_use", "tool_use")], max_tool_depth=0)
    served, response, sent = await ended(log)
    assert [frame["steer"]["id"] for frame in sent] == ["steer_1", "steer_2"]
    owed = {"type": "function_call_output", "call_id": "call_1", "name": "weather"}
    assert {frame["type"] for frame in sent} == {"response.steer.pending"}
    assert all(frame["required_input"] == [owed] for frame in sent)
    assert not response.steers
    output = {"type": "function_call_output", "call_id": "call_1", "output": "20"}
    frame = {"type": "response.create", "model": "m", "previous_response_id": PARENT, "input": [output]}
    body = served._body(json.dumps(frame).encode())  # pyright: ignore[reportPrivateUsage]
    assert [item.get("content", item.get("output")) for item in body["input"]] == ["in Celsius", "now", "20"]


async def test_a_response_that_fails_gives_everything_back() -> None:
    _, response, sent = await ended(log_of([n.Failed(REFUSED)]))
    assert [frame["error"]["code"] for frame in sent] == ["successor_creation_failed"] * 2
    assert [frame["steer"]["input"] for frame in sent] == ["in Celsius", [{"role": "user", "content": "now"}]]
    assert not response.steers
