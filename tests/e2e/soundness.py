"""What provider APIs ask of a conversation beyond its types, as their documents and their errors say. Each function
raises AssertionError for a body that its API would refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

Json = Mapping[str, Any]
_IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif")


def anthropic(body: Json) -> None:
    """Roles alternate, the user first; calls are answered at once, all in the next message, before anything else; ids
    are used once; thinking is signed, and never last."""
    messages: Sequence[Json] = body["messages"]
    assert [m["role"] for m in messages[::2]] == ["user"] * len(messages[::2])
    assert [m["role"] for m in messages[1::2]] == ["assistant"] * len(messages[1::2])
    used: list[str] = []
    for message, answer in pairwise([*messages, {"content": []}]):
        blocks = message["content"]
        assert blocks
        calls = [b["id"] for b in blocks if b["type"] == "tool_use"]
        used += calls
        results = [b["type"] == "tool_result" for b in answer["content"]]
        assert calls == [b["tool_use_id"] for b in answer["content"] if b["type"] == "tool_result"]
        assert results == sorted(results, reverse=True), "results stand before all else"
        for block in blocks:
            match block["type"]:
                case "text":
                    assert block["text"].strip()
                case "thinking":
                    assert message["role"] == "assistant"
                    assert block["signature"]
                case "image":
                    assert message["role"] == "user"
                    assert block["source"]["media_type"] in _IMAGES
                case _:
                    pass
        if message["role"] == "assistant":
            assert blocks[-1]["type"] not in ("thinking", "redacted_thinking")
    assert len(set(used)) == len(used)
    if body.get("thinking", {}).get("type") == "enabled" and messages[-1]["content"][0]["type"] == "tool_result":
        assert messages[-2]["content"][0]["type"] in ("thinking", "redacted_thinking")


def openai_chat(body: Json) -> None:
    """Each call is answered right after its message, once; only the user shows images; nothing is empty."""
    waiting: list[str] = []
    for message in body["messages"]:
        if message["role"] == "tool":
            assert isinstance(message["content"], str)
            waiting.remove(message["tool_call_id"])
            continue
        assert not waiting, "a call was not answered"
        waiting = [call["id"] for call in message.get("tool_calls", ())]
        assert len(set(waiting)) == len(waiting)
        assert message["content"] or waiting
        if message["role"] == "assistant":
            assert isinstance(message["content"], str | None)
    assert not waiting


def openai_responses(body: Json) -> None:
    """Each call has one output, after it; a reasoning is encrypted, and an item of the model's follows it."""
    answered: dict[str, bool] = {}
    for item, after in pairwise([*body["input"], {}]):
        match item.get("type", "message"):
            case "function_call":
                assert item["call_id"] not in answered
                answered[item["call_id"]] = False
            case "function_call_output":
                assert answered[item["call_id"]] is False
                answered[item["call_id"]] = True
            case "reasoning":
                assert item["encrypted_content"]
                models = after.get("type") == "reasoning" or str(after.get("type")).endswith("_call")
                assert models or after.get("role") == "assistant"
            case _:
                pass
    assert all(answered.values())


def gemini(body: Json) -> None:
    """Roles alternate, the user first; a turn of calls is followed by their results, by name and in order; the first
    call of a turn has a signature."""
    contents: Sequence[Json] = body["contents"]
    assert [c["role"] for c in contents[::2]] == ["user"] * len(contents[::2])
    assert [c["role"] for c in contents[1::2]] == ["model"] * len(contents[1::2])
    for content, answer in pairwise([*contents, {"parts": []}]):
        assert content["parts"]
        calls = [part for part in content["parts"] if "functionCall" in part]
        results = [p["functionResponse"]["name"] for p in answer["parts"] if "functionResponse" in p]
        assert [part["functionCall"]["name"] for part in calls] == results
        if calls:
            assert calls[0]["thoughtSignature"]


def gemini_interactions(body: Json) -> None:
    """Each call has one result, after it and before anything else is said; a thought is signed; the model's own steps
    are not the last."""
    waiting: list[str] = []
    for step in body["input"]:
        match step["type"]:
            case "function_call":
                waiting.append(step["id"])
            case "function_result":
                waiting.remove(step["call_id"])
            case kind:
                assert not waiting, "a call was not answered"
                assert kind != "thought" or step["signature"]
                assert kind not in ("user_input", "model_output") or step["content"]
    assert not waiting
    assert body["input"][-1]["type"] in ("user_input", "function_result")


SOUND: dict[str, Callable[[Json], None]] = {
    "anthropic": anthropic,
    "openai-chat": openai_chat,
    "openai-responses": openai_responses,
    "gemini": gemini,
    "gemini-interactions": gemini_interactions,
}
"""By the API's name."""
