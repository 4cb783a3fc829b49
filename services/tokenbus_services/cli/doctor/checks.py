"""The checks of `tokenbus doctor` on the server and the deployment: what is wrong, where, and what to do. Pure.

`checks_work` covers the bus at work, `checks_failures` what failed lately, `checks_providers` the providers' settings,
`checks_outside` the other surroundings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from redis.exceptions import AuthenticationError

from tokenbus.bus.layout import FIELDS, layout_of
from tokenbus.bus.server.connection_fixes import MAX_VALUE_BYTES
from tokenbus.bus.server.server import ServerInfo
from tokenbus.errors import DeploymentMismatch, ServerError, ServerTooOld, ServerUnavailable, SettingsError
from tokenbus_services.cli.render.event_text import size
from tokenbus_services.runtime.deployment_snapshot import REPLICAS, NodeFacts
from tokenbus_services.settings import Settings

Level = Literal["ok", "note", "wrong"]

NEARLY = 0.8
"""Fraction of a limit above which it is reported."""
SKEW_MS = 2_000
"""Clock difference that does no harm: retry delays, deadlines and event times use the workers' clocks."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    level: Level
    about: str
    says: str
    todo: str | None = None


def check_server(
    url: str, info: ServerInfo, *, persistent: bool | None, value_bytes: int | None = None
) -> Iterator[Finding]:
    """``persistent``, and ``value_bytes``, the largest value it takes: None if the server does not say."""
    version = ".".join(map(str, info.version))
    yield Finding(level="ok", about="server", says=f"{info.name} {version} at {url}")
    if info.eviction != "noeviction":
        yield Finding(
            level="wrong",
            about="eviction",
            says=f"maxmemory-policy is {info.eviction}: under memory pressure the server drops unread data",
            todo="set maxmemory-policy noeviction on the server",
        )
    if persistent is False:
        yield Finding(
            level="note",
            about="persistence",
            says="the server keeps nothing on disk: its restart loses open runs and requests",
            todo="set appendonly yes on the server, unless that loss is meant",
        )
    if value_bytes is not None and value_bytes > MAX_VALUE_BYTES:
        yield Finding(
            level="note",
            about="large values",
            says=f"the server takes values of {size(value_bytes)}: one such request holds it up for everybody",
            todo=f"set proto-max-bulk-len {MAX_VALUE_BYTES // 2**20}mb on the server",
        )


def check_types(found: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    """``found``: shared keys of the wrong type, with their actual and their required type."""
    for key, (kind, meant) in found.items():
        yield Finding(
            level="wrong",
            about="keys",
            says=f"{key} is a {kind}, and must be a {meant}: what needs it waits, its whole partition for one",
            todo=f"stop what wrote there, then `RENAME {key} {key}:wrong`, or `DEL {key}`; it is created again",
        )


def check_node(node: NodeFacts, *, here_ms: int, replicas: int = 0) -> Iterator[Finding]:
    """``here_ms``: Unix time by this machine's clock when the node was asked for its own. ``replicas``: how many
    `[durability]` waits for.
    """
    if node.memory_limit and node.memory_bytes >= NEARLY * node.memory_limit:
        yield Finding(
            level="wrong",
            about="memory",
            says=f"{node.name} has {size(node.memory_bytes)} of its maxmemory {size(node.memory_limit)} in use: "
            "at the limit it takes no more requests",
            todo="raise maxmemory, or shorten what retention.* keeps",
        )
    if node.disk_fault:
        yield Finding(
            level="wrong",
            about="disk",
            says=f"{node.name} could not write to its disk: {node.disk_fault}",
            todo="make room on the server's disk, or fix its permissions; its log says more",
        )
    connected = node.gauges.get(REPLICAS)
    if connected is not None and connected < replicas:
        yield Finding(
            level="wrong",
            about="replicas",
            says=f"{node.name} has {connected:.0f} replicas, and [durability] waits for {replicas}: "
            "durable requests are refused, and such runs do not end",
            todo="bring the replicas back, or lower durability.replicas",
        )
    skew = here_ms - node.now_ms
    if abs(skew) > SKEW_MS:
        off = f"{abs(skew) / 1000:.1f} s {'ahead of' if skew > 0 else 'behind'}"
        yield Finding(
            level="wrong",
            about="clock",
            says=f"this machine's clock is {off} that of {node.name}: deadlines and retries come early or late",
            todo="let both follow NTP",
        )


def check_rights(user: str, denied: Sequence[str]) -> Iterator[Finding]:
    """``denied``: commands that the server would refuse to this user, in its own words."""
    if denied:
        more = f" (and {len(denied) - 1} more)" if len(denied) > 1 else ""
        yield Finding(
            level="note",
            about="rights",
            says=f"services with these settings could not work, for {user!r} lacks rights: {denied[0]}{more}",
            todo="grant them with ACL SETUSER, or leave it so if this user only looks",
        )


def not_allowed(about: str, refusal: str) -> Finding:
    """The user may not read what this check needs."""
    return Finding(
        level="note",
        about=about,
        says=f"could not be looked at: {refusal}",
        todo="grant the user of these settings that right, with ACL SETUSER",
    )


def check_deployment(settings: Settings, meta: Mapping[str, str]) -> Iterator[Finding]:
    """``meta``: what the deployment has agreed on; empty if no service has started yet."""
    if not meta:
        yield Finding(
            level="wrong",
            about="deployment",
            says=f"no service has ever started with prefix {settings.prefix!r} on this server",
            todo="start `tokenbus up`, or the workers; or set the prefix that they have",
        )
        return
    try:
        layout = layout_of([meta[name].encode() if name in meta else None for name in FIELDS])
        if settings.partitions not in layout.ever:
            raise DeploymentMismatch("partitions", str(settings.partitions), str(layout.placing))
    except DeploymentMismatch as e:
        yield Finding(
            level="wrong",
            about="deployment",
            says=f"{e.name} is {e.ours} here but {e.theirs} on the server",
            todo="use one version" if e.name == "wire_version" else "set the same partitions everywhere",
        )
        return
    says = f"{layout.placing} partitions, wire version {meta['wire_version']}"
    if len(layout.numbers) > 1:
        says += f"; runs of {', '.join(map(str, layout.numbers[1:]))} partitions are found too"
    yield Finding(level="ok", about="deployment", says=says)
    if settings.partitions != layout.placing:
        yield Finding(
            level="note",
            about="deployment",
            says=f"the settings say {settings.partitions} partitions; an earlier number, so all works",
            todo=f"set partitions = {layout.placing}",
        )


def one_hint_per_cause(findings: Iterable[Finding]) -> list[Finding]:
    """The findings. A hint is shown only with the first finding that has it, because one step fixes them all."""
    given: set[str] = set()
    shown: list[Finding] = []
    for finding in findings:
        again = finding.todo in given
        given |= {finding.todo} if finding.todo else set()
        shown.append(msgspec.structs.replace(finding, todo=None) if again else finding)
    return shown


def none_wrong(findings: Iterable[Finding]) -> bool:
    return all(finding.level != "wrong" for finding in findings)


def server_todo(error: ServerError | SettingsError) -> str:
    """Return what to do about a server that cannot be used."""
    if isinstance(error, SettingsError) and error.where == "TOKENBUS_REDIS_URL":
        return "run doctor in the directory of `tokenbus up`, or set TOKENBUS_REDIS_URL to your deployment's server"
    if isinstance(error, SettingsError):
        return "fix the url: redis://, rediss:// or unix://, with +sentinel or +cluster after the scheme for these"
    if isinstance(error, ServerTooOld):
        return f"run {error.minimum} or newer of the server"
    cause = error.__cause__
    if isinstance(cause, AuthenticationError) or str(cause).startswith(("NOAUTH", "WRONGPASS", "Authentication")):
        return "fix user and password, in the url or in TOKENBUS_REDIS_PASSWORD; the server itself answers"
    if isinstance(error, ServerUnavailable) and error.server.startswith(("rediss", "valkeys")):
        return "start it, or fix its url; if this port speaks no TLS, the scheme is redis://"
    return "start it, or fix its url; if this port speaks TLS, the scheme is rediss://"
