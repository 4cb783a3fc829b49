"""Policies on the public events of one run: `PublicEvents`, the stream format, and its reader.

The bus marks where blocks begin and end, so nothing is inferred here. The writer (`public.writer`) assigns new, gapless
sequence numbers to its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from tokenbus.core.run.blocks.block_table import VISIBLE
from tokenbus.events.public import (
    TERMINAL,
    BlockComplete,
    BlockProgress,
    BlockStarted,
    Chunk,
    Event,
    ImagePreview,
    ImageRef,
    PublicEvent,
    Restarted,
    Retrying,
    RunEnd,
)
from tokenbus.events.run_messages import is_json
from tokenbus.policy.public.writer import PublicWriter
from tokenbus.policy.stream_format import BlockBegan, BlockEnded, BlockGrew, BlocksVoided, Change, Piece, StreamFinished

OfBlock = BlockStarted | Chunk | ImagePreview | BlockProgress | BlockComplete
"""Events that are part of a block."""


class PublicEvents:
    """The stream format of the bus. See `tokenbus.policy.stream_format.StreamFormat`."""

    def __init__(self, elapsed_ms: Callable[[], int]) -> None:
        """``elapsed_ms``: milliseconds since the run began, for the terminal event of a stream that a policy
        terminates.
        """
        self._elapsed_ms = elapsed_ms

    @property
    def words(self) -> PublicChunkAccess:
        return PublicChunkAccess()

    def reader(self) -> PublicReader:
        return PublicReader()

    def writer(self) -> PublicWriter:
        return PublicWriter(self._elapsed_ms)


class PublicChunkAccess:
    """See `tokenbus.policy.processor.ChunkAccess`."""

    def text(self, chunk: PublicEvent) -> str:
        return chunk.text if isinstance(chunk, Chunk) and chunk.tool_call_part in (None, "input") else ""

    def with_text(self, chunk: PublicEvent, text: str) -> PublicEvent:
        if isinstance(chunk, Chunk) and chunk.tool_call_part in (None, "input"):
            return msgspec.structs.replace(chunk, text=text)
        return chunk

    def with_data(self, chunk: PublicEvent, rewrite: Callable[[str], str]) -> PublicEvent:
        if isinstance(chunk, BlockStarted):
            return msgspec.structs.replace(chunk, prompt=chunk.prompt and rewrite(chunk.prompt))
        if isinstance(chunk, ImagePreview):
            return msgspec.structs.replace(chunk, image=_described(chunk.image, rewrite))
        if not isinstance(chunk, BlockComplete | RunEnd):
            return chunk
        extras: list[dict[str, object]] = []
        for extra in chunk.provider_extra or ():
            if not isinstance(json := extra.get("json"), str):
                late = {
                    "opaque": _rewritten(extra.get("opaque"), rewrite),
                    "opaque_blobs": _unread(extra.get("opaque_blobs")),
                }
                extras.append(extra | late if "block" in extra else extra)
            elif is_json(new := rewrite(json)):
                extras.append(extra if new == json else {**extra, "json": new})
        changes: dict[str, Any] = {"provider_extra": extras or None}
        if isinstance(chunk, BlockComplete):
            changes["opaque"] = _rewritten(chunk.opaque, rewrite) or None
            changes["opaque_blobs"] = _unread(chunk.opaque_blobs) or None
            changes["image"] = chunk.image and _described(chunk.image, rewrite)
        return msgspec.structs.replace(chunk, **changes)

    def key(self, chunk: PublicEvent) -> int:
        return chunk.seq

    def is_chunk(self, sent: object) -> bool:
        return isinstance(sent, Event)

    def is_end(self, chunk: PublicEvent) -> bool:
        return isinstance(chunk, TERMINAL)

    def is_metadata(self, chunk: PublicEvent) -> bool:
        return False


_READABLE = {"citations": True, "fields": True, "extra_content": False, "reasoning_details": False}
"""Opaque data that is readable JSON. True: the provider takes it back changed; otherwise its signature covers it."""


def _rewritten(opaque: Any, rewrite: Callable[[str], str]) -> dict[str, str]:
    """Opaque data after a rewrite. What the rewrite makes unusable is left out."""
    kept: dict[str, str] = {}
    for name, value in cast("dict[str, str]", opaque or {}).items():
        new = rewrite(value) if name in _READABLE else value
        if new == value or (_READABLE[name] and is_json(new)):
            kept[name] = new
    return kept


def _described(image: ImageRef, rewrite: Callable[[str], str]) -> ImageRef:
    """The image with its prompts after a rewrite."""
    prompts = {"prompt": image.prompt, "revised_prompt": image.revised_prompt}
    return msgspec.structs.replace(image, **{name: text and rewrite(text) for name, text in prompts.items()})


def _unread(blobs: Any) -> dict[str, str]:
    """The blobs with opaque data, without readable ones: nobody has looked at what they hold."""
    return {name: blob for name, blob in cast("dict[str, str]", blobs or {}).items() if name not in _READABLE}


class PublicReader:
    """See `tokenbus.policy.stream_format.Reader`. Can start in the middle of a run: a block is known from its first
    event. If only its end is seen, its content is given as a chunk first, so that policies see it.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._calls = 0
        self._turn = 0

    def read(self, chunk: PublicEvent) -> Sequence[Piece[PublicEvent]]:
        changes: list[Change] = []
        waits = chunk.turn != self._turn
        self._turn = chunk.turn
        match chunk:
            case ImagePreview() | BlockProgress():
                changes = self._seen(chunk)
            case BlockStarted():
                changes = self._seen(chunk)
                waits = waits or chunk.kind == "tool_result"
            case Chunk():
                changes = self._seen(chunk)
                if chunk.text and chunk.tool_call_part in (None, "input"):
                    changes.append(BlockGrew(chunk.block, chunk.text))
            case BlockComplete():
                if chunk.block not in self._known and (content := chunk.content or chunk.arguments):
                    return [*self.read(_whole(chunk, content)), *self.read(chunk)]
                changes = self._seen(chunk)
                changes.append(BlockEnded(chunk.block, cut=bool(chunk.cut)))
            case Retrying() | Restarted():
                self._known = {number for number in self._known if number < chunk.drop_from}
                changes.append(BlocksVoided(chunk.drop_from))
                waits = True
            case _ if isinstance(chunk, TERMINAL):
                changes.append(StreamFinished(chunk.finish))
                waits = True
            case _:
                waits = True
        part_of = chunk.block if isinstance(chunk, OfBlock) else None
        return [Piece(chunk, changes, part_of, waits)]

    def _seen(self, event: OfBlock) -> list[Change]:
        if event.block in self._known:
            return []
        self._known.add(event.block)
        if not isinstance(event, ImagePreview) and event.kind == "server_tool":
            return [BlockBegan(event.block, event.kind, event.tool_id or "", event.tool_name or "")]
        if isinstance(event, ImagePreview) or event.kind != "tool_call":
            return [BlockBegan(event.block, event.kind)]
        self._calls += 1
        return [BlockBegan(event.block, "tool_call", event.tool_id or "", event.tool_name or "", self._calls - 1)]


def _whole(end: BlockComplete, content: str) -> Chunk:
    """Return a block's content as one chunk."""
    call = end.kind == "tool_call"
    return Chunk(
        run=end.run,
        seq=end.seq,
        turn=end.turn,
        attempt=end.attempt,
        block=end.block,
        kind=end.kind,
        text=content,
        visible=end.kind in VISIBLE,
        depth=0,
        tool_call_part="input" if call else None,
        tool_id=end.tool_id,
        tool_name=end.tool_name,
    )
