"""Turns the chunks that a policy sent into a well-formed stream: calls renumbered, finish reason corrected."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from tokenbus.errors import Malformed
from tokenbus.policy.processor import Decision, NewText, NewToolCall


class OpenAIWriter:
    """See `tokenbus.policy.stream_format.Writer`. A chunk that needs no change is passed on as the same object."""

    def __init__(self) -> None:
        self._last: Any = None
        """The last input chunk: the template for new ones."""
        self._spoke = False
        """Whether a role was sent."""
        self._calls = 0
        self._indices: dict[int, tuple[int, str]] = {}
        """By input index of a call: its output index and its id."""
        self._finished = False

    def before_chunk(self, chunk: Any) -> None:
        if self._last is None or field(chunk, "choices"):
            self._last = chunk

    def defer(self) -> None:
        """Nothing to remember: the position does not matter in this format."""

    def resume_deferred(self, mark: object) -> None:
        """See `defer`."""

    def decided(self, decision: Decision) -> None:
        """See `defer`."""

    def write(self, sent: Any) -> Sequence[Any]:
        match sent:
            case NewText():
                return [self._new({"content": sent.text})] if sent.text else []
            case NewToolCall():
                function = {"name": sent.name, "arguments": sent.arguments}
                call = {"index": self._calls, "id": sent.id, "type": "function", "function": function}
                self._calls += 1
                return [self._new({"content": None, "tool_calls": [call]})]
            case _:
                return [self._mended(sent)]

    def terminate(self, decision: Decision) -> Sequence[Any]:
        if self._finished:
            return []
        self._finished = True
        return [self._new({}, finish="content_filter")]

    def _mended(self, sent: Any) -> Any:
        choices = field(sent, "choices")
        if not choices:
            return sent
        choice = choices[0]
        delta = field(choice, "delta")
        self._spoke = self._spoke or bool(field(delta, "role"))
        indices = [self._index(call) for call in calls_of(delta)]
        had = [field(call, "index") for call in calls_of(delta)]
        reason = field(choice, "finish_reason")
        right = self._reason(reason) if reason else reason
        self._finished = self._finished or bool(reason)
        empty = bool(indices) and field(delta, "content") == ""  # beside calls, an empty string is not content
        if indices == had and right == reason and not empty:
            return sent
        data = as_dict(sent)
        changed = data["choices"][0]
        changed["finish_reason"] = right
        if empty:
            changed["delta"]["content"] = None
        for call, index in zip(changed["delta"].get("tool_calls") or [], indices, strict=True):
            call["index"] = index
        return like(sent, data)

    def _index(self, call: Any) -> int:
        had = field(call, "index") or 0
        call_id = field(call, "id") or ""
        known = self._indices.get(had)
        if known and (not call_id or not known[1] or call_id == known[1]):
            self._indices[had] = known[0], known[1] or call_id
            return known[0]
        if not (call_id or field(field(call, "function"), "name") or field(field(call, "function"), "arguments")):
            return had
        self._indices[had] = self._calls, call_id
        self._calls += 1
        return self._calls - 1

    def _reason(self, reason: str) -> str:
        """Keep ``tool_calls`` only if there were calls, and ``stop`` only if there were none."""
        if reason == "tool_calls" and not self._calls:
            return "stop"
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _new(self, delta: dict[str, Any], finish: str | None = None) -> Any:
        data = as_dict(self._last)
        if not self._spoke:
            delta = {"role": "assistant", **delta}
            self._spoke = True
        data["choices"] = [{"index": 0, "delta": delta, "finish_reason": finish}]
        data.pop("usage", None)
        return like(self._last, data)


# Reads and changes OpenAI-style chunks in any form: mappings, or objects of the OpenAI SDK or LiteLLM.
#
# A chunk is never changed in place; changes return a new chunk of the same form.

CHUNK = "an OpenAI-style chunk"


def field(value: Any, name: str) -> Any:
    """Return a field of a mapping or an object; None if it is missing."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).get(name)
    return getattr(value, name, None)


def calls_of(delta: Any) -> list[Any]:
    """Return the tool-call fragments in a delta."""
    return list(cast("list[Any] | None", field(delta, "tool_calls")) or [])


def string(value: Any, name: str, where: str) -> str:
    """Return a string field; empty if missing. Raises Malformed for other types, so arguments are never built from
    objects.
    """
    found = field(value, name)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise Malformed(CHUNK, f"{where}: {name} is not a string")
    return found


def is_chunk(value: object) -> bool:
    """Whether this looks like a chunk: a mapping, or an SDK model."""
    return isinstance(value, Mapping) or hasattr(value, "model_dump")


def as_dict(chunk: Any) -> dict[str, Any]:
    """Return a copy of the chunk as plain data, to change and pass to `like`. Raises Malformed if it is not a chunk."""
    if isinstance(chunk, Mapping):
        return copy.deepcopy(dict(cast("Mapping[str, Any]", chunk)))
    if not is_chunk(chunk):
        raise Malformed(CHUNK, f"{type(chunk).__name__} is neither a mapping nor a model")
    return chunk.model_dump()


def like(template: Any, data: dict[str, Any]) -> Any:
    """Return a chunk in the template's form with the choices and usage of ``data``."""
    if isinstance(template, Mapping):
        return data
    chunk = template.model_copy()
    # Use the choice's own class: LiteLLM has several, and a newly made chunk may use another one.
    kind = cast("Any", type(template.choices[0]) if template.choices else _choice_class(template))
    chunk.choices = [kind(**choice) for choice in data["choices"]]
    if field(template, "usage") is not None and "usage" not in data:
        chunk.usage = None
    return chunk


def _choice_class(template: Any) -> Any:
    """The class of the choices of a chunk that has none, such as Azure's first chunk."""
    model = cast("Any", type(template))
    [kind] = get_args(model.model_fields["choices"].annotation)
    return kind
