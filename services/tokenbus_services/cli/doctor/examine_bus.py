"""Gathers the facts about the server and the bus on it, and has them checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec
from redis.exceptions import NoPermissionError, ResponseError

from tokenbus.bus.activity import SLOT_MS
from tokenbus.bus.activity_slots import ActivitySlots
from tokenbus.bus.dead_letters import newest_dead_letters
from tokenbus.bus.keys import TOPICS, InternalTopic, Keys
from tokenbus.bus.layout import learn
from tokenbus.bus.scripts import BEGUN
from tokenbus.bus.server.server import Server, ServerInfo, translated
from tokenbus.bus.topology import INTAKE, POLICY, QUEUES, RECORDER
from tokenbus.errors import ServerUnavailable
from tokenbus_services.cli.doctor import checks, checks_work
from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.cli.doctor.checks_work import OFTEN, StuckFacts
from tokenbus_services.cli.inspect.provider_facts import failing_models, silent_models
from tokenbus_services.cli.service_registry import runs_tools
from tokenbus_services.runtime.deployment_snapshot import DeploymentReader, DeploymentSnapshot, read_nodes
from tokenbus_services.settings import Settings

STUCK_MS = 15_000
"""A lost worker's entry is taken over after about five seconds."""
LATELY_MS = 600_000
"""How old a policy's decision or a provider's failure may be."""
MOST_DECISIONS = 100
"""Maximum decisions read of each partition, the newest."""
MOST_PENDING = 1_000
"""Maximum entries of one stream that are checked individually."""
GROWTH_S = 1.0
"""How long a lag is observed, if there is one."""


async def examine_bus(server: Server, settings: Settings) -> AsyncIterator[Finding]:
    """Run each part on its own: a missing permission for one does not hide the others."""
    keys, stop = settings.keys, False
    parts: tuple[tuple[str, Callable[[], AsyncIterator[Finding]]], ...] = (
        ("server", lambda: _server(server)),
        ("rights", lambda: _rights(server, keys)),
        ("keys", lambda: _types(server, keys)),
        ("deployment", lambda: _deployment(server, settings)),
        ("work", lambda: _work(server, settings)),
        ("providers", lambda: _providers(server, keys)),
        ("policies", lambda: _policies(server, keys)),
        ("dead", lambda: _dead(server, keys)),
        ("mcp", lambda: _listings(server, settings)),
    )
    for about, part in parts:
        if stop:
            return
        try:
            async for finding in part():
                # With other partitions its keys differ from these settings; keys of other types cannot be read.
                stop = stop or (about in ("deployment", "keys") and finding.level == "wrong")
                yield finding
        except (NoPermissionError, ServerUnavailable) as e:
            refusal = e if isinstance(e, NoPermissionError) else e.__cause__
            if not isinstance(refusal, NoPermissionError):
                raise
            yield checks.not_allowed(about, str(refusal))


async def _server(server: Server) -> AsyncIterator[Finding]:
    info: ServerInfo = await server.check()
    most = await _configured(server, "proto-max-bulk-len")
    value_bytes = int(most) if most else None
    for finding in checks.check_server(
        server.url.safe, info, persistent=await _persistent(server), value_bytes=value_bytes
    ):
        yield finding


async def _persistent(server: Server) -> bool | None:
    """Whether data survive a server restart; None if the server does not say, as many hosted ones do not."""
    if server.topology == "cluster":
        return None
    info: dict[str, Any] = await server.client.info("persistence")
    if info.get("aof_enabled"):
        return True
    save = await _configured(server, "save")
    return None if save is None else bool(save)


async def _configured(server: Server, name: str) -> bytes | None:
    """A setting of the server; None on a hosted server, in a Cluster, or for a user who may not read it."""
    if server.topology == "cluster":
        return None
    try:
        found: dict[bytes | str, bytes] = await server.client.config_get(name)
    except ResponseError:
        return None
    return next(iter(found.values()), None)


async def _rights(server: Server, keys: Keys) -> AsyncIterator[Finding]:
    """Ask the server whether it would accept the services' commands. Skipped before Redis 7 and in a Cluster."""
    if server.topology == "cluster":
        return
    try:
        user: str = (await server.client.execute_command("ACL", "WHOAMI")).decode()
        refused = [await server.client.execute_command("ACL", "DRYRUN", user, *call) for call in _calls(keys)]
    except NoPermissionError:
        return  # this user may not ask; other checks show what it may not read
    except ResponseError:
        return  # before Redis 7
    denied = [answer.decode() for answer in refused if answer != b"OK"]
    for finding in checks.check_rights(user, denied):
        yield finding


def _calls(keys: Keys) -> Iterator[tuple[str | int, ...]]:
    raw, turns, run = keys.topic(0, "raw"), keys.topic(0, "turns"), f"{keys.prefix}:{{0}}:run:any"
    yield "EVALSHA", "0" * 40, 1, run
    yield "XADD", keys.requests, "*", "field", "value"
    yield "XREAD", "STREAMS", raw, "0"
    yield "XREADGROUP", "GROUP", "fetcher", "doctor", "STREAMS", turns, ">"
    yield "XGROUP", "CREATE", turns, "fetcher", "0"
    yield "XRANGE", raw, "-", "+"
    yield "HMGET", run, "status"
    yield "HGETALL", keys.state(0, "parser")
    yield "ZREM", keys.members("parser"), "doctor"
    yield "XADD", keys.dead, "*", "field", "value"


async def _types(server: Server, keys: Keys) -> AsyncIterator[Finding]:
    meant = dict(_shared(keys))
    pipe = server.client.pipeline(transaction=False)
    for key in meant:
        pipe.type(key)
    types: list[bytes] = await pipe.execute()
    found = {key: (kind.decode(), meant[key]) for key, kind in zip(meant, types, strict=True)}
    wrong = {key: (kind, right) for key, (kind, right) in found.items() if kind not in ("none", right)}
    for finding in checks.check_types(wrong):
        yield finding


def _shared(keys: Keys) -> Iterator[tuple[str, str]]:
    """Yield the keys shared by many runs, with their required types."""
    yield keys.meta, "hash"
    yield keys.requests, "stream"
    yield keys.dead, "stream"
    yield keys.rejected, "list"
    stages = ("normalizer", "parser", "policy")
    for group in (*stages, *(name for name, _ in (*QUEUES, RECORDER)), INTAKE):
        yield keys.members(group), "zset"
    topics: tuple[InternalTopic, ...] = ("turns", "raw", "events", "drafts", "tools", "control", "records")
    for partition in range(keys.partitions):
        for topic in (*topics, *TOPICS):
            yield keys.topic(partition, topic), "stream"
        for group in stages:
            yield keys.lease(partition, group), "hash"
            yield keys.state(partition, group), "hash"


async def _deployment(server: Server, settings: Settings) -> AsyncIterator[Finding]:
    meta: dict[bytes, bytes] = await server.client.hgetall(settings.keys.meta)
    agreed = {name.decode(): value.decode() for name, value in meta.items()}
    for finding in checks.check_deployment(settings, agreed):
        yield finding
    await learn(server, settings.keys)


async def _work(server: Server, settings: Settings) -> AsyncIterator[Finding]:
    # Always include the policy stage: other services may have settings with policies.
    reader = DeploymentReader(server, settings.keys, recorded=bool(settings.records), judged=True)
    here_ms = time.time_ns() // 1_000_000
    with translated(server):
        await server.clock.measure()
        now = earlier = await reader.read()
        nodes = [finding for node in await read_nodes(server) for finding in checks.check_node(node, here_ms=here_ms)]
    for finding in nodes:
        yield finding
    writes_fail = any(finding.level == "wrong" and finding.about == "disk" for finding in nodes)
    if any(stage.lag_bytes for stage in earlier.stages):
        await asyncio.sleep(GROWTH_S)
        with translated(server):
            now = await reader.read()
    for finding in await _judged(server, settings, now, earlier, writes_fail=writes_fail):
        yield finding


async def _judged(
    server: Server,
    settings: Settings,
    now: DeploymentSnapshot,
    earlier: DeploymentSnapshot,
    *,
    writes_fail: bool,
) -> list[Finding]:
    limit, found = settings.limits.lag_bytes, list[Finding]()
    no_worker = list(checks_work.check_any_worker(now, writes_fail=writes_fail))
    chained = settings.stages.chained or bool(now.pipelines)
    for stage, before in zip(now.stages, earlier.stages, strict=True):
        if stage.name != POLICY[0] or stage.workers:
            found.append(checks_work.check_stage(stage, before, lag_limit=limit, chained=chained))
        else:
            found += checks_work.check_no_policy_worker(stage, meant=bool(settings.policies))
    keys = settings.keys
    streams = {name: [keys.topic(p, topic) for p in range(keys.partitions)] for name, topic in (*QUEUES, RECORDER)}
    streams[INTAKE] = [keys.requests]
    for queue in now.queues:
        stuck = await _stuck(server, queue.name, streams[queue.name]) if queue.held else StuckFacts()
        needed = queue.name != "tools" or not chained or runs_tools(settings)
        found += checks_work.check_queue(queue, stuck, chained=chained, needed=needed)
        if queue.name == INTAKE:
            found += checks_work.check_room(queue.waiting + queue.held, bound=settings.limits.inbound_entries)
    found += checks_work.check_pipelines(now, chained=settings.stages.chained)
    found += checks_work.check_gateways(now.gateways, meant=settings.gateway is not None)
    # One cause, one hint: not one for each service.
    return [*no_worker, *(msgspec.structs.replace(each, todo=None) for each in found)] if no_worker else found


async def _stuck(server: Server, group: str, streams: Sequence[str]) -> StuckFacts:
    abandoned = often = 0
    example = ""
    for stream in streams:
        try:
            pending: list[dict[str, Any]] = await server.client.xpending_range(stream, group, "-", "+", MOST_PENDING)
        except NoPermissionError:
            raise
        except ResponseError:
            continue  # no such stream or group yet
        abandoned += sum(entry["time_since_delivered"] > STUCK_MS for entry in pending)
        again = [entry["message_id"].decode() for entry in pending if entry["times_delivered"] % BEGUN > OFTEN]
        often += len(again)
        example = example or (f"{stream} {again[0]}" if again else "")
    return StuckFacts(abandoned=abandoned, often=often, example=example)


async def _dead(server: Server, keys: Keys) -> AsyncIterator[Finding]:
    newest = [dead async for dead in newest_dead_letters(server, keys, most=1)]
    for finding in checks_work.check_dead(await server.client.xlen(keys.dead), newest):
        yield finding


async def _providers(server: Server, keys: Keys) -> AsyncIterator[Finding]:
    """How the providers did lately, as the parsers and fetchers counted it."""
    activity = ActivitySlots(server, keys, kept=LATELY_MS // SLOT_MS)
    await server.clock.measure()
    await activity.read()
    now_ms = server.clock.now_ms()
    for finding in checks_work.check_failures(failing_models(activity.slots, now_ms)):
        yield finding
    for silent in silent_models(activity.slots, now_ms):
        yield checks_work.check_silent(silent)


async def _policies(server: Server, keys: Keys) -> AsyncIterator[Finding]:
    """What the policies decided lately: `doctor` sees a policy that fails at work, not only one that does not load."""
    since = server.clock.now_ms() - LATELY_MS
    pipe = server.client.pipeline(transaction=False)
    for partition in range(keys.partitions):
        pipe.xrevrange(keys.topic(partition, "decisions"), "+", since, count=MOST_DECISIONS)
    replies: list[Any] = await pipe.execute(raise_on_error=False)
    if refused := next((reply for reply in replies if isinstance(reply, NoPermissionError)), None):
        raise refused
    read: list[list[tuple[bytes, dict[bytes, bytes]]]] = [entries for entries in replies if isinstance(entries, list)]
    decided = [fields[b"__data__"] for entries in read for _, fields in entries if b"__data__" in fields]
    for finding in checks_work.check_decisions(decided, minutes=LATELY_MS // 60_000):
        yield finding


async def _listings(server: Server, settings: Settings) -> AsyncIterator[Finding]:
    for name in sorted(settings.mcp):
        left_s: int = await server.client.ttl(settings.keys.mcp(name))
        yield checks_work.check_listing(name, left_s if left_s >= 0 else None)
