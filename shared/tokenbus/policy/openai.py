"""Policies on OpenAI-style chunks: of the OpenAI SDK, of LiteLLM, or plain mappings of the same shape.

Such a stream does not mark the end of a block. A block counts as complete when another one begins, or at the finish
reason. A fragment for a call that is already complete is an error, because it could no longer be judged. Anything that
is neither text nor a call (usage, roles, reasoning) is not a block and is passed on as it is. Only one choice per chunk
is supported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_args

import msgspec

from tokenbus.errors import Malformed
from tokenbus.policy.processor import Decision, NewText, NewToolCall
from tokenbus.policy.stream_format import BlockBegan, BlockEnded, BlockGrew, CallNamed, Change, Piece, StreamFinished


class OpenAIChunks:
    """The Chat Completions stream format. See `tokenbus.policy.stream_format.StreamFormat`."""

    @property
    def words(self) -> OpenAIChunkAccess:
        return OpenAIChunkAccess()

    def reader(self) -> OpenAIReader:
        return OpenAIReader()

    def writer(self) -> OpenAIWriter:
        return OpenAIWriter()


class OpenAIChunkAccess:
    """See `tokenbus.policy.processor.ChunkAccess`."""

    def text(self, chunk: Any) -> str:
        delta = field(_choice(chunk), "delta")
        if content := field(delta, "content"):
            return content
        return "".join(field(field(call, "function"), "arguments") or "" for call in calls_of(delta))

    def with_text(self, chunk: Any, text: str) -> Any:
        data = as_dict(chunk)
        delta = field(_choice(data), "delta")
        if field(delta, "content"):
            delta["content"] = text
            return like(chunk, data)
        for call in calls_of(delta):
            if field(field(call, "function"), "arguments"):
                call["function"]["arguments"], text = text, ""
        return like(chunk, data)

    def with_data(self, chunk: Any, rewrite: Callable[[str], str]) -> Any:
        return chunk

    def key(self, chunk: Any) -> int:
        return id(chunk)

    def is_chunk(self, sent: object) -> bool:
        return is_chunk(sent)

    def is_end(self, chunk: Any) -> bool:
        return bool(field(_choice(chunk), "finish_reason"))

    def is_metadata(self, chunk: Any) -> bool:
        delta = field(_choice(chunk), "delta")
        return not (field(delta, "content") or calls_of(delta))


class _Step(msgspec.Struct):
    """The changes caused by one field of a chunk."""

    part: str
    """The field: ``content``, ``finish`` or the position of a call's delta in the list."""
    number: int | None
    """The block it belongs to."""
    changes: list[Change]


class OpenAIReader:
    """See `tokenbus.policy.stream_format.Reader`."""

    def __init__(self) -> None:
        self._numbers = 0
        self._current: BlockBegan | None = None
        """The block being written."""
        self._over: set[int] = set()
        """Indices of complete calls."""
        self._finished = False

    def read(self, chunk: Any) -> Sequence[Piece[Any]]:
        choice = _choice(chunk)
        steps = self._steps(choice)
        self._finished = self._finished or any(step.part == "finish" for step in steps)
        parts: list[list[_Step]] = []
        for step in steps:
            if parts and step.number is not None and step.number == parts[-1][-1].number:
                parts[-1].append(step)
            else:
                parts.append([step])
        if len(parts) < 2:
            block = steps[0].number if steps else None
            return [Piece(chunk, [change for step in steps for change in step.changes], block, self._finished)]
        return [
            Piece(
                _part(chunk, [step.part for step in part], first=part is parts[0], last=part is parts[-1]),
                [change for step in part for change in step.changes],
                part[0].number,
                any(step.part == "finish" for step in part),
            )
            for part in parts
        ]

    def _steps(self, choice: Any) -> list[_Step]:
        delta = field(choice, "delta")
        steps: list[_Step] = []
        if content := string(delta, "content", "delta"):
            steps.append(self._text(content))
        for place, call in enumerate(calls_of(delta)):
            if step := self._call(place, call):
                steps.append(step)
        if reason := string(choice, "finish_reason", "choice"):
            steps.append(_Step("finish", None, [*self._end(), StreamFinished(reason)]))
        return steps

    def _text(self, content: str) -> _Step:
        changes: list[Change] = []
        if self._current is None or self._current.kind != "text":
            changes += self._begin(BlockBegan(self._numbers, "text"))
        number = self._numbers - 1
        return _Step("content", number, [*changes, BlockGrew(number, content)])

    def _call(self, place: int, call: Any) -> _Step | None:
        where = f"tool_calls[{place}]"
        function = field(call, "function")
        call_id = string(call, "id", where)
        name, arguments = string(function, "name", where), string(function, "arguments", where)
        if not (call_id or name or arguments):
            return None
        current = self._current if self._current and self._current.kind == "tool_call" else None
        index = field(call, "index")
        if index is None:
            index = current.index if current and call_id in ("", current.id) else len(self._over) + bool(current)
        changes: list[Change] = []
        if current and current.index == index and (not call_id or not current.id or call_id == current.id):
            changes += self._named(current, call_id, name, where)
        elif index in self._over and not call_id:
            raise Malformed(CHUNK, f"{where}: more of call {index}, which another block had ended")
        else:
            changes += self._begin(BlockBegan(self._numbers, "tool_call", call_id, name, index))
        number = self._numbers - 1
        if arguments:
            changes.append(BlockGrew(number, arguments))
        return _Step(str(place), number, changes)

    def _named(self, current: BlockBegan, call_id: str, name: str, where: str) -> list[Change]:
        if name and current.name and name != current.name:
            raise Malformed(CHUNK, f"{where}: a call of {current.name!r} that becomes one of {name!r}")
        known = msgspec.structs.replace(current, id=current.id or call_id, name=current.name or name)
        if known == current:
            return []
        self._current = known
        return [CallNamed(known.number, known.id, known.name)]

    def _begin(self, block: BlockBegan) -> list[Change]:
        ended = self._end()
        self._current = block
        self._numbers += 1
        return [*ended, block]

    def _end(self) -> list[Change]:
        current, self._current = self._current, None
        if current is None:
            return []
        if current.kind == "tool_call":
            self._over.add(current.index)
        return [BlockEnded(current.number)]


def _choice(chunk: Any) -> Any:
    choices = field(chunk, "choices")
    if not choices:
        return None
    if len(choices) > 1 or field(choices[0], "index"):
        raise Malformed(CHUNK, "choices: policies judge only one choice; request n = 1")
    return choices[0]


def _part(chunk: Any, names: list[str], *, first: bool, last: bool) -> Any:
    """Return a chunk with only these fields. Other content goes with the first part, usage with the last."""
    data = as_dict(chunk)
    choice = data["choices"][0]
    delta: dict[str, Any] = choice["delta"]
    calls = cast("list[Any]", delta.pop("tool_calls", None) or [])
    content = delta.pop("content", None)
    if not first:
        delta.clear()
    delta["content"] = content if "content" in names else None
    if kept := [call for place, call in enumerate(calls) if str(place) in names]:
        delta["tool_calls"] = kept
    if "finish" not in names:
        choice["finish_reason"] = None
    if not last:
        data.pop("usage", None)
    return like(chunk, data)


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
