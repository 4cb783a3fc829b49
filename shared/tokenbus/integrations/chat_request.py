"""Conversations in the form of OpenAI's Chat Completions, which voice frameworks write, as a bus request. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenbus.errors import RequestInvalid

Json = dict[str, Any]

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,(.*)", re.DOTALL)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def chat_request(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tool_choice: Any) -> Json:
    """Fields of a request. The framework runs the calls of its tools. Raises RequestInvalid."""
    fields: Json = {"messages": [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]}
    if tools:
        functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
        fields |= {"tools": [_tool(function) for function in functions], "max_tool_depth": 0}
        if tool_choice is not None:
            fields["tool_choice"] = _choice(tool_choice)
    return fields


def _message(message: Mapping[str, Any], where: str) -> Json:
    role = message["role"]
    if role == "tool":
        content = _content(message.get("content") or "", where)
        result = {"type": "tool_result", "tool_id": message["tool_call_id"], "content": content}
        return {"role": "tool", "content": [result]}
    if role not in _ROLES:
        raise RequestInvalid(f"{where}.role", f"unknown role {role!r}")
    content = _content(message.get("content") or "", where)
    if calls := message.get("tool_calls"):
        parts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        content = [*parts, *(_call(call) for call in calls)]
    return {"role": _ROLES[role], "content": content}


def _call(call: Mapping[str, Any]) -> Json:
    function = call["function"]
    return {
        "type": "tool_call",
        "tool_id": call["id"],
        "tool_name": function["name"],
        "arguments": function["arguments"],
    }


def _content(content: str | Sequence[Mapping[str, Any]], where: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]


def _part(part: Mapping[str, Any], where: str) -> Json:
    match part["type"]:
        case "text":
            return {"type": "text", "text": part["text"]}
        case "image_url":
            url: str = part["image_url"]["url"]
            if found := _DATA_URL.fullmatch(url):
                return {"type": "image", "source": {"type": "base64", "media_type": found[1], "data": found[2]}}
            return {"type": "image", "source": {"type": "url", "url": url}}
        case other:
            raise RequestInvalid(where, f"parts of type {other!r} are not supported")


def _tool(function: Mapping[str, Any]) -> Json:
    known = ("name", "description", "parameters", "strict")
    given = {name: function[name] for name in known if function.get(name) is not None}
    return {"parameters": {"type": "object"}, **given}  # a name alone would mean a tool of the deployment


def _choice(choice: Any) -> Any:
    if isinstance(choice, Mapping):
        named: Any = choice  # pyright: ignore[reportUnknownVariableType] (OpenAI's object)
        return {"name": named["function"]["name"]}
    return {"required": "any"}.get(choice, choice)
