"""A run's events folded into what it gave: pure, the same however the events arrived."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from tokenbus.client.messages import messages_of
from tokenbus.errors import RunCancelled, RunFailed, RunIncomplete
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import (
    BlockComplete,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    ImageRef,
    Incomplete,
    PublicEvent,
    Restarted,
    Retrying,
    RunFailedEvent,
    Started,
    TerminalEvent,
    Timing,
    UsageReported,
)
from tokenbus.events.requests import Message
from tokenbus.events.usage import Usage

Status: TypeAlias = Literal["open", "completed", "incomplete", "failed", "cancelled"]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What a run gave, whole or up to where it is or ended. Blocks that a retry made void are not in it."""

    run: str
    status: Status
    text: str
    """The visible text: the blocks of a turn one after another, and a blank line between two turns."""
    last_text: str
    """The text of the last turn alone: what the model said in the end. Empty where that turn has none."""
    thinking: str
    """The thinking, block after block."""
    blocks: list[BlockComplete]
    """In order of their numbers; ``cut`` marks one that is only a beginning, as each block is that is still open."""
    finish: FinishReason | None
    """None while the run is open."""
    finish_raw: str | None
    stop_string: str | None
    """The stop string that ended the last turn, where one did and it is known which."""
    usage: Usage | None
    """Sum over the run's turns so far, and over its failed attempts once it has ended; None if nothing was told."""
    model: str | None
    """The model of the last answer, as its provider names it; None while that is not known."""
    response_id: str | None
    """The provider's id of the last answer: its support and its own lists go by it."""
    timing: Timing | None
    """None while the run is open."""
    error: ErrorInfo | None
    """Of a run that failed, and of an incomplete one where something is known."""
    reason: str | None
    """Why the run is incomplete or was cancelled."""
    events: int
    """How many of the run's events were folded in, void ones included."""
    heard_through: int | None = None
    """Of a cancelled run: the last ``seq`` that the listener heard, as the canceller told it."""
    provider_extra: list[dict[str, object]] = []
    """What the provider said beside its answer, and notes of the bus: of what was changed or left out on the way."""
    participant: str | None = None
    """The name under which the model spoke, where the request gave one."""

    @classmethod
    def of(cls, events: Iterable[PublicEvent]) -> Response:
        """What the events of one run, in order from the first, say. Raises ValueError where there is none."""
        builder = ResponseBuilder()
        for event in events:
            builder.add(event)
        return builder.response

    @property
    def tool_calls(self) -> list[BlockComplete]:
        """The blocks that are tool calls; one with ``cut`` never ran."""
        return [block for block in self.blocks if block.kind == "tool_call"]

    @property
    def images(self) -> list[ImageRef]:
        """The images of the answer, in order; none of its drafts."""
        return [block.image for block in self.blocks if block.image and not block.image.draft]

    @property
    def messages(self) -> list[Message]:
        """What the run said, and what its tools gave, as further ``messages`` of the next request: to the same provider
        or to any other. Complete once the run has ended; what was cut off is not in it, but for text."""
        return messages_of(self.blocks, self.provider_extra, self.participant)

    def or_raise(self) -> Response:
        """This, unless the run ended badly. Raises RunFailed, RunIncomplete or RunCancelled, with this as
        ``result``."""
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


class ResponseBuilder:
    """Folds the events of one run, in order; events that came before may come again, and change nothing."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._events = 0
        self._seq = -1
        self._last: PublicEvent | None = None
        self._usage: Usage | None = None
        self._answered_by: tuple[str | None, str | None] = None, None
        self._participant: str | None = None

    def add(self, event: PublicEvent) -> bool:
        """Fold one event in; True for the terminal one. Raises ValueError for an event of another run."""
        if self._last and self._last.run != event.run:
            raise ValueError(f"an event of run {event.run} among those of {self._last.run}")
        if event.seq <= self._seq:
            return isinstance(self._last, TerminalEvent)
        self._seq, self._last = event.seq, event
        self._events += 1
        match event:
            case Chunk():
                self._block(event).add(event)
            case BlockStarted():
                self._block(event)
            case BlockComplete():
                self._block(event).complete = event
            case Retrying() | Restarted():
                # The next attempt's blocks have higher numbers, but for one that it goes on with: that is kept.
                self._blocks = {n: block for n, block in self._blocks.items() if n < event.drop_from}
            case Started():
                self._participant = event.participant
            case UsageReported():
                self._usage = event.total
                self._answered_by = event.model, event.response_id
            case Completed() | Incomplete() | RunFailedEvent() | Cancelled():
                self._usage = event.usage
                if event.model or event.response_id:  # an older server names them with the usage alone
                    self._answered_by = event.model, event.response_id
                return True
            case _:
                pass
        return False

    @property
    def response(self) -> Response:
        """What the events so far say. Costs as much as they are long. Raises ValueError before the first."""
        if self._last is None:
            raise ValueError("no event yet")
        end = self._last if isinstance(self._last, TerminalEvent) else None
        blocks = [self._blocks[n] for n in sorted(self._blocks)]
        texts: dict[int, str] = {}
        for block in blocks:
            if block.start.kind == "text":
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
            stop_string=end.stop_string if isinstance(end, Completed) else None,
            usage=self._usage,
            model=self._answered_by[0],
            response_id=self._answered_by[1],
            timing=end and end.timing,
            error=end.error if isinstance(end, RunFailedEvent | Incomplete) else None,
            reason=end.reason if isinstance(end, Cancelled | Incomplete) else None,
            events=self._events,
            heard_through=end.heard_through if isinstance(end, Cancelled) else None,
            provider_extra=(end and end.provider_extra) or [],
            participant=self._participant,
        )

    def _block(self, event: Chunk | BlockStarted | BlockComplete) -> _Block:
        return self._blocks.setdefault(event.block, _Block(event))


class _Block:
    def __init__(self, start: Chunk | BlockStarted | BlockComplete) -> None:
        self.start = start
        self._content: list[str] = []
        self.complete: BlockComplete | None = None

    def add(self, chunk: Chunk) -> None:
        if chunk.tool_call_part in (None, "input"):
            self._content.append(chunk.text)

    @property
    def content(self) -> str:
        """What its chunks say."""
        return "".join(self._content)

    def so_far(self, last: PublicEvent) -> BlockComplete:
        """The block as one that was cut off here."""
        start, content = self.start, self.content
        call = start.kind == "tool_call"
        return BlockComplete(
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


_STATUS: dict[type[TerminalEvent], Status] = {
    Completed: "completed",
    Incomplete: "incomplete",
    RunFailedEvent: "failed",
    Cancelled: "cancelled",
}
