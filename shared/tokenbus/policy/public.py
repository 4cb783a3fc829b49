"""Policies on the public events of one run: `PublicEvents`, the stream format, and its reader.

The bus marks where blocks begin and end, so nothing is inferred here. The writer (`public.writer`) assigns new, gapless
sequence numbers to its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import msgspec

from tokenbus.core.run.blocks.block_table import VISIBLE
from tokenbus.core.run.blocks.public_blocks import CALL_CUT, call_heads, changed_fields, first_void, fitting_finish
from tokenbus.core.run.provider_extra import renumbered
from tokenbus.core.run.termination import terminated
from tokenbus.events import public
from tokenbus.events.run_messages import is_json
from tokenbus.events.usage import Usage
from tokenbus.policy.processor import Decision, NewText, NewToolCall
from tokenbus.policy.stream_format import BlockBegan, BlockEnded, BlockGrew, BlocksVoided, Change, Piece, StreamFinished

OfBlock = public.BlockStarted | public.Chunk | public.ImagePreview | public.BlockProgress | public.BlockComplete
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

    def text(self, chunk: public.PublicEvent) -> str:
        return chunk.text if isinstance(chunk, public.Chunk) and chunk.tool_call_part in (None, "input") else ""

    def with_text(self, chunk: public.PublicEvent, text: str) -> public.PublicEvent:
        if isinstance(chunk, public.Chunk) and chunk.tool_call_part in (None, "input"):
            return msgspec.structs.replace(chunk, text=text)
        return chunk

    def with_data(self, chunk: public.PublicEvent, rewrite: Callable[[str], str]) -> public.PublicEvent:
        if isinstance(chunk, public.BlockStarted):
            return msgspec.structs.replace(chunk, prompt=chunk.prompt and rewrite(chunk.prompt))
        if isinstance(chunk, public.ImagePreview):
            return msgspec.structs.replace(chunk, image=_described(chunk.image, rewrite))
        if not isinstance(chunk, public.BlockComplete | public.RunEnd):
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
        if isinstance(chunk, public.BlockComplete):
            changes["opaque"] = _rewritten(chunk.opaque, rewrite) or None
            changes["opaque_blobs"] = _unread(chunk.opaque_blobs) or None
            changes["image"] = chunk.image and _described(chunk.image, rewrite)
        return msgspec.structs.replace(chunk, **changes)

    def key(self, chunk: public.PublicEvent) -> int:
        return chunk.seq

    def is_chunk(self, sent: object) -> bool:
        return isinstance(sent, public.Event)

    def is_end(self, chunk: public.PublicEvent) -> bool:
        return isinstance(chunk, public.TERMINAL)

    def is_metadata(self, chunk: public.PublicEvent) -> bool:
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


def _described(image: public.ImageRef, rewrite: Callable[[str], str]) -> public.ImageRef:
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

    def read(self, chunk: public.PublicEvent) -> Sequence[Piece[public.PublicEvent]]:
        changes: list[Change] = []
        waits = chunk.turn != self._turn
        self._turn = chunk.turn
        match chunk:
            case public.ImagePreview() | public.BlockProgress():
                changes = self._seen(chunk)
            case public.BlockStarted():
                changes = self._seen(chunk)
                waits = waits or chunk.kind == "tool_result"
            case public.Chunk():
                changes = self._seen(chunk)
                if chunk.text and chunk.tool_call_part in (None, "input"):
                    changes.append(BlockGrew(chunk.block, chunk.text))
            case public.BlockComplete():
                if chunk.block not in self._known and (content := chunk.content or chunk.arguments):
                    return [*self.read(_whole(chunk, content)), *self.read(chunk)]
                changes = self._seen(chunk)
                changes.append(BlockEnded(chunk.block, cut=bool(chunk.cut)))
            case public.Retrying() | public.Restarted():
                self._known = {number for number in self._known if number < chunk.drop_from}
                changes.append(BlocksVoided(chunk.drop_from))
                waits = True
            case _ if isinstance(chunk, public.TERMINAL):
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
        if not isinstance(event, public.ImagePreview) and event.kind == "server_tool":
            return [BlockBegan(event.block, event.kind, event.tool_id or "", event.tool_name or "")]
        if isinstance(event, public.ImagePreview) or event.kind != "tool_call":
            return [BlockBegan(event.block, event.kind)]
        self._calls += 1
        return [BlockBegan(event.block, "tool_call", event.tool_id or "", event.tool_name or "", self._calls - 1)]


def _whole(end: public.BlockComplete, content: str) -> public.Chunk:
    """Return a block's content as one chunk."""
    call = end.kind == "tool_call"
    return public.Chunk(
        run=end.run,
        session=end.session,
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


# Blocks are renumbered without gaps, in the order in which they begin here. Each block begins before its chunks, its
# end contains exactly the content of its chunks, and blocks still open at the end of the run are closed. The finish
# reason fits the remaining calls. Pure: the time is an input.


E = TypeVar("E", bound=public.PublicEvent)


class _Out(msgspec.Struct):
    """A block of the output."""

    number: int
    origin: int
    """The input block it came from, or the block the policy was at when it created this one."""
    kind: public.BlockKind
    tool_id: str | None
    tool_name: str | None
    item: str | None = None
    phase: str | None = None
    free_text: bool | None = None
    pieces: list[str] = []


class PublicWriter:
    """See `tokenbus.policy.stream_format.Writer`."""

    def __init__(self, elapsed_ms: Callable[[], int]) -> None:
        self._elapsed_ms = elapsed_ms
        self._run, self._turn, self._attempt = "", 0, 1
        self._seq = 0
        self._numbers = 0
        self._open: dict[int, _Out] = {}
        """By input block number; blocks created by the policy are never open."""
        self._origins: list[int] = []
        """By output block number: see `_Out.origin`."""
        self._published_numbers: dict[int, int] = {}
        """Input block number to output block number."""
        self._intact: set[int] = set()
        """Complete blocks of the output whose content is that of the input."""
        self._highest_block = -1
        self._shown: set[int] = set()
        """Blocks of which the policy saw a chunk; their end event must not reveal withheld content."""
        self._void: list[range] = []
        self._calls = 0
        """Complete tool calls of this turn that were sent."""
        self._usage: Usage | None = None
        self._over = False

    def before_chunk(self, chunk: public.PublicEvent) -> None:
        if chunk.turn != self._turn:
            self._calls = 0
        self._run, self._turn, self._attempt = chunk.run, chunk.turn, chunk.attempt
        match chunk:
            case public.Chunk() | public.BlockStarted() | public.BlockComplete():
                self._highest_block = max(self._highest_block, chunk.block)
                if isinstance(chunk, public.Chunk):
                    self._shown.add(chunk.block)
            case public.Retrying() | public.Restarted():
                self._void.append(range(chunk.drop_from, self._highest_block + 1))
            case public.UsageReported():
                self._usage = chunk.total
            case _:
                pass

    def defer(self) -> None:
        """Nothing to remember: the position does not matter in this format."""

    def resume_deferred(self, mark: object) -> None:
        """See `defer`."""

    def decided(self, decision: Decision) -> None:
        """See `defer`."""

    def write(self, sent: public.PublicEvent | NewText | NewToolCall) -> Sequence[public.PublicEvent]:
        return [] if self._over else list(self._write(sent))

    def terminate(self, decision: Decision) -> Sequence[public.PublicEvent]:
        if self._over:
            return []
        self._over = True
        error = terminated(f"{decision.policy}: {decision.reason}" if decision.reason else decision.policy)
        end = self._event(
            public.Incomplete,
            finish="content_filter",
            timing=public.Timing(total_ms=self._elapsed_ms()),
            usage=self._usage,
            reason=error.message,
            error=error,
        )
        return [*self._close_all(cut=True), self._numbered(end)]

    def _write(self, sent: public.PublicEvent | NewText | NewToolCall) -> Iterator[public.PublicEvent]:
        match sent:
            case NewText():
                if sent.text:
                    yield from self._whole("text", sent.text, None, None)
            case NewToolCall():
                yield from self._whole("tool_call", sent.arguments, sent.id, sent.name)
            case public.Chunk() | public.BlockStarted() | public.BlockComplete():
                if not any(sent.block in void for void in self._void):
                    yield from self._of_block(sent)
            case public.Retrying() | public.Restarted():
                yield from self._again(sent)
            case _ if isinstance(sent, public.TERMINAL):
                yield from self._end(sent)
            case _:
                yield from self._other(sent)

    def _other(self, sent: public.PublicEvent) -> Iterator[public.PublicEvent]:
        """Pass on events about a block (a preview, a tool's progress) only if the block itself was sent."""
        block: int | None = getattr(sent, "block", None)
        if block is None:
            yield self._numbered(sent)
        elif block in self._published_numbers:
            changes: dict[str, Any] = {"block": self._published_numbers[block]}
            yield self._numbered(msgspec.structs.replace(sent, **changes))

    def _of_block(
        self, sent: public.Chunk | public.BlockStarted | public.BlockComplete
    ) -> Iterator[public.PublicEvent]:
        out = self._open.get(sent.block)
        alone = out is None and isinstance(sent, public.BlockComplete)
        if alone and sent.block in self._shown:
            return  # the policy withheld its chunks, so the end must not reveal them
        if out is None:
            out = self._open[sent.block] = self._new(sent.kind, sent.block, sent.tool_id, sent.tool_name)
            if not isinstance(sent, public.Chunk):
                out.item, out.phase, out.free_text = sent.item, sent.phase, sent.free_text
            self._published_numbers[sent.block] = out.number
            yield from self._begin(out)
        if isinstance(sent, public.Chunk) and sent.tool_call_part in (None, "input"):
            yield from self._grow(out, sent.text, sent)
        elif isinstance(sent, public.BlockComplete):
            content = sent.arguments if sent.kind == "tool_call" else sent.content
            if alone and content:
                yield from self._grow(out, content, None)
            del self._open[sent.block]
            yield self._complete(out, sent)

    def _whole(
        self, kind: public.BlockKind, content: str, tool_id: str | None, name: str | None
    ) -> Iterator[public.PublicEvent]:
        out = self._new(kind, self._highest_block, tool_id, name)
        yield from self._begin(out)
        yield from self._grow(out, content, None)
        yield self._complete(
            out, self._event(public.BlockComplete, block=out.number, kind=kind, tool_id=tool_id, tool_name=name)
        )

    def _new(self, kind: public.BlockKind, origin: int, tool_id: str | None, tool_name: str | None) -> _Out:
        out = _Out(self._numbers, origin, kind, tool_id, tool_name)
        self._numbers += 1
        self._origins.append(origin)
        return out

    def _begin(self, out: _Out) -> Iterator[public.PublicEvent]:
        """Begin a block. Sends a call's id and name here, whichever of its chunks the policy sent."""
        fields = {"block": out.number, "kind": out.kind, "tool_id": out.tool_id, "tool_name": out.tool_name}
        yield self._numbered(
            self._event(public.BlockStarted, **fields, item=out.item, phase=out.phase, free_text=out.free_text)
        )
        if out.kind == "tool_call":
            for part, text in call_heads(out.tool_name, out.tool_id):
                head = self._event(public.Chunk, text=text, visible=False, depth=0, tool_call_part=part, **fields)
                yield self._numbered(head)

    def _grow(self, out: _Out, text: str, sent: public.Chunk | None) -> Iterator[public.PublicEvent]:
        if not text:
            return
        out.pieces.append(text)
        if sent:
            yield self._numbered(msgspec.structs.replace(sent, block=out.number))
            return
        call = out.kind == "tool_call"
        chunk = self._event(
            public.Chunk,
            block=out.number,
            kind=out.kind,
            text=text,
            visible=out.kind in VISIBLE,
            depth=0,
            tool_call_part="input" if call else None,
            tool_id=out.tool_id,
            tool_name=out.tool_name,
        )
        yield self._numbered(chunk)

    def _complete(self, out: _Out, sent: public.BlockComplete) -> public.PublicEvent:
        """End a block with the content that was sent."""
        content = "".join(out.pieces)
        changed = changed_fields(sent, out.kind, content)
        if not (changed or sent.cut):
            self._intact.add(out.number)
        changes: dict[str, Any] = {"block": out.number, **changed}
        self._calls += out.kind == "tool_call" and not sent.cut
        return self._numbered(msgspec.structs.replace(sent, **changes))

    def _again(self, sent: public.Retrying | public.Restarted) -> Iterator[public.PublicEvent]:
        drop_from = first_void(((origin, n) for n, origin in enumerate(self._origins)), sent.drop_from, self._numbers)
        self._open = {origin: out for origin, out in self._open.items() if origin < sent.drop_from}
        self._calls = 0
        yield self._numbered(msgspec.structs.replace(sent, drop_from=drop_from))

    def _end(self, sent: public.TerminalEvent) -> Iterator[public.PublicEvent]:
        yield from self._close_all(cut=not isinstance(sent, public.Completed))
        self._over = True
        if isinstance(sent, public.Completed):
            sent = msgspec.structs.replace(sent, finish=fitting_finish(sent.finish, calls=self._calls > 0))
        extras = renumbered(sent.provider_extra, self._published_numbers.items(), self._intact)
        yield self._numbered(msgspec.structs.replace(sent, provider_extra=extras))

    def _close_all(self, *, cut: bool) -> list[public.PublicEvent]:
        """Close all open blocks. A call whose end the policy did not send is cut and never runs."""
        still, self._open = self._open, {}
        ends: list[public.PublicEvent] = []
        for out in still.values():
            call = out.kind == "tool_call"
            end = self._event(
                public.BlockComplete,
                block=out.number,
                kind=out.kind,
                tool_id=out.tool_id,
                tool_name=out.tool_name,
                input_error=CALL_CUT if call else None,
                free_text=out.free_text,
                cut=(cut or call) or None,
            )
            ends.append(self._complete(out, end))
        return ends

    def _event(self, event: type[E], **fields: Any) -> E:
        return event(run=self._run, seq=0, turn=self._turn, attempt=self._attempt, **fields)

    def _numbered(self, event: E) -> E:
        self._seq += 1
        return msgspec.structs.replace(event, seq=self._seq - 1)
