"""Calls that a client runs, whose results the run waits for: their ids, and which are open by the run's log. Pure."""

from __future__ import annotations

import re

import msgspec

from tokenbus.events.public import BlockStarted, PublicEvent, Resumed, Waiting

_NAME = re.compile(r"wait_(.+)_([0-9]{1,9})-([0-9]{1,6})")
"""Some protocols allow no other characters in the id of a call than those of the runs' ids that the bus makes."""


def call_name(run: str, wait: str) -> str:
    """The id under which a client gets a call that it runs: its result then names what it decides."""
    return f"wait_{run}_{wait.replace('.', '-')}"


def named_call(name: object) -> tuple[str, str] | None:
    """The run and the wait of a `call_name`; None for any other id."""
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    return (found[1], f"{found[2]}.{found[3]}") if found else None


class OwedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call whose result the run waits for from its client."""

    id: str
    """See `call_name`."""
    block: int
    name: str
    arguments: str
    """JSON, or the text of a tool whose input is free text."""
    free_text: bool

    @property
    def input(self) -> dict[str, object]:
        """The arguments, for a protocol that knows objects alone."""
        return {"input": self.arguments} if self.free_text else msgspec.json.decode(self.arguments)


class OwedCalls:
    """Collects them from a run's log. Pure."""

    def __init__(self) -> None:
        self._open: dict[str, OwedCall] = {}
        self._free_text: set[int] = set()

    @property
    def calls(self) -> list[OwedCall]:
        return [*self._open.values()]

    def feed(self, event: PublicEvent) -> None:
        match event:
            case BlockStarted(kind="tool_call", free_text=True):
                self._free_text.add(event.block)
            case Waiting(what="tool_result"):
                free_text = event.block in self._free_text
                self._open[event.wait] = OwedCall(
                    id=call_name(event.run, event.wait),
                    block=event.block,
                    name=event.tool_name,
                    arguments=event.arguments or ("" if free_text else "{}"),
                    free_text=free_text,
                )
            case Resumed():
                self._open.pop(event.wait, None)
            case _:
                pass
