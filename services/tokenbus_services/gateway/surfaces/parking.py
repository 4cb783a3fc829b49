"""Where a run does nothing but wait for somebody, by its log and by what it still waits for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tokenbus.events.public import BlockComplete, PublicEvent, Restarted, Resumed, Retrying, Waiting
from tokenbus.events.waits import WaitInfo, WaitKind


class Parking:
    """What a run waits for, by its log so far. Pure.

    Results are published in the order of their calls: while the first call without one waits, nothing more comes.
    """

    def __init__(self) -> None:
        self._calls: dict[int, str] = {}
        """Calls of the turn without a result, by block: their ids."""
        self._open: dict[int, Waiting] = {}
        """By the block of the call."""
        self._hosted: set[int] = set()
        """Calls that the provider runs, which have no result here."""
        self.seen: set[str] = set()
        """Each wait that there was."""
        self.decided: set[str] = set()
        self._turn = 0

    @property
    def first(self) -> Waiting | None:
        """What the first call without a result waits for; None: for nobody."""
        return self._open.get(min(self._calls, default=-1))

    @property
    def open(self) -> Collection[Waiting]:
        """What the run waits for, as far as the log says."""
        return self._open.values()

    def feed(self, event: PublicEvent) -> None:
        if event.turn > self._turn:
            self._turn = event.turn
            self._calls.clear()
        match event:
            case BlockComplete(kind="tool_call") if not event.cut:
                self._calls[event.block] = event.tool_id or ""
            case BlockComplete(kind="tool_result"):
                done = next((block for block, name in self._calls.items() if name == event.tool_id), None)
                if done is not None:
                    del self._calls[done]
            case Retrying() | Restarted():
                self._calls = {block: name for block, name in self._calls.items() if block < event.drop_from}
            case Waiting():
                if event.block not in self._calls:
                    self._hosted.add(event.block)
                self._calls.setdefault(event.block, event.tool_id)
                self._open[event.block] = event
                self.seen.add(event.wait)
            case Resumed():
                self._open.pop(event.block, None)
                if event.block in self._hosted:
                    del self._calls[event.block]
                self.decided.add(event.wait)
            case _:
                pass

    def is_parked(self, open_now: Sequence[WaitInfo], kinds: Collection[WaitKind]) -> bool:
        """Whether nothing more comes until a client decides. ``open_now``: what the run waits for at present;
        ``kinds``: what the client can decide.
        """
        first = self.first
        names = {info.wait for info in open_now}
        return (
            first is not None
            and first.wait in names
            and names <= self.seen
            and all(info.what in kinds for info in open_now)
        )


def seq_of(events: Iterable[PublicEvent], waits: Collection[str]) -> int:
    """Where the answer ended whose client decides these waits: the seq of its last event."""
    parking, last = Parking(), -1
    asked = False
    for event in events:
        if asked and not isinstance(event, Waiting) and parking.first is not None:
            break  # all that the run asked for at this place was sent
        if asked and isinstance(event, Resumed):
            break
        parking.feed(event)
        last = event.seq
        asked = parking.seen >= set(waits)
    return last
