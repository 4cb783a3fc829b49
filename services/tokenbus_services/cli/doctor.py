"""`tokenbus doctor`: gathers the facts of a deployment, and shows what `checks` makes of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from tokenbus.bus.keys import DATA_FIELD, InternalTopic, Keys
from tokenbus.bus.server import Server, translated
from tokenbus.errors import ServerError, SettingsError
from tokenbus_services import settings as configuration
from tokenbus_services.cli import checks, ending, reaching, terminal
from tokenbus_services.cli.checks import DeadFacts, Finding, LeaseFacts, QueueFacts, StageFacts
from tokenbus_services.cli.probe import status_of
from tokenbus_services.settings import Settings

STAGES: tuple[tuple[str, InternalTopic], ...] = (("normalizer", "raw"), ("parser", "events"))
QUEUES: tuple[tuple[str, InternalTopic], ...] = (("fetcher", "turns"), ("tools", "tools"))
SHOWS_IDLE = (7, 2)
"""From here on a read that finds nothing counts as a consumer's sign of life (https://redis.io/commands/xinfo-consumers)."""
ALIVE_MS = 5_000
"""A worker asks for work, or says that it lives, at least once a second."""
STUCK_MS = 15_000
"""A lost worker's entry is taken over after about five seconds."""

_LEASE = """
local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)
local h = redis.call('HMGET', KEYS[1], 'owner', 'until', 'arrived', 'done')
local owned = h[1] and tonumber(h[2] or '0') > now
return {owned and 1 or 0, tonumber(h[3] or '0') - tonumber(h[4] or '0')}
"""


class _Dead(msgspec.Struct):
    """What is told of a `DeadEntry`."""

    stage: str
    reason: str


def run(*, as_json: bool) -> int:
    """Look, and show. The exit code."""
    findings = asyncio.run(examine())
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        _show(findings)
    return 0 if checks.all_well(findings) else ending.OTHER


async def examine() -> list[Finding]:
    """All findings. A server that does not answer is one too."""
    try:
        settings = configuration.load()
    except SettingsError as e:
        return [Finding(level="wrong", about="settings", says=str(e), todo="mend it: nothing starts with these")]
    found = [Finding(level="ok", about="settings", says=os.environ.get("TOKENBUS_CONFIG") or "defaults")]
    try:
        settings = reaching.with_server(settings)
        assert settings.redis_url
        async with Server(settings.redis_url) as server:
            with translated(server):
                found += await _bus(server, settings)
    except (ServerError, SettingsError) as e:
        found.append(Finding(level="wrong", about="server", says=str(e), todo="start it, or mend its url"))
    found += checks.check_providers(settings, os.environ)
    url = settings.blobs.service_url
    found.append(checks.check_blobs(url, problem=await _page(f"{url.rstrip('/')}/health")))
    return found


async def _bus(server: Server, settings: Settings) -> list[Finding]:
    keys, client = settings.keys, server.client
    info = await server.check()
    found = [*checks.check_server(server.url.safe, info, persistent=await _persistent(server))]
    meta: dict[bytes, bytes] = await client.hgetall(keys.meta)
    agreed = {name.decode(): value.decode() for name, value in meta.items()}
    found += checks.check_deployment(settings, agreed)
    if agreed.get("partitions") != str(keys.partitions):
        return found  # its keys are others than these settings say
    for name, topic in STAGES:
        stage = await _stage(server, keys, name, topic)
        found.append(checks.check_stage(stage, lag_limit=settings.limits.lag_bytes))
    idle_shown = info.version >= SHOWS_IDLE
    found.append(checks.check_queue(await _queue(server, "intake", "fetcher", [keys.requests], idle_shown)))
    for name, topic in QUEUES:
        streams = [keys.topic(p, topic) for p in range(keys.partitions)]
        found.append(checks.check_queue(await _queue(server, name, name, streams, idle_shown)))
    found += checks.check_room(await client.xlen(keys.requests), bound=settings.limits.inbound_entries)
    found += checks.check_dead(await _dead(server, keys), key=keys.dead)
    return found


async def _persistent(server: Server) -> bool | None:
    """Whether what is written survives a restart of the server; None where it does not tell, as many hosted ones do."""
    if server.topology == "cluster":
        return None
    info: dict[str, Any] = await server.client.info("persistence")
    if info.get("aof_enabled"):
        return True
    try:
        save: dict[bytes | str, bytes] = await server.client.config_get("save")
    except ResponseError:
        return None
    return any(save.values())


async def _stage(server: Server, keys: Keys, name: str, topic: InternalTopic) -> StageFacts:
    leases: list[LeaseFacts] = []
    for partition in range(keys.partitions):
        owned, lag = await server.client.execute_command("EVAL", _LEASE, 1, keys.lease(partition, name))
        groups = await _groups(server, keys.topic(partition, topic))
        entries = next((g.get("lag") for g in groups if g["name"] == name.encode()), None)
        leases.append(LeaseFacts(owned=bool(owned), lag_bytes=max(0, lag), lag_entries=entries))
    return StageFacts(name=name, workers=await server.client.zcard(keys.members(name)), leases=leases)


async def _queue(server: Server, group: str, service: str, streams: list[str], idle_shown: bool) -> QueueFacts:
    client = server.client
    alive = set[bytes]()
    waiting = held = stuck = 0
    for stream in streams:
        pending = next((g["pending"] for g in await _groups(server, stream) if g["name"] == group.encode()), None)
        waiting += await client.xlen(stream) - (pending or 0)  # what is done is deleted
        if pending is None:
            continue
        held += pending
        consumers: list[dict[str, Any]] = await client.xinfo_consumers(stream, group)
        alive.update(c["name"] for c in consumers if c["idle"] < ALIVE_MS)
        if pending:
            stuck += len(await client.xpending_range(stream, group, "-", "+", 1_000, idle=STUCK_MS))
    workers = len(alive) if alive or idle_shown else None
    return QueueFacts(name=group, service=service, workers=workers, waiting=waiting, held=held, stuck=stuck)


async def _groups(server: Server, stream: str) -> list[dict[str, Any]]:
    """The groups of a stream that may not be there."""
    try:
        return await server.client.xinfo_groups(stream)
    except ResponseError:
        return []


async def _dead(server: Server, keys: Keys) -> DeadFacts:
    newest: list[tuple[bytes, dict[bytes, bytes]]] = await server.client.xrevrange(keys.dead, count=1)
    if not newest:
        return DeadFacts(entries=0)
    entry = msgspec.json.decode(newest[0][1][DATA_FIELD.encode()], type=_Dead)
    return DeadFacts(entries=await server.client.xlen(keys.dead), newest=f"{entry.stage}: {entry.reason}")


async def _page(url: str) -> str | None:
    """Why the page does not answer well; None where it does."""
    try:
        status = await status_of(url)
    except (OSError, ValueError) as e:
        return str(e) or type(e).__name__
    return None if status == 200 else f"HTTP {status}"


def _show(findings: list[Finding]) -> None:
    if console := terminal.console():
        console.print(_table(findings))
    else:
        for line in lines(findings):
            print(line)


def lines(findings: list[Finding]) -> Iterator[str]:
    """A line for each finding, and one for what to do."""
    for finding in findings:
        yield f"{finding.level:5} {finding.about}: {finding.says}"
        if finding.todo:
            yield f"      → {finding.todo}"


def _table(findings: list[Finding]) -> Any:
    from rich.table import Table
    from rich.text import Text

    signs = {"ok": ("✓", "green"), "note": ("•", "yellow"), "wrong": ("✗", "bold red")}
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        sign, style = signs[finding.level]
        says = Text(terminal.safe(finding.says))
        if finding.todo:
            says.append(f"\n{finding.todo}", style="cyan")
        table.add_row(Text(sign, style=style), Text(finding.about, style="bold"), says)
    return table
