"""The figures of a deployment between two samples, and the same as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tokenbus_services.cli.inspect.snapshot import DeploymentSnapshot, Rates
from tokenbus_services.cli.inspect.trouble import Trouble
from tokenbus_services.cli.render.event_text import per_second, size
from tokenbus_services.cli.render.provider_text import failure, time_span

MAX_TROUBLES = 3
"""Maximum models shown of each kind of failure; `doctor` shows all."""


class Sample(msgspec.Struct, frozen=True):
    """A sample, and the rates since the sample before."""

    now: DeploymentSnapshot
    rates: Rates
    trouble: Trouble = Trouble()


def lines(look: Sample) -> Iterator[str]:
    """Yield a sample as lines of text."""
    yield "  ".join(f"{name} {value}" for name, value in totals(look).items())
    for node in look.now.nodes:
        limit = f" of {size(node.memory_limit)}" if node.memory_limit else ""
        yield (
            f"server      {node.name}  memory {size(node.memory_bytes)}{limit}"
            f"  commands {node.commands_per_s}/s  clients {node.clients}"
        )
    for stage in look.now.stages:
        owned = sum(p.owner is not None for p in stage.partitions)
        yield (
            f"{stage.name:<10}  workers {len(stage.workers)}  partitions owned {owned} of {len(stage.partitions)}"
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
