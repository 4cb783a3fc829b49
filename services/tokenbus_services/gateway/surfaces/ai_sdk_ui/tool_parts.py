"""The tool calls and results of a run as parts of a UI message stream. Pure.

A call becomes available to the client only once its turn is settled, because the client may run it.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenbus.core.run.blocks.public_blocks import arguments_object
from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, ToolProgress
from tokenbus_services.gateway.surfaces.ai_sdk_ui import parts
from tokenbus_services.gateway.surfaces.ai_sdk_ui.parts import METADATA, VOID, Part
from tokenbus_services.gateway.surfaces.hosted import Step, output_value

_HOSTED: Part = {"dynamic": True, "providerExecuted": True}


class ToolParts:
    """Emits the parts of tool calls and of their results."""

    def __init__(self, emit: Callable[[Part], None], bus_tools: frozenset[str]) -> None:
        """``bus_tools``: tools that the bus runs."""
        self._emit = emit
        self._bus_tools = bus_tools
        self._calls: dict[int, BlockComplete] = {}
        """Complete calls of the turn, not sent as available yet."""
        self._begun_calls: dict[int, BlockStarted] = {}
        """Calls whose input is sent as it comes."""
        self._known_calls: set[str] = set()
        """Ids of the calls that the client knows."""

    def begin(self, event: BlockStarted) -> None:
        """Send this call's input as it comes."""
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
        """The turn is over: its calls run, and the client gets them."""
        for block in list(self._calls):
            self._call(self._calls.pop(block))

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
        # A client fails on an output without its call, which a policy may have removed.
        if event.tool_id not in self._known_calls:
            return
        if event.is_error:
            self._output(event.tool_id, event.tool_name, "error", {"errorText": event.content or ""})
        else:
            self._output(event.tool_id, event.tool_name, "available", {"output": event.content or ""})

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

    def _call(self, event: BlockComplete) -> None:
        tool_id, tool_name = event.tool_id or "", event.tool_name or ""
        if self._begun_calls.pop(event.block, None) is None:
            self._begin_call(tool_id, tool_name)
        self._known_calls.add(tool_id)
        call: Part = {"toolCallId": tool_id, "toolName": tool_name, **self._flags(tool_name)}
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
