"""What the parser asks of others: drafts to judge, attempts to make, tools to run, and messages to all workers."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.public import PublicEvent


class Drafts(msgspec.Struct, frozen=True, array_like=True):
    """Public events that are not yet published; `seq` numbers a run's drafts from 0."""

    policies: tuple[str, ...]
    events: list[PublicEvent]
    over: bool = False
    """The run has ended; nothing more needs to be judged."""
    traceparent: str = ""
    """With the run's first drafts: as in `Accepted`."""


class TurnWork(msgspec.Struct, frozen=True, array_like=True):
    """One attempt to make. The request and the history are in the run's hash."""

    run: str
    turn: int
    attempt: int
    not_before_ms: int = 0
    """Unix time before which the provider must not be called (the delay of a retry)."""
    tenant: str = ""
    """The run's tenant, needed for fair queueing before the request is loaded."""
    held: bool = False
    """Policies judge the output before it is published, so the attempt waits while their stage lags too far behind."""
    choice: int = 0
    """Which provider and model to call: 0 is the request's own, n its n-th fallback."""


class ProviderJob(msgspec.Struct, frozen=True, array_like=True):
    """A job in the background of a run's provider, and how far its answer is in the attempt's frames."""

    id: str
    """The provider's."""
    turn: int
    attempt: int
    """Whose frames have its answer so far."""
    choice: int
    """As in `TurnWork`."""
    provider: str
    model: str
    stream: bool
    """Its answer is read as a stream; else it is polled."""
    started_ms: int
    """Unix time when it was started."""
    after: int = -1
    """Number of the last event that was read."""
    moved: str = ""
    """As in `ImagesRequested`."""
    over: bool = False
    """It has ended, and the frames have all of its answer."""


class ToolWork(msgspec.Struct, frozen=True, array_like=True):
    """One tool call to run."""

    run: str
    turn: int
    attempt: int
    block: int
    tool_id: str
    name: str
    arguments: str
    free_text: bool = False
    """``arguments`` is no JSON."""
    timeout_s: float | None = None
    tenant: str = ""
    """The run's tenant: tenants take turns."""
    metadata: dict[str, object] | None = None
    """The run's metadata, for tools that act on behalf of a tenant or a user."""
    traceparent: str = ""
    """As in `Accepted`."""


class Control(msgspec.Struct, frozen=True, array_like=True):
    """A message to all workers of a partition."""

    run: str
    what: Literal["cancel", "closed"] = "cancel"
    """``closed``: one attempt is over; the run continues."""
    attempt: int = 0
    """The attempt that was closed."""
