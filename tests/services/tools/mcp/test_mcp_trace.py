"""MCP servers get the trace context of a call in its `_meta`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import mcp_types as types

from tokenbus.events.frames import GivenAnswer
from tokenbus_services.tools.mcp.server import McpServer
from tokenbus_services.tools.questions import Holding, Question

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_a_call_carries_its_trace_context_in_meta() -> None:
    sent: list[Any] = []

    async def send_request(request: Any, *rest: Any, **more: Any) -> types.CallToolResult:
        sent.append(request.model_dump(by_alias=True, exclude_none=True)["params"])
        return types.CallToolResult(content=[])

    server = McpServer("s", "", cast("Any", None), connect_timeout_s=1, listed=lambda: None)
    server._client = cast("Any", SimpleNamespace(session=SimpleNamespace(send_request=send_request)))

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        """Nothing."""

    async def ask(question: Question, number: int) -> GivenAnswer:
        raise AssertionError

    await server.call("t", "t", {"a": 1}, progress, holding=Holding(ask), traceparent=TRACEPARENT)
    await server.call("t", "t", {"a": 1}, progress, holding=Holding(ask))
    assert sent[0]["_meta"]["traceparent"] == TRACEPARENT
    assert "traceparent" not in sent[1].get("_meta", {})
