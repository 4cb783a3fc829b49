"""Responses of a run that waits for its client: each ends there, and the next is the rest of the run. Pure.

The API ends a response with the `mcp_approval_request`s that it asks and the calls that its client runs, and goes on in
another one. The parts of a run follow from its log: a part ends before the first decision after a place at which the
run only waited.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tokenbus.events.public import BlockComplete, PublicEvent, Resumed, Waiting
from tokenbus.events.waits import WaitKind
from tokenbus_services.gateway.problem import unsupported
from tokenbus_services.gateway.surfaces.contract import GivenAnswer, wait_name
from tokenbus_services.gateway.surfaces.openai_responses.items import Json
from tokenbus_services.gateway.surfaces.owed_calls import OwedCall, named_call
from tokenbus_services.gateway.surfaces.parking import Parking

PREFIX = "resp_"
SERVER = "tokenbus"
"""The label of the MCP server that stands for the deployment's tools."""
KINDS: frozenset[WaitKind] = frozenset({"approval", "tool_result"})
"""What a client can decide with its next request."""
REQUEST, ANSWER = "openai-responses.mcp_approval_request", "openai-responses.mcp_approval_response"
_ASKED = re.compile(r"mcpr_(.+)_([0-9]{1,9}\.[0-9]{1,6})")


def response_id(run: str, part: int) -> str:
    """The id of a response: a run's id has no comma."""
    return f"{PREFIX}{run},{part}" if part else PREFIX + run


def run_and_part(name: str) -> tuple[str, int]:
    """The run of a response, and its part."""
    run, comma, part = name.removeprefix(PREFIX).rpartition(",")
    if comma and part.isascii() and part.isdigit() and len(part) <= 9:
        return run, int(part)
    return name.removeprefix(PREFIX), 0


def approval_id(run: str, wait: str) -> str:
    """The id under which a client is asked for leave."""
    return f"mcpr_{run}_{wait}"


def run_and_wait(name: object) -> tuple[str, str] | None:
    """What an `approval_id` names; None for any other id."""
    found = _ASKED.fullmatch(name) if isinstance(name, str) else None
    return (found[1], found[2]) if found else None


class Parts:
    """Which part of a run an event belongs to. Feed it the run's events from seq 0."""

    def __init__(self) -> None:
        self.number = 0
        self.asks = False
        """The part ends here, unless the run has waits that are not in the log yet."""
        self.parking = Parking()
        self._new: set[str] = set()
        """Open waits that this part has asked for."""

    def feed(self, event: PublicEvent) -> int:
        """Return the part of this event."""
        if self.asks and isinstance(event, Resumed):
            self.number += 1
            self.asks = False
            self._new.clear()
        self.parking.feed(event)
        match event:
            case Waiting() if event.what in KINDS:
                self._new.add(event.wait)
            case Resumed():
                self._new.discard(event.wait)
            case _:
                pass
        first, waits = self.parking.first, self.parking.open
        self.asks = self.asks or (bool(self._new) and first is not None and all(each.what in KINDS for each in waits))
        return self.number


class Asked:
    """The items about leave: the requests, and the calls of the deployment's tools that were allowed."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._hosted: dict[str, BlockComplete] = {}
        """Requests of the provider, until the run waits for their answers."""
        self._waits: dict[str, Waiting] = {}
        """Of the deployment's tools, by the call's id."""
        self._allowed: dict[str, Json] = {}
        """What is known of a call that was allowed."""
        self._owed: dict[str, OwedCall] = {}
        """Calls that the client runs, by the model's id."""

    def hold(self, block: BlockComplete) -> None:
        """A request of the provider."""
        self._hosted[block.tool_id or ""] = block

    def not_asked(self) -> list[BlockComplete]:
        """Requests for which the run does not wait, because it ended: the client answers with its next request."""
        held, self._hosted = [*self._hosted.values()], {}
        return held

    def ask(self, event: Waiting) -> Json:
        """The item that asks the client."""
        name = approval_id(self._run, event.wait)
        about: Json = {"id": name, "type": "mcp_approval_request", "name": event.tool_name}
        if (block := self._hosted.pop(event.tool_id, None)) is None:
            self._waits[event.tool_id] = event
            return {**about, "server_label": SERVER, "arguments": event.arguments or ""}
        label = (event.text or "").removeprefix("MCP server: ")
        carried = {"items": [{"item": block.item, "json": block.content}]}
        return {**about, "server_label": label, "arguments": event.arguments or "", "tokenbus": carried}

    def decided(self, event: Resumed) -> Json:
        """The client's answer, for a conversation that keeps it."""
        name = approval_id(self._run, event.wait)
        if (waiting := self._waits.pop(event.tool_id, None)) and event.decision == "allow":
            arguments = event.arguments if event.arguments is not None else waiting.arguments
            self._allowed[event.tool_id] = {
                "name": event.tool_name,
                "arguments": arguments or "",
                "approval_request_id": name,
            }
        answer: Json = {"id": f"{name}_answer", "type": "mcp_approval_response", "approval_request_id": name}
        answer["approve"] = event.decision == "allow"
        return {**answer, "reason": event.reason} if event.reason else answer

    def owe(self, event: Waiting, call: OwedCall) -> None:
        """The client runs this call."""
        self._owed[event.tool_id] = call

    def output(self, block: BlockComplete) -> Json | None:
        """The result that the client gave, for a conversation that keeps it; None for that of any other call."""
        call = self._owed.pop(block.tool_id or "", None)
        if call is None:
            return None
        kind = "custom_tool_call_output" if call.free_text else "function_call_output"
        item: Json = {"id": f"fco_{self._run}_{block.block}", "type": kind, "call_id": call.id}
        return {**item, "output": block.content or "", "status": "completed"}

    def called(self, block: BlockComplete) -> Json | None:
        """The call that was allowed, with its result; None for the result of any other."""
        known = self._allowed.pop(block.tool_id or "", None)
        if known is None:
            return None
        item: Json = {"id": f"mcp_{self._run}_{block.block}", "type": "mcp_call", "server_label": SERVER, **known}
        if block.is_error:
            error = {"type": "mcp_tool_execution_error", "content": block.content or ""}
            return {**item, "status": "failed", "output": None, "error": error}
        return {**item, "status": "completed", "output": block.content or "", "error": None}


def of_bus(item: Json) -> bool:
    """Whether an item of a request is about leave for a tool of the deployment, or the call that got it."""
    match item.get("type"):
        case "mcp_approval_request":
            return run_and_wait(item.get("id")) is not None
        case "mcp_approval_response":
            return run_and_wait(item.get("approval_request_id")) is not None
        case "mcp_call":
            return item.get("server_label") == SERVER and run_and_wait(item.get("approval_request_id")) is not None
        case _:
            return False


_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_ASKS = ("mcp_approval_request", "function_call", "custom_tool_call", "item_reference")
"""Items after which a client answers."""


def given_in(items: list[Json]) -> list[GivenAnswer]:
    """What a request's input answers at its end: requests for leave, and calls that a run waits for; empty if it ends
    with anything else. Raises Refusal.

    Items that ask may stand between them; what was answered in an earlier response is among them then.
    """
    found: list[GivenAnswer] = []
    for n in reversed(range(len(items))):
        given = _given(items[n], f"input[{n}]")
        if given:
            found.append(given)
        elif not found or items[n].get("type") not in _ASKS:
            break
    return found[::-1]


def says_more(items: list[Json]) -> bool:
    """Whether the input ends with answers and with something else that is new."""
    head = [item for n, item in enumerate(items) if not _given(item, f"input[{n}]")]
    return bool(head) and head[-1].get("type") not in _ASKS


def _given(item: Json, at: str) -> GivenAnswer | None:
    if item.get("type") == "mcp_approval_response":
        known, approve, reason = run_and_wait(item.get("approval_request_id")), item.get("approve"), item.get("reason")
        if known is None or not isinstance(approve, bool):
            return None
        reason = reason if isinstance(reason, str) else None
        return GivenAnswer(at=f"{at}.approval_request_id", name=wait_name(*known), approved=approve, reason=reason)
    named = named_call(item.get("call_id")) if item.get("type") in _OUTPUTS else None
    if named is None:
        return None
    return GivenAnswer(at=f"{at}.call_id", name=wait_name(*named), content=_text(item.get("output"), f"{at}.output"))


def _text(output: Any, at: str) -> str:
    if isinstance(output, str):
        return output
    try:
        return "".join(part.text for part in msgspec.convert(output, list[_Text]))
    except msgspec.ValidationError:
        raise unsupported(at, "the result of a call for which a run waits is text") from None


class _Text(msgspec.Struct):
    text: str
