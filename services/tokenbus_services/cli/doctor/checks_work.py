"""The checks of `tokenbus doctor` on the bus at work: stages, queues, stuck and dead entries. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tokenbus.bus.dead_letters import StoredDeadLetter
from tokenbus.bus.topology import CHAINED, INTAKE
from tokenbus.errors import SettingsError
from tokenbus.events import decisions
from tokenbus.events.error_info import ErrorClass, ErrorInfo
from tokenbus.providers import registry
from tokenbus_services.blobs.http import FULL
from tokenbus_services.cli.doctor.checks import NEARLY, Finding
from tokenbus_services.cli.inspect import BlobFailure, FailingModel, SilentModel
from tokenbus_services.cli.render.event_text import failure, size, time_span
from tokenbus_services.redaction.known_secrets import key_in_file
from tokenbus_services.runtime.deployment_snapshot import DeploymentSnapshot, QueueFacts, StageFacts
from tokenbus_services.runtime.mcp_tool_cache import REFRESH_S, TTL_S, hint
from tokenbus_services.settings import DEFAULT_PROVIDERS, Settings

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


# The checks of `tokenbus doctor` on what providers and the blob store failed lately. Pure.

LOOK_AT_LOG = "look at `attempt_ended` in the log of the parsers"

MOST_MODELS = 5
"""Maximum failing models of one provider that have a finding each."""


def check_failures(models: Iterable[FailingModel]) -> Iterator[Finding]:
    """Report models whose calls fail: for each provider the worst. ``models``: sorted, the worst first."""
    by_provider: dict[str, list[FailingModel]] = {}
    for model in models:
        by_provider.setdefault(model.failure.provider, []).append(model)
    for provider, failing in by_provider.items():
        yield from map(check_failing, failing[:MOST_MODELS])
        if more := failing[MOST_MODELS:]:
            calls = sum(model.all_failed for model in more)
            says = f"{calls} calls of {len(more)} other models failed too"
            yield Finding(level="note", about=f"provider {provider}", says=says)


def check_failing(model: FailingModel) -> Finding:
    """Report a model whose calls fail. It is an error if most calls still fail."""
    how = model.failure
    says = f"{how.model}: {model.failed} of {model.attempts} calls failed with {failure(how)}"
    if model.all_failed > model.failed:
        says += f", {model.all_failed - model.failed} in other ways"
    says += f"; the first {time_span(model.since_ms)} ago, the last {time_span(model.last_ms)} ago"
    if model.is_over:
        says += ", and calls have ended well after it"
    kind: ErrorClass = how.kind  # pyright: ignore[reportAssignmentType]
    advice = hint(how.provider, ErrorInfo(code=how.code, kind=kind, message="", status=how.status))
    level = "wrong" if model.is_down else "note"
    return Finding(level=level, about=f"provider {how.provider}", says=says, todo=advice or LOOK_AT_LOG)


def check_silent(model: SilentModel) -> Finding:
    """Report calls without an answer: an error if they are several, and no other is answered."""
    answered = f"{model.answered} others ended well since" if model.answered else "no other ended well since"
    return Finding(
        level="wrong" if model.is_down else "note",
        about=f"provider {model.provider}",
        says=f"{model.model}: {model.calls} calls have no byte of an answer, the oldest for "
        f"{time_span(model.since_ms)}; {answered}",
        todo=f"look at the provider's state, or lower first_event_timeout_s in [providers.{model.provider}] and set "
        "a fallback",
    )


def check_blob_failure(found: BlobFailure) -> Finding:
    """Report a store that could not keep or give a blob lately."""
    todo = FULL.get(found.code, "look at `blob_store_failed` in the log of the blob service")
    says = f"the store failed a request with {found.code} {time_span(1000 * found.ago_s)} ago"
    return Finding(level="wrong", about="blobs", says=says, todo=todo)


# The checks of `tokenbus doctor` on the settings of providers: their keys and addresses. Pure.


def check_providers(settings: Settings, env: Mapping[str, str]) -> Iterator[Finding]:
    """Check that each provider's key is in this environment. Names variables, never their values."""
    for name, provider in sorted(settings.providers.items()):
        meant = provider is not DEFAULT_PROVIDERS.get(name)
        about = f"provider {name}"
        try:
            api = registry.get(provider.api)
        except SettingsError as e:
            if meant:
                yield Finding(level="wrong", about=about, says=e.problem, todo="choose another api")
            continue
        variable = api.default_key_env if provider.api_key_env is None else provider.api_key_env
        path = provider.api_key_file or (env.get(f"{variable}_FILE") if variable else None)
        if provider.auth:
            yield Finding(level="ok", about=about, says=f"is authorised by {provider.auth}")
        elif path:
            there = any(key_in_file(path))
            # Deployments name the files of all keys that they may have: one that does not exist is none that was lost.
            wanted = meant or provider.api_key_file is not None or Path(path).exists()
            todo = "" if there else "put the key there, alone, readable for this user"
            todo += ", to use this provider" if todo and not wanted else ""
            says = f"{path} holds {'a' if there else 'no'} key"
            yield Finding(level="ok" if there else "wrong" if wanted else "note", about=about, says=says, todo=todo)
        elif not variable:
            yield Finding(level="ok", about=about, says="needs no key")
        elif env.get(variable):
            yield Finding(level="ok", about=about, says=f"{variable} holds a key")
        else:
            yield Finding(
                level="wrong" if meant else "note",
                about=about,
                says=f"{variable} holds no key here",
                todo=f"set {variable} where fetchers run, to use this provider",
            )


def check_reach(name: str, url: str, *, problem: str | None) -> Finding:
    """``problem``: why the provider's address did not answer at all; None if it gave any answer."""
    about = f"provider {name}"
    if problem is None:
        return Finding(level="ok", about=about, says=f"answers at {url}")
    todo = "fix base_url, or check this machine's name service, firewall and proxy"
    return Finding(level="wrong", about=about, says=f"no answer from {url}: {problem}", todo=todo)
