"""The figures of a deployment between two samples, and the same as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from tokenbus.bus.topology import INTAKE, RECORDER
from tokenbus_services.cli.inspect.provider_facts import Trouble
from tokenbus_services.cli.render.event_text import failure, per_second, size, time_span
from tokenbus_services.runtime.deployment_snapshot import DeploymentSnapshot, NodeFacts

MAX_TROUBLES = 3
"""Maximum models shown of each kind of failure; `doctor` shows all."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates per second between two samples. None: not counted by the server, or the counter was reset."""

    requests: float | None
    attempts: float | None
    tool_calls: float | None
    records: float | None = None
    """Entries for the recorder; None also if nothing is recorded."""
    chunks: float | None
    stage_bytes: dict[str, float | None]
    """By stage: bytes of frames processed."""


class Sample(msgspec.Struct, frozen=True):
    """A sample, and the rates since the sample before."""

    now: DeploymentSnapshot
    nodes: list[NodeFacts]
    rates: Rates
    trouble: Trouble = Trouble()


def lines(look: Sample) -> Iterator[str]:
    """Yield a sample as lines of text."""
    yield "  ".join(f"{name} {value}" for name, value in totals(look).items())
    for node in look.nodes:
        limit = f" of {size(node.memory_limit)}" if node.memory_limit else ""
        yield (
            f"server      {node.name}  memory {size(node.memory_bytes)}{limit}"
            f"  commands {node.commands_per_s}/s  clients {node.clients}"
        )
    for stage in look.now.stages:
        yield (
            f"{stage.name:<10}  workers {len(stage.workers)}  partitions owned {stage.owned} of {len(stage.partitions)}"
            f"  behind {describe_lag(stage.lag_entries, stage.lag_bytes)}"
            f"  works {per_second(look.rates.stage_bytes[stage.name], size)}"
        )
    for queue in look.now.queues:
        yield f"{queue.name:<10}  workers {len(queue.workers)}  waiting {queue.waiting}  active {queue.held}"
    for where, what in troubles(look.trouble):
        yield f"{where:<10}  {what}"


def troubles(trouble: Trouble) -> Iterator[tuple[str, str]]:
    """Yield what fails outside the bus: what it is, and how it fails; the worst first."""
    for each in trouble.failing[:MAX_TROUBLES]:
        yield (
            f"{each.failure.provider}/{each.failure.model}",
            f"{each.failed} of {each.attempts} calls: {failure(each.failure)}, {time_span(each.last_ms)} ago",
        )
    for each in trouble.silent[:MAX_TROUBLES]:
        yield f"{each.provider}/{each.model}", f"{each.calls} calls silent, the oldest for {time_span(each.since_ms)}"
    if blobs := trouble.blobs:
        yield "blobs", f"{blobs.code}, {time_span(1000 * blobs.ago_s)} ago"


def totals(look: Sample) -> dict[str, str]:
    """Return the figures of the whole deployment, by name."""
    other_kinds = {"pipelines": look.now.pipelines, "gateways": look.now.gateways}
    return {
        "open runs": str(look.now.open_runs),
        "requests": per_second(look.rates.requests),
        "attempts": per_second(look.rates.attempts),
        "tool calls": per_second(look.rates.tool_calls),
        "chunks": per_second(look.rates.chunks),
        "dead": str(look.now.dead),
        **{name: str(len(workers)) for name, workers in other_kinds.items() if workers},
    }


def describe_lag(entries: int | None, lag_bytes: int) -> str:
    """Describe a lag in words."""
    return size(lag_bytes) if entries is None else f"{entries} ({size(lag_bytes)})"


def rates(before: DeploymentSnapshot, now: DeploymentSnapshot) -> Rates:
    """Compute the rates between two samples."""
    return Rates(
        requests=_rate(before, now, lambda s: _added(s, INTAKE)),
        attempts=_rate(before, now, lambda s: _added(s, "fetcher")),
        tool_calls=_rate(before, now, lambda s: _added(s, "tools")),
        records=_rate(before, now, lambda s: _added(s, RECORDER[0])),
        chunks=_rate(before, now, lambda s: s.chunks),
        stage_bytes={stage.name: _rate(before, now, lambda s, name=stage.name: _done(s, name)) for stage in now.stages},
    )


def _rate(
    before: DeploymentSnapshot, now: DeploymentSnapshot, counter: Callable[[DeploymentSnapshot], int | None]
) -> float | None:
    begin, end, ms = counter(before), counter(now), now.at_ms - before.at_ms
    if begin is None or end is None or end < begin or ms <= 0:
        return None
    return (end - begin) * 1000 / ms


def _added(snapshot: DeploymentSnapshot, queue: str) -> int | None:
    return next((q.added for q in snapshot.queues if q.name == queue), None)


def _done(snapshot: DeploymentSnapshot, stage: str) -> int:
    return sum(p.done_bytes for s in snapshot.stages if s.name == stage for p in s.partitions)
