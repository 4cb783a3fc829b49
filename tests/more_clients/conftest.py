"""One bus with a gateway for all of these clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tokenbus.testing import LocalBus, Reply, ToolCall
from tokenbus_services.mock_provider import ModelRequest


def obliging(request: ModelRequest) -> Reply:
    """Answers as requested: with a call of each tool, or JSON of the schema."""
    body: Any = request.body
    form: Any = body.get("response_format") or body.get("text", {}).get("format") or {"type": "text"}
    answered = any(message.get("role") == "tool" for message in body.get("messages", ()))
    if (tools := body.get("tools")) and not answered:
        functions = [tool.get("function", tool) for tool in tools]
        return Reply(tool_calls=tuple(ToolCall(name=f["name"], arguments=_like(f["parameters"])) for f in functions))
    if form["type"] == "json_object":
        return Reply(text='{"ok": true}')
    if form["type"] == "json_schema":
        return Reply(text=json.dumps(_like(form.get("json_schema", form)["schema"])))
    return Reply(text="PONG. Each of these words is sent in a piece of its own, one after the other.")


def _like(schema: Any) -> Any:
    """The smallest value of a schema."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {name: _like(field) for name, field in schema.get("properties", {}).items()}
        case "array":
            return [_like(schema["items"])]
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
        case _:
            return "Bonn"


@pytest.fixture(scope="session")
def bus() -> Iterator[LocalBus]:
    pytest.importorskip("langchain_openai", reason="not the environment of these clients: make test-clients")
    with LocalBus('[gateway]\nmodels = ["openai-chat/obliging"]\n') as local:
        local.model_says("obliging", obliging)
        yield local


@pytest.fixture(scope="session")
def base(bus: LocalBus) -> str:
    return f"{bus.gateway}/v1"
