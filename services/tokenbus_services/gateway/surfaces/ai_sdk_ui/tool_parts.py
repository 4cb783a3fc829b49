"""The tool calls and results of a run as parts of a UI message stream. Pure.

A call becomes available to the client only once its turn is settled, because the client may run it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tokenbus.core.run.blocks.public_blocks import arguments_object
from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, Resumed, ToolProgress
from tokenbus_services.gateway.surfaces.ai_sdk_ui import parts
from tokenbus_services.gateway.surfaces.ai_sdk_ui.parts import METADATA, VOID, Part
from tokenbus_services.gateway.surfaces.hosted import Step, output_value

_HOSTED: Part = {"dynamic": True, "providerExecuted": True}


class ToolParts:
    """Emits the parts of tool calls and of their results."""

    def __init__(self, emit: Callable[[Part], None], bus_tools: frozenset[str], client_tools: frozenset[str]) -> None:
        """``bus_tools``: tools that the bus runs. ``client_tools``: those whose calls wait for the page."""
        self._emit = emit
        self._bus_tools = bus_tools
        self._client_tools = client_tools
        self._calls: dict[int, BlockComplete] = {}
        """Complete calls of the turn, not sent as available yet."""
        self._begun_calls: dict[int, BlockStarted] = {}
        """Calls whose input is sent as it comes."""
        self._known_calls: set[str] = set()
        """Ids of the calls that the client knows."""
        self._asked: dict[str, BlockComplete] = {}
        """Calls of the page's tools that somebody must allow first, by id."""
        self._approvals: set[str] = set()
        """Calls for which somebody is asked."""
        self._due: list[str] = []
        """Calls whose results the run waits for; the page does not know that yet."""
        self._denied: set[str] = set()

    def begin(self, event: BlockStarted) -> None:
        """Send this call's input as it comes. One whose result the run waits for is shown when the page may run it: the
        page does not send its approvals before it has that result.
        """
        if event.tool_name in self._client_tools:
            return
        self._begun_calls[event.block] = event
        self._begin_call(event.tool_id or "", event.tool_name or "")

    def add_input(self, event: Chunk) -> None:
        """A piece of a call's input; sent if the call was begun."""
        if begun := self._begun_calls.get(event.block):
            tool_id = begun.tool_id or ""
            self._emit({"type": "tool-input-delta", "toolCallId": tool_id, "inputTextDelta": event.text})

    def complete(self, event: BlockComplete) -> None:
        """A complete call, which waits until its turn is settled."""
        self._calls[event.block] = event

    def settle(self) -> None:
        """The turn is over: its calls run, and the client gets them. Those of the page's own are its to run once they
        wait for that.
        """
        for block in [n for n, call in self._calls.items() if call.tool_name not in self._client_tools]:
            self._call(self._calls.pop(block))

    def ask_result(self, tool_id: str) -> None:
        """A call waits for the page."""
        self._due.append(tool_id)

    def hand_over(self) -> None:
        """The answer ends because the run waits: the page may run its calls, unless it is asked for approvals. It sends
        its results at once if it has all, again and again while an approval keeps the run where it is.
        """
        while self._due and not self._approvals:
            tool_id = self._due.pop(0)
            if allowed := self._asked.pop(tool_id, None):
                self._call(allowed, providerExecuted=False)
            else:
                self._show(tool_id)

    def ask_approval(self, tool_id: str, approval: str) -> None:
        """A call waits for somebody who allows it."""
        block = next((n for n, call in self._calls.items() if call.tool_id == tool_id), None)
        if block is not None:  # the page's own: it must not run yet
            self._asked[tool_id] = self._calls.pop(block)
            self._call(self._asked[tool_id], providerExecuted=True)
        if tool_id in self._known_calls:
            self._approvals.add(tool_id)
            self._emit({"type": "tool-approval-request", "approvalId": approval, "toolCallId": tool_id})

    def decided(self, event: Resumed, *, tells: bool) -> None:
        """Somebody allowed the call, or did not. ``tells``: the client knows denials."""
        self._approvals.discard(event.tool_id)
        if event.tool_id not in self._known_calls:
            return
        if event.decision == "deny" and tells:
            self._denied.add(event.tool_id)
            self._emit({"type": "tool-output-denied", "toolCallId": event.tool_id})
        elif event.arguments is not None and event.tool_id not in self._asked:
            call: Part = {"toolCallId": event.tool_id, "toolName": event.tool_name, **self._flags(event.tool_name)}
            self._emit({"type": "tool-input-available", **call, "input": msgspec.json.decode(event.arguments)})

    def _show(self, tool_id: str, **more: object) -> None:
        """Make a call available that was not shown yet."""
        for block in [n for n, call in self._calls.items() if call.tool_id == tool_id]:
            self._call(self._calls.pop(block), **more)

    def drop_from(self, first: int) -> None:
        """A retry voids blocks from this one on: their calls do not become available."""
        self._calls = {n: call for n, call in self._calls.items() if n < first}

    def forget_begun(self) -> None:
        """The client has dropped the step, and with it the calls that were begun."""
        self._begun_calls.clear()

    def void_from(self, first: int) -> bool:
        """End the calls that were begun from a block on, as void; whether there was one."""
        begun = [n for n in self._begun_calls if n >= first]
        for block in begun:
            call = self._begun_calls.pop(block)
            name = call.tool_name or ""
            self._emit(
                {
                    "type": "tool-input-error",
                    "toolCallId": call.tool_id or "",
                    "toolName": name,
                    "input": "",
                    "errorText": "The answer was cut here; the call did not run.",
                    **self._flags(name),
                    **VOID,
                }
            )
        return bool(begun)

    def progress(self, event: ToolProgress) -> None:
        """A call's progress, as a preliminary output."""
        if event.tool_id not in self._known_calls:
            return
        given = {"progress": event.progress, "total": event.total, "message": event.message}
        output = {name: value for name, value in given.items() if value is not None}
        self._output(event.tool_id, event.tool_name, "available", {"output": output, "preliminary": True})

    def result(self, event: BlockComplete) -> None:
        self._show(event.tool_id or "", providerExecuted=True)  # a page has nothing to run
        # A client fails on an output without its call, which a policy may have removed.
        if event.tool_id not in self._known_calls or event.tool_id in self._denied:
            return
        if event.is_error:
            self._output(event.tool_id, event.tool_name, "error", {"errorText": event.content or ""})
        else:
            output = _object_of(event.content or "") if event.tool_name in self._client_tools else event.content or ""
            self._output(event.tool_id, event.tool_name, "available", {"output": output})

    def hosted(self, step: Step) -> None:
        """What the provider did itself: a call that the client does not run, or its output."""
        call: Part = {"toolCallId": step.id, "toolName": step.name}
        if step.called is not None:
            self._known_calls.add(step.id)
            given = {"input": step.called, "providerMetadata": {METADATA: {"shown": True}}}
            self._emit({"type": "tool-input-available", **call, **_HOSTED, **given})
        if step.output and step.id in self._known_calls:
            how: Part = {"type": "tool-output-available", "output": output_value(step.output)}
            if step.output.failed:
                how = {"type": "tool-output-error", "errorText": step.output.errors or step.output.text or "failed"}
            self._emit({**how, "toolCallId": step.id, **_HOSTED})

    def _call(self, event: BlockComplete, **more: object) -> None:
        tool_id, tool_name = event.tool_id or "", event.tool_name or ""
        if self._begun_calls.pop(event.block, None) is None and tool_id not in self._known_calls:
            self._begin_call(tool_id, tool_name)
        self._known_calls.add(tool_id)
        call: Part = {"toolCallId": tool_id, "toolName": tool_name, **self._flags(tool_name), **more}
        metadata = parts.provider_metadata(event)
        if event.input_error is not None:
            error = {"input": event.arguments, "errorText": event.input_error}
            self._emit({"type": "tool-input-error", **call, **error, **metadata})
        else:
            self._emit({"type": "tool-input-available", **call, "input": arguments_object(event), **metadata})

    def _begin_call(self, tool_id: str, tool_name: str) -> None:
        flags = self._flags(tool_name)
        self._emit({"type": "tool-input-start", "toolCallId": tool_id, "toolName": tool_name, **flags})

    def _flags(self, tool_name: str) -> Part:
        # Without them, the client would run the bus's tool too.
        return {"dynamic": True, "providerExecuted": True} if tool_name in self._bus_tools else {}

    def _output(self, tool_id: str, tool_name: str | None, how: str, values: Part) -> None:
        self._emit({"type": f"tool-output-{how}", "toolCallId": tool_id, **self._flags(tool_name or ""), **values})


def _object_of(text: str) -> object:
    """What a page returned: an object or a list, which the bus has as JSON, or a text."""
    if not text.startswith(("{", "[")):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
