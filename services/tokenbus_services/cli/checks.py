"""What `tokenbus doctor` makes of the facts: each finding says what is wrong, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from tokenbus.bus.keys import WIRE_VERSION
from tokenbus.bus.server import ServerInfo
from tokenbus.errors import SettingsError
from tokenbus.providers import registry
from tokenbus_services.settings import DEFAULT_PROVIDERS, Settings

Level = Literal["ok", "note", "wrong"]

NEARLY = 0.8
"""Part of a bound from which on it is worth a word."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was looked at."""

    level: Level
    about: str
    says: str
    todo: str | None = None


class LeaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of an ordered stage."""

    owned: bool
    lag_bytes: int = 0
    lag_entries: int | None = None
    """None where the server does not know."""


class StageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An ordered stage."""

    name: str
    workers: int
    leases: list[LeaseFacts]


class QueueFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A work queue, over all its streams."""

    name: str
    service: str
    workers: int | None
    """None where nobody is seen on a server that does not show idle workers."""
    waiting: int
    """Entries that nobody has taken."""
    held: int
    """Entries in the hands of workers."""
    stuck: int
    """Of those, entries that nobody keeps alive and nobody takes over."""


class DeadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The dead stream."""

    entries: int
    newest: str = ""
    """Stage and reason of the newest one."""


def check_server(url: str, info: ServerInfo, *, persistent: bool | None) -> Iterator[Finding]:
    """``persistent``: None where the server does not say."""
    version = ".".join(map(str, info.version))
    yield Finding(level="ok", about="server", says=f"{info.name} {version} at {url}")
    if info.eviction != "noeviction":
        yield Finding(
            level="wrong",
            about="eviction",
            says=f"maxmemory-policy is {info.eviction}: under memory pressure the server drops what nobody has read",
            todo="set maxmemory-policy noeviction on the server",
        )
    if persistent is False:
        yield Finding(
            level="note",
            about="persistence",
            says="the server keeps nothing on disk: its restart loses open runs and requests",
            todo="set appendonly yes on the server, unless that loss is meant",
        )


def check_deployment(settings: Settings, meta: Mapping[str, str]) -> Iterator[Finding]:
    """``meta``: what the deployment has agreed on; empty where no service has started yet."""
    if not meta:
        yield Finding(
            level="wrong",
            about="deployment",
            says=f"no service has ever started with prefix {settings.prefix!r} on this server",
            todo="start `tokenbus up`, or the workers; or set the prefix that they have",
        )
        return
    ours = {"partitions": str(settings.partitions), "wire_version": str(WIRE_VERSION)}
    for name, value in ours.items():
        if meta.get(name) != value:
            yield Finding(
                level="wrong",
                about="deployment",
                says=f"{name} is {value} here but {meta.get(name)} on the server",
                todo="use one version" if name == "wire_version" else "set the same partitions everywhere",
            )
    if all(meta.get(name) == value for name, value in ours.items()):
        yield Finding(
            level="ok", about="deployment", says=f"{settings.partitions} partitions, wire version {WIRE_VERSION}"
        )


def check_stage(stage: StageFacts, *, lag_limit: int) -> Finding:
    """``lag_limit``: bytes of lag at which the stage before this one stops."""
    orphans = [n for n, lease in enumerate(stage.leases) if not lease.owned]
    behind = [n for n, lease in enumerate(stage.leases) if lease.lag_bytes >= lag_limit]
    start = f"start more with `tokenbus worker {stage.name}`"
    if orphans:
        return Finding(
            level="wrong",
            about=stage.name,
            says=f"nobody owns partition {_numbers(orphans)}; {stage.workers} at work",
            todo=start,
        )
    if behind:
        return Finding(
            level="wrong",
            about=stage.name,
            says=f"partition {_numbers(behind)} is more than {lag_limit} bytes behind: what feeds it waits",
            todo=start,
        )
    entries = sum(lease.lag_entries or 0 for lease in stage.leases)
    size = sum(lease.lag_bytes for lease in stage.leases)
    says = f"{stage.workers} at work, all {len(stage.leases)} partitions owned, {entries} entries ({size} bytes) behind"
    return Finding(level="ok", about=stage.name, says=says)


def check_queue(queue: QueueFacts) -> Finding:
    """One work queue."""
    at_work = "nobody" if not queue.workers else queue.workers
    state = f"{at_work} at work, {queue.waiting} waiting, {queue.held} in hand"
    start = f"start one with `tokenbus worker {queue.service}`"
    if queue.stuck:
        says = f"{queue.stuck} entries of lost workers are not taken over; {state}"
        return Finding(level="wrong", about=queue.name, says=says, todo=start)
    if queue.workers == 0 or (queue.workers is None and queue.waiting):
        return Finding(level="wrong", about=queue.name, says=state, todo=start)
    if queue.workers is None:
        return Finding(level="note", about=queue.name, says="nothing to do; before 7.2 a server shows no idle workers")
    return Finding(level="ok", about=queue.name, says=state)


def check_room(waiting: int, *, bound: int) -> Iterator[Finding]:
    """The inbound stream against its bound: at the bound, publishing is refused."""
    if waiting >= NEARLY * bound:
        yield Finding(
            level="wrong",
            about="requests",
            says=f"{waiting} of at most {bound} requests wait to be taken in",
            todo="start more with `tokenbus worker fetcher`",
        )


def check_dead(dead: DeadFacts, *, key: str) -> Iterator[Finding]:
    """Poison is no state of the bus, but its cause may be."""
    if dead.entries:
        yield Finding(
            level="note",
            about="dead",
            says=f"{dead.entries} entries could not be worked; the newest: {dead.newest}",
            todo=f"read {key}; delete it when the cause is found",
        )


def check_providers(settings: Settings, env: Mapping[str, str]) -> Iterator[Finding]:
    """Whether each provider's key is in this environment. Names variables, never what they hold."""
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
        if not variable:
            yield Finding(level="ok", about=about, says="needs no key")
        elif env.get(variable):
            yield Finding(level="ok", about=about, says=f"{variable} holds a key")
        else:
            yield Finding(
                level="wrong" if meant else "note",
                about=about,
                says=f"{variable} holds no key here",
                todo="set it where fetchers run, to use this provider",
            )


def check_blobs(url: str, *, problem: str | None) -> Finding:
    """``problem``: why the blob service did not answer; None where it did."""
    if problem is None:
        return Finding(level="ok", about="blobs", says=f"answers at {url}")
    todo = "start it with `tokenbus worker blobs`, or set blobs.service_url"
    return Finding(level="wrong", about="blobs", says=f"{url}: {problem}", todo=todo)


def all_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing is wrong."""
    return all(finding.level != "wrong" for finding in findings)


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
