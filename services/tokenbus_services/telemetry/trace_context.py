"""Ids of traces and spans, derived from the run. Pure.

Each service makes its own spans, in its own process, and knows the ids of all others': nothing has to be handed on, and
a service that is killed takes only its own open spans with it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Literal

import msgspec

from tokenbus.core.request.bounds import TRACEPARENT

SAMPLED = 1
_LOW = 2**63
_working_for: ContextVar[str] = ContextVar("trace context of the current work", default="")


class RunTrace(msgspec.Struct, frozen=True):
    run: str
    trace_id: int
    publisher_span: int
    """The publisher's span, parent of the run's; 0: the run began the trace."""
    sampled: bool

    @property
    def root(self) -> int:
        """Id of the run's own span."""
        return self.span("run")

    def span(self, *what: object) -> int:
        """Id of one of the run's spans, never 0."""
        name = "/".join((self.run, *map(str, what)))
        return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) or 1

    def attempt(self, attempt: int) -> int:
        """Id of an attempt's span."""
        return self.span("attempt", attempt)

    def tool(self, turn: int, block: int) -> int:
        """Id of a tool call's span."""
        return self.span("tool", turn, block)


def run_trace(run: str, traceparent: str | None, *, ratio: float) -> RunTrace:
    """The trace of a run. The publisher decides whether it is sampled; without one, ``ratio`` of the traces are."""
    if remote := remote_trace(run, traceparent):
        return remote
    trace_id = int.from_bytes(blake2b(run.encode(), digest_size=16, person=b"trace").digest()) or 1
    return RunTrace(run, trace_id, 0, trace_id % _LOW < ratio * _LOW)


def remote_trace(what: str, traceparent: str | None) -> RunTrace | None:
    """The trace that another service began and ``what`` belongs to; None if it names none."""
    if traceparent and (found := TRACEPARENT.fullmatch(traceparent)):
        trace_id, span_id, flags = (int(part, 16) for part in found.groups())
        if trace_id and span_id:
            return RunTrace(what, trace_id, span_id, bool(flags & SAMPLED))
    return None


def traceparent_of(trace: RunTrace, span_id: int) -> str:
    """The header value that makes this span the parent of another service's."""
    return f"00-{trace.trace_id:032x}-{span_id:016x}-{int(trace.sampled):02x}"


@contextmanager
def working_for(traceparent: str) -> Generator[None]:
    """Until it ends, this task works for that span: requests to the blob store carry it."""
    token = _working_for.set(traceparent)
    try:
        yield
    finally:
        _working_for.reset(token)


def worked_for() -> str:
    """The context of the span that this task works for; empty if there is none."""
    return _working_for.get()


Value = str | int | float | bool | Sequence[str]
Kind = Literal["internal", "client", "consumer", "server"]

MAX_CONTENT_CHARS = 64 * 1024
"""Longest content of an attribute."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One span that has ended. Times are Unix milliseconds."""

    name: str
    span_id: int
    parent_id: int
    begin_ms: int
    end_ms: int
    kind: Kind = "internal"
    attributes: Mapping[str, Value | None]
    """None: left out."""
    error: str | None = None
    """The error's class, if it ended in one."""
    events: Sequence[tuple[str, int]] = ()
    """Names and times."""
