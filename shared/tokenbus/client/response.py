"""Folds a run's events into its response. Pure: the result does not depend on how the events arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, overload

import msgspec

from tokenbus.errors import RunCancelled, RunFailed, RunIncomplete, undecodable
from tokenbus.events import public
from tokenbus.events.run_result import RunResult, Status
from tokenbus.events.usage import Usage

T = TypeVar("T")


class Response(RunResult, frozen=True, kw_only=True):
    """A run's output, complete or so far. Excludes blocks that a retry discarded."""

    @classmethod
    def of(cls, events: Iterable[public.PublicEvent]) -> Response:
        """Fold the events of one run, in order from the first. Raises ValueError if there are none."""
        builder = ResponseBuilder()
        for event in events:
            builder.add(event)
        return builder.response

    def or_raise(self) -> Response:
        """Return this response if the run completed or is still open.

        Otherwise raises RunFailed, RunIncomplete or RunCancelled, with this as ``result``.
        """
        match self.status:
            case "open" | "completed":
                return self
            case "incomplete":
                raise RunIncomplete(self.run, self.reason or "", self)
            case "cancelled":
                raise RunCancelled(self.run, self.reason, self)
            case "failed":
                assert self.error
                raise RunFailed(self.run, self.error, self)

    @overload
    def parsed(self) -> object: ...
    @overload
    def parsed(self, as_type: type[T]) -> T: ...
    def parsed(self, as_type: type[T] | type[object] = object) -> T | object:
        """Return `last_text` as the JSON that ``output_schema`` or ``json_object`` asked for.

        ``as_type``: a dataclass, a `msgspec.Struct`, a TypedDict or a built-in type, to which the JSON is converted and
        against which it is checked. Without it any JSON is accepted.

        Raises ValueError if the text is not JSON, for example because it was cut, or not of that type.
        """
        try:
            return msgspec.json.decode(self.last_text, type=as_type)
        except (msgspec.DecodeError, RecursionError) as e:
            raise ValueError(
                f"the answer of run {self.run} is not the JSON that was expected: {undecodable(e)}"
            ) from None


class ResponseBuilder:
    """Folds the events of one run, in order. Repeated events are ignored."""

    def __init__(self, *, heard_through: int | None = None, heard_characters: int | None = None) -> None:
        """``heard_through``, ``heard_characters``: how far a listener heard the run, as in a cancel; None: as the run's
        `Cancelled` event says.
        """
        self._heard_at = heard_through, heard_characters
        self._blocks: dict[int, _Block] = {}
        self._events = 0
        self._seq = -1
        self._last: public.PublicEvent | None = None
        self._usage: Usage | None = None
        self._answered_by: tuple[str | None, str | None] = None, None
        self._participant: str | None = None

    def add(self, event: public.PublicEvent) -> bool:
        """Fold in one event; return True for the terminal one. Raises ValueError for an event of another run."""
        if self._last and self._last.run != event.run:
            raise ValueError(f"an event of run {event.run} among those of {self._last.run}")
        if event.seq <= self._seq:
            return isinstance(self._last, public.TerminalEvent)
        self._seq, self._last = event.seq, event
        self._events += 1
        match event:
            case public.Chunk():
                self._block(event).add(event)
            case public.BlockStarted():
                self._block(event)
            case public.BlockComplete():
                self._block(event).complete = event
            case public.Retrying() | public.Restarted():
                # The next attempt numbers its blocks higher, except a block that it continues: that one is kept.
                self._blocks = {n: block for n, block in self._blocks.items() if n < event.drop_from}
            case public.Started():
                self._participant = event.participant
            case public.UsageReported():
                self._usage = event.total
            case public.Answering():
                self._answered_by = event.model, event.response_id
            case public.Completed() | public.Incomplete() | public.RunFailedEvent() | public.Cancelled():
                self._usage = event.usage
                if event.model or event.response_id:  # else nothing answered in the last attempt
                    self._answered_by = event.model, event.response_id
                return True
            case _:
                pass
        return False

    @property
    def response(self) -> Response:
        """The response so far. Takes time proportional to its length. Raises ValueError before the first event."""
        if self._last is None:
            raise ValueError("no event yet")
        end = self._last if isinstance(self._last, public.TerminalEvent) else None
        through, characters = self._heard_at
        if through is None and isinstance(end, public.Cancelled):
            through, characters = end.heard_through, end.heard_characters
        blocks = [self._blocks[n] for n in sorted(self._blocks)]
        texts: dict[int, str] = {}
        for block in blocks:
            if block.start.kind in ("text", "audio"):
                texts[block.start.turn] = texts.get(block.start.turn, "") + block.content
        return Response(
            run=self._last.run,
            status=_STATUS[type(end)] if end else "open",
            text="\n\n".join(text for text in texts.values() if text),
            last_text=texts.get(self._last.turn, ""),
            thinking="".join(block.content for block in blocks if block.start.kind == "thinking"),
            blocks=[block.complete or block.so_far(self._last) for block in blocks],
            finish=end and end.finish,
            finish_raw=end and end.finish_raw,
            stop_string=end.stop_string if isinstance(end, public.Completed) else None,
            usage=self._usage,
            model=self._answered_by[0],
            response_id=self._answered_by[1],
            timing=end and end.timing,
            error=end.error if isinstance(end, public.RunFailedEvent | public.Incomplete) else None,
            reason=end.reason if isinstance(end, public.Cancelled | public.Incomplete) else None,
            events=self._events,
            heard_through=through,
            heard=None if through is None else self._heard(blocks, through, characters),
            provider_extra=(end and end.provider_extra) or [],
            participant=self._participant,
        )

    @staticmethod
    def _heard(blocks: Sequence[_Block], through: int, characters: int | None) -> dict[int, int]:
        heard: dict[int, int] = {}
        for block in blocks:
            if block.start.kind == "text":
                if count := block.heard(through, characters):
                    heard[block.start.block] = count
            elif block.complete and block.complete.seq <= through:
                heard[block.start.block] = len(block.content)
        return heard

    def _block(self, event: public.Chunk | public.BlockStarted | public.BlockComplete) -> _Block:
        return self._blocks.setdefault(event.block, _Block(event))


class _Block:
    def __init__(self, start: public.Chunk | public.BlockStarted | public.BlockComplete) -> None:
        self.start = start
        self._content: list[str] = []
        self._seqs: list[int] = []
        self.complete: public.BlockComplete | None = None

    def add(self, chunk: public.Chunk) -> None:
        if chunk.tool_call_part in (None, "input"):
            self._content.append(chunk.text)
            self._seqs.append(chunk.seq)

    @property
    def content(self) -> str:
        """The text of its chunks."""
        return "".join(self._content)

    def heard(self, through: int, characters: int | None) -> int:
        """How many characters a listener heard who heard all events up to ``through``, and ``characters`` of that."""
        count = 0
        for seq, text in zip(self._seqs, self._content, strict=True):
            if seq < through or (seq == through and characters is None):
                count += len(text)
            elif seq == through and characters is not None:
                count += min(len(text), characters)
        return count

    def so_far(self, last: public.PublicEvent) -> public.BlockComplete:
        """Return the block as if it were cut off here."""
        start, content = self.start, self.content
        call = start.kind == "tool_call"
        return public.BlockComplete(
            run=start.run,
            seq=last.seq,
            turn=start.turn,
            attempt=last.attempt,
            block=start.block,
            kind=start.kind,
            content=None if call or start.kind == "image" else content,
            arguments=content if call else None,
            tool_id=start.tool_id,
            tool_name=start.tool_name,
            cut=True,
        )


_STATUS: dict[type[public.TerminalEvent], Status] = {
    public.Completed: "completed",
    public.Incomplete: "incomplete",
    public.RunFailedEvent: "failed",
    public.Cancelled: "cancelled",
}
