"""The checks of `tokenbus doctor` on the bus at work: stages, queues, stuck and dead entries. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from tokenbus.bus.dead_letters import StoredDeadLetter
from tokenbus.bus.topology import CHAINED, INTAKE
from tokenbus.events import decisions
from tokenbus_services.cli.doctor.checks import NEARLY, Finding
from tokenbus_services.cli.render.event_text import size
from tokenbus_services.runtime.deployment_snapshot import DeploymentSnapshot, QueueFacts, StageFacts
from tokenbus_services.runtime.mcp_tool_cache import REFRESH_S, TTL_S

GROWS = 0.1
"""Fraction of the lag limit above which a growing lag is reported."""
OFTEN = 3
"""Deliveries of an entry that one or two lost workers can explain."""


class StuckFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of a group that workers took and did not finish."""

    abandoned: int = 0
    """Entries that no worker renews or takes over."""
    often: int = 0
    """Entries delivered more than `OFTEN` times."""
    example: str = ""
    """One of those, as stream and entry."""


def check_stage(stage: StageFacts, earlier: StageFacts, *, lag_limit: int, chained: bool = False) -> Finding:
    """``earlier``: the same stage a moment ago. ``lag_limit``: bytes of lag at which the stage before this one
    stops. ``chained``: whether pipelines do the work of this deployment's stages.
    """
    orphans = [n for n, p in enumerate(stage.partitions) if p.owner is None]
    behind = [n for n, p in enumerate(stage.partitions) if p.lag_bytes >= lag_limit]
    workers = len(stage.workers)
    start = f"start more with `tokenbus worker {service_of(stage.name, chained=chained)}`"
    if orphans:
        says = f"no worker owns partition {_numbers(orphans)}; {workers} at work"
        return Finding(level="wrong", about=stage.name, says=says, todo=start)
    if behind:
        says = f"partition {_numbers(behind)} is more than {size(lag_limit)} behind: the stage before it waits"
        return Finding(level="wrong", about=stage.name, says=says, todo=start)
    growing = [
        n
        for n, (now, before) in enumerate(zip(stage.partitions, earlier.partitions, strict=True))
        if now.lag_bytes > max(before.lag_bytes, GROWS * lag_limit)
    ]
    if growing:
        says = f"partition {_numbers(growing)} falls further behind: {size(stage.lag_bytes)} in all"
        return Finding(level="note", about=stage.name, says=says, todo=start)
    entries = "" if stage.lag_entries is None else f"{stage.lag_entries} entries, "
    lag = f"{entries}{size(stage.lag_bytes)} behind"
    says = f"{workers} at work, all {len(stage.partitions)} partitions owned, {lag}"
    if workers > len(stage.partitions):
        says += f"; {workers - len(stage.partitions)} of them idle, for a partition has one owner"
    return Finding(level="ok", about=stage.name, says=says)


def check_no_policy_worker(stage: StageFacts, *, meant: bool) -> Iterator[Finding]:
    """Check the policy stage if none of its workers is alive. ``meant``: whether these settings have policies."""
    if not stage.lag_bytes and not meant:
        return
    waiting = f"{size(stage.lag_bytes)} of drafts wait, and " if stage.lag_bytes else ""
    says = f"{waiting}no policy worker runs: runs that have policies wait, or end when their patience does"
    yield Finding(level="wrong", about=stage.name, says=says, todo="start one with `tokenbus worker policy`")


def service_of(group: str, *, chained: bool) -> str:
    """The service whose workers are this group's members. ``chained``: whether pipelines are."""
    service = "fetcher" if group == INTAKE else group
    return "pipeline" if chained and service in CHAINED else service


def check_any_worker(now: DeploymentSnapshot, *, writes_fail: bool = False) -> Iterator[Finding]:
    """Report if no worker of any service is alive: the one cause of everything that waits.

    ``writes_fail``: the server refuses writes, so workers that run cannot renew their heartbeats.
    """
    if any(group.workers for group in (*now.stages, *now.queues)):
        return
    if writes_fail:
        says = "none is seen: workers cannot renew their heartbeats while the server takes no writes"
        todo = "first fix the server; workers that still run take their partitions again"
    else:
        says, todo = "no worker of any service is alive: published requests wait", "start `tokenbus up`, or the workers"
    yield Finding(level="wrong", about="workers", says=says, todo=todo)


def check_pipelines(now: DeploymentSnapshot, *, chained: bool) -> Iterator[Finding]:
    """Say how many pipelines there are, and whether the settings, which ``chained`` says, want other workers."""
    count = len(now.pipelines)
    if count:
        yield Finding(level="ok", about="pipeline", says=f"{count} at work, each a fetcher, normalizer and parser")
    elif chained and any(group.workers for group in (*now.stages, *now.queues) if group.name in CHAINED):
        says = "stages.chained is set, but fetchers, normalizers and parsers run as processes of their own"
        yield Finding(level="note", about="pipeline", says=says, todo="start `tokenbus worker pipeline` in their place")


def check_gateways(gateways: Sequence[str], *, meant: bool) -> Iterator[Finding]:
    """Check that a gateway runs. ``meant``: whether these settings have the table [gateway]."""
    if gateways:
        yield Finding(level="ok", about="gateway", says=f"{len(gateways)} at work")
    elif meant:
        says = "none runs, though the settings have [gateway]"
        yield Finding(level="wrong", about="gateway", says=says, todo="start one with `tokenbus worker gateway`")


def check_queue(
    queue: QueueFacts, stuck: StuckFacts, *, chained: bool = False, needed: bool = True
) -> Iterator[Finding]:
    """Check one group of work queues. ``chained``: as for a stage. ``needed``: whether these settings want a worker,
    though nothing may wait.
    """
    at_work = len(queue.workers) or "none"
    state = f"{at_work} at work, {queue.waiting} waiting, {queue.held} in progress"
    start = f"start one with `tokenbus worker {service_of(queue.name, chained=chained)}`"
    if stuck.abandoned:
        says = f"{stuck.abandoned} entries of lost workers are not taken over; {state}"
        yield Finding(level="wrong", about=queue.name, says=says, todo=start)
    elif not queue.workers and not needed and not queue.waiting:
        yield Finding(level="ok", about=queue.name, says=f"{state}, and the settings need none")
    elif not queue.workers:
        yield Finding(level="wrong", about=queue.name, says=state, todo=start)
    else:
        yield Finding(level="ok", about=queue.name, says=state)
    if stuck.often:
        yield Finding(
            level="wrong",
            about=queue.name,
            says=f"{stuck.often} entries were handed out more than {OFTEN} times, {stuck.example} for one: "
            "their workers die, or are killed",
            todo="look why workers end: memory, restarts, or what the entry asks for",
        )


def check_room(waiting: int, *, bound: int) -> Iterator[Finding]:
    """Check the inbound stream against its limit, at which publishing is refused."""
    if waiting >= NEARLY * bound:
        yield Finding(
            level="wrong",
            about="requests",
            says=f"{waiting} of at most {bound} requests wait to be taken in",
            todo="start more with `tokenbus worker fetcher`",
        )


def check_decisions(decided: Sequence[bytes], *, minutes: int) -> Iterator[Finding]:
    """Report policies that fail. ``decided``: encoded decisions of the last ``minutes``."""
    errors: dict[str, list[str]] = {}
    for data in decided:
        with suppress(msgspec.DecodeError):
            decision = decisions.decoder.decode(data)
            if decision.action == "error":
                # The class alone: an exception's text may quote the run.
                errors.setdefault(decision.policy, []).append((decision.reason or "").partition(":")[0][:80])
    for policy, reasons in sorted(errors.items()):
        why = ", ".join(sorted(set(filter(None, reasons)))[:3])
        yield Finding(
            level="wrong",
            about=f"policy {policy}",
            says=f"failed {len(reasons)} times in the last {minutes} minutes" + (f": {why}" if why else ""),
            todo="see `policy_failed` in the policy workers' log; a service that the policy calls may be unavailable",
        )


def check_dead(entries: int, newest: Sequence[StoredDeadLetter]) -> Iterator[Finding]:
    """Report dead letters; they are not a state of the bus, but their cause may be. ``newest``: at most one."""
    for dead in newest:
        newest_one = f"{dead.id} of {dead.entry.stage}: {dead.entry.reason}"
        yield Finding(
            level="note",
            about="dead",
            says=f"{entries} entries could not be worked; the newest, {newest_one}",
            todo="look with `tokenbus dead show`, fix the cause, then `tokenbus dead retry` or `drop`",
        )


def check_listing(server: str, left_s: int | None) -> Finding:
    """Check the tool list of an MCP server. ``left_s``: how long the list stays valid; None if there is none."""
    about = f"mcp {server}"
    if left_s is None:
        return Finding(
            level="wrong",
            about=about,
            says="no tool executor lists its tools: requests that name one are refused",
            todo="see that `tokenbus worker tools` runs with these settings; its log says why there is no list",
        )
    age = max(0, TTL_S - left_s)
    if age > 2 * REFRESH_S:
        return Finding(
            level="note",
            about=about,
            says=f"its tools were listed {age} s ago, and should be every {REFRESH_S:.0f} s",
            todo="see whether a tool executor runs with these settings",
        )
    return Finding(level="ok", about=about, says=f"its tools were listed {age} s ago")


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
