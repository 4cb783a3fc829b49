"""Policies on OpenAI-style chunks: of the OpenAI SDK, of LiteLLM, or plain mappings of the same shape.

Such a stream does not mark the end of a block. A block counts as complete when another one begins, or at the finish
reason. A fragment for a call that is already complete is an error, because it could no longer be judged. Anything that
is neither text nor a call (usage, roles, reasoning) is not a block and is passed on as it is. Only one choice per chunk
is supported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from tokenbus.errors import Malformed
from tokenbus.policy.openai.writer import CHUNK, OpenAIWriter, as_dict, calls_of, field, is_chunk, like, string
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
