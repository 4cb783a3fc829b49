"""Responses of a run that waits for leave: each ends where the run waits, and the next is the rest of the run. Pure.

The API ends a response with the `mcp_approval_request`s that it asks, and goes on in another one. The parts of a run
follow from its log: a part ends before the first decision after a place at which the run only waited.
"""

from __future__ import annotations

import re

import msgspec

from tokenbus.events.public import BlockComplete, PublicEvent, Resumed, Waiting
from tokenbus_services.gateway.surfaces.openai_responses.items import Json
from tokenbus_services.gateway.surfaces.parking import Parking

PREFIX = "resp_"
SERVER = "tokenbus"
"""The label of the MCP server that stands for the deployment's tools."""
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
            case Waiting(what="approval"):
                self._new.add(event.wait)
            case Resumed():
                self._new.discard(event.wait)
            case _:
                pass
        first, waits = self.parking.first, self.parking.open
        self.asks = self.asks or (
            bool(self._new) and first is not None and all(each.what == "approval" for each in waits)
        )
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


class Given(msgspec.Struct, frozen=True):
    """What a client says to a request for leave."""

    at: str
    run: str
    wait: str
    approve: bool
    reason: str | None = None


def given_in(items: list[Json]) -> list[Given]:
    """The answers to requests for leave that end a request's input; empty if it ends with anything else."""
    found: list[Given] = []
    for n in reversed(range(len(items))):
        item = items[n]
        known = run_and_wait(item.get("approval_request_id"))
        if item.get("type") != "mcp_approval_response" or known is None or not isinstance(item.get("approve"), bool):
            break
        reason = item.get("reason")
        found.append(Given(f"input[{n}]", *known, item["approve"], reason if isinstance(reason, str) else None))
    return found[::-1]
