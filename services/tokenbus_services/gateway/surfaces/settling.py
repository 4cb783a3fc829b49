"""Holds back what a retry may still void, for protocols that cannot take anything back.

A `retrying` event voids blocks that are on the run's log already: thinking, calls and images of a turn of which nothing
visible was emitted. An OpenAI or Anthropic client has no way to take a tool call back, so its encoder sees the
log through a `Settling`.

An event of a block is held while a retry could void the block. What settles it:

- a visible chunk of the turn: no retry follows it. If the request's `on_failure` is ``continue``, a later attempt may
  still void what began after that text, so the chunk settles only the blocks up to its own.
- with ``before_first_output``, the first argument of a call too, so calls come out as they are written.
- the end of the turn: a tool's progress or result, a call that waits for somebody, an event of a later turn, or the
  terminal event. `usage` does not count: an attempt that is continued reports it, and so does one whose provider ended
  it with an error, which a fallback then voids.

`on_failure: "fail"` settles nothing earlier: a provider may begin its message again within the attempt, and that is a
`retrying` too.
"""

from __future__ import annotations

from tokenbus.events import public
from tokenbus.events.requests import OnFailure

BlockRelated = public.BlockStarted | public.Chunk | public.ImagePreview | public.BlockProgress | public.BlockComplete


class Settling:
    """Filters one run's log, fed from seq 0 without a gap. Pure; the result depends on the log alone.

    - No event of a void block comes out, unless the block's kind is not held.
    - Everything else comes out once, and each block's events in their order. Exception: a held call does not come out
      if it was cut, or if the run ended otherwise than `completed` in the call's turn. Such a call never ran. One whose
      arguments came out already ends with a `block_complete` that is cut.
    - Held events come out in their order, before the event that settles them. Any other event comes out at once, so it
      may overtake held ones of its turn; `retrying` and `restarted` do, after the void events are dropped.

    Visible text is never held. With ``restart`` it can therefore become void after it came out, and so can thinking
    before it; calls never do.

    ``hold_thinking``, ``hold_calls``, ``hold_images``: the kinds of blocks to hold. ``on_failure``: the request's; None
    if it is unknown, which holds as long as for ``continue``.
    """

    def __init__(
        self,
        *,
        hold_thinking: bool,
        hold_calls: bool,
        hold_images: bool = True,
        on_failure: OnFailure | None = None,
    ) -> None:
        held: set[public.BlockKind] = {"text", "server_tool"}  # text only until its first visible chunk
        held |= {"thinking"} if hold_thinking else set()
        held |= {"tool_call"} if hold_calls else set()
        held |= {"image"} if hold_images else set()
        self._kinds = frozenset(held)
        self._chunk_settles_turn = on_failure in ("before_first_visible", "before_first_output", "fail")
        self._argument_settles_turn = on_failure == "before_first_output"
        self._calls_wait_for_turn = on_failure == "restart"
        self._held: list[BlockRelated] = []
        self._turn = 0
        self._turn_settled = False
        self._settled_below = 0
        """Blocks with a lower number are settled, except calls under ``restart``."""

    def feed(self, event: public.PublicEvent) -> list[public.PublicEvent]:
        """Return the events that may be sent now, in order."""
        out: list[public.PublicEvent] = []
        if event.turn > self._turn:
            out += self._release_all()
            self._turn, self._turn_settled = event.turn, False
        match event:
            case public.Retrying() | public.Restarted():
                self._held = [each for each in self._held if each.block < event.drop_from]
                self._settled_below = min(self._settled_below, event.drop_from)
                self._turn_settled = False
                return [*out, event]
            case (
                public.BlockStarted()
                | public.Chunk()
                | public.ImagePreview()
                | public.BlockProgress()
                | public.BlockComplete()
            ):
                return out + self._of_block(event)
            case public.ToolProgress() | public.Waiting():
                return [*out, *self._settle_turn(), event]
            case _ if isinstance(event, public.TERMINAL):
                if not isinstance(event, public.Completed):
                    self._held = [each for each in self._held if each.kind != "tool_call"]
                return [*out, *self._settle_turn(), event]
            case _:
                return [*out, event]

    def _of_block(self, event: BlockRelated) -> list[public.PublicEvent]:
        out: list[public.PublicEvent] = []
        if event.kind == "tool_result":
            cut = {each.block for each in self._held if isinstance(each, public.BlockComplete) and each.cut}
            self._held = [each for each in self._held if each.kind != "tool_call" or each.block not in cut]
            out += self._settle_turn()
        elif isinstance(event, public.Chunk) and event.visible:
            out += self._on_visible(event)
        elif self._argument_settles_turn and isinstance(event, public.Chunk) and event.tool_call_part == "input":
            out += self._settle_turn()
        if self._is_settled(event):
            out.append(event)
        else:
            self._held.append(event)
        return out

    def _on_visible(self, chunk: public.Chunk) -> list[public.PublicEvent]:
        """Release what a visible chunk settles."""
        if self._chunk_settles_turn:
            return self._settle_turn()
        self._settled_below = max(self._settled_below, chunk.block + 1)
        if not self._held:
            return []
        out: list[public.PublicEvent] = [each for each in self._held if self._is_settled(each)]
        self._held = [each for each in self._held if not self._is_settled(each)]
        return out

    def _is_settled(self, event: BlockRelated) -> bool:
        if self._turn_settled or event.kind not in self._kinds:
            return True
        if event.kind == "tool_call" and self._calls_wait_for_turn:
            return False
        return event.block < self._settled_below

    def _settle_turn(self) -> list[public.PublicEvent]:
        self._turn_settled = True
        return self._release_all()

    def _release_all(self) -> list[public.PublicEvent]:
        held, self._held = self._held, []
        return [*held]
