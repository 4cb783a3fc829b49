"""Gathers the facts about the server, the bus on it and its surroundings, and has them checked."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
from redis.exceptions import NoPermissionError, ResponseError

from tokenbus.blob_wire import DEPLOYMENT_HEADER
from tokenbus.bus.activity import SLOT_MS, ActivitySlots
from tokenbus.bus.dead_letters import newest_dead_letters
from tokenbus.bus.keys import TOPICS, InternalTopic, Keys
from tokenbus.bus.layout import learn
from tokenbus.bus.scripts import BEGUN
from tokenbus.bus.server.server import Server, ServerInfo, translated
from tokenbus.bus.topology import GROUPS, INTAKE, POLICY, QUEUES, RECORDER, WEBHOOKS
from tokenbus.errors import BlobError, BlobUnauthorized, ServerUnavailable, SettingsError
from tokenbus.providers import registry
from tokenbus_services.blobs.client import archive_of, loader_of
from tokenbus_services.cli.doctor import checks, checks_work
from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.cli.doctor.checks_work import OFTEN, StuckFacts
from tokenbus_services.cli.http_probe import page
from tokenbus_services.cli.inspect import failing_models, last_failure, silent_models
from tokenbus_services.cli.render.event_text import size
from tokenbus_services.cli.service_registry import runs_tools
from tokenbus_services.endpoints.endpoint import Key, KeyMissing, KeyUnusable
from tokenbus_services.runtime.deployment_snapshot import DeploymentReader, DeploymentSnapshot, read_nodes
from tokenbus_services.settings import BlobSettings, ProviderSettings, Settings

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
    for group in GROUPS:
        yield keys.members(group), "zset"
    topics: tuple[InternalTopic, ...] = get_args(InternalTopic)
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
    reader = DeploymentReader(server, settings.keys, further=settings.further_queues, judged=True)
    here_ms = time.time_ns() // 1_000_000
    with translated(server):
        await server.clock.measure()
        now = earlier = await reader.read()
        facts = await read_nodes(server)
    replicas = settings.durability.replicas if settings.durability else 0
    nodes = [each for node in facts for each in checks.check_node(node, here_ms=here_ms, replicas=replicas)]
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
    queues = (*QUEUES, RECORDER, WEBHOOKS)
    streams = {name: [keys.topic(p, topic) for p in range(keys.partitions)] for name, topic in queues}
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


REACH_S = 5.0
LATELY_S = 600.0
"""How old a failure of the blob store may be."""


async def examine_addresses(settings: Settings) -> list[Finding]:
    """Check that the address of each provider answers."""
    return await asyncio.gather(*(_reach(name, url) for name, url in _addresses(settings)))


async def examine_blobs(settings: BlobSettings, deployment: str) -> list[Finding]:
    """Check the blob service and what it failed lately, or as much of a custom store as is possible without using it.
    ``deployment``: the id with which the service must answer; empty: any.
    """
    if settings.loader is None:
        return await _blob_service(settings.address, deployment)
    try:
        await loader_of(settings).aclose()
    except SettingsError as e:
        return [Finding(level="wrong", about="blobs", says=str(e), todo="fix blobs.loader, or what it names")]
    return [Finding(level="ok", about="blobs", says=f"a store of your own, {settings.loader}")]


async def _blob_service(url: str, deployment: str) -> list[Finding]:
    """Check that a blob service answers, that it is this deployment's, and what it failed lately."""
    try:
        found = await page(f"{url.rstrip('/')}/health")
    except (OSError, ValueError) as e:
        return [check_blobs(url, problem=str(e) or type(e).__name__)]
    try:
        service = msgspec.json.decode(found.body, type=dict[str, Any]).get("service")
    except msgspec.DecodeError:
        service = None
    problem = None
    if service != "blobs":
        problem = f"what answers there is {f'the {service} service' if service else 'no blob service'}"
    elif deployment and found.headers.get(DEPLOYMENT_HEADER) != deployment:
        problem = "what answers there is the blob service of another deployment"
    elif found.status != 200:
        return [check_blobs(url, problem=f"HTTP {found.status}")]
    failed = last_failure(found, within_s=LATELY_S) if problem is None else None
    return [
        check_blobs(url, problem=problem, stranger=problem is not None),
        *([checks_work.check_blob_failure(failed)] if failed else ()),
    ]


async def examine_archive(settings: Settings) -> list[Finding]:
    """Check that the blob service has the archive of these settings, and can list its store."""
    if settings.archive is None:
        return []
    blobs = settings.blobs
    todo = f"look at `blob_store_failed` in the log of the blob service, and at blobs.url, {settings.blobs.address}"
    try:
        newest = (await archive_of(blobs).page(limit=1)).runs
    except BlobUnauthorized as e:
        return [Finding(level="wrong", about="archive", says=str(e), todo=f"set the {blobs.token_env} of the service")]
    except (BlobError, SettingsError) as e:
        problem = str(e)
        if "HTTP 404" in problem:
            problem = f"the blob service at {blobs.address} has no archive"
            todo = "start it again with these settings: [archive] was not in its own"
        return [Finding(level="wrong", about="archive", says=problem, todo=todo)]
    says = f"the newest run, {newest[0].run}, can be listed" if newest else "answers; no run is archived yet"
    return [Finding(level="ok", about="archive", says=says)]


def _addresses(settings: Settings) -> Iterator[tuple[str, str]]:
    for name, provider in sorted(settings.providers.items()):
        yield name, provider.base_url or registry.get(provider.api).default_base_url


async def _reach(name: str, url: str) -> Finding:
    """Check that the address answers at all. Sends no key. Uses a proxy from the environment, as fetchers do."""
    import httpx

    problem = None
    try:
        async with httpx.AsyncClient(timeout=REACH_S) as client:
            await client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        problem = str(e) or type(e).__name__
    return checks_work.check_reach(name, url, problem=problem)


def examine_disk(directory: Path) -> Iterator[Finding]:
    if directory.is_dir():
        free = shutil.disk_usage(directory).free
        yield from check_disk(str(directory.resolve()), free_bytes=free)


# The checks of `tokenbus doctor` around the bus: the blob store, this disk. Pure.

LITTLE_ROOM = 2**30
"""Free bytes below which the disk may soon be too full for the server's files and blobs."""


def check_blobs(url: str, *, problem: str | None, stranger: bool = False) -> Finding:
    """``problem``: why the blob service did not answer; None if it did. ``stranger``: something else answered."""
    if problem is None:
        return Finding(level="ok", about="blobs", says=f"answers at {url}")
    todo = "start it with `tokenbus worker blobs`, or set blobs.service_url"
    if stranger:
        todo = "set http.blobs to a free port, or 0 under `tokenbus up`; or set blobs.service_url"
    return Finding(level="wrong", about="blobs", says=f"{url}: {problem}", todo=todo)


def check_disk(path: str, *, free_bytes: int) -> Iterator[Finding]:
    """Check the data directory's disk, which holds the blob store and the server of `tokenbus up`."""
    if free_bytes < LITTLE_ROOM:
        yield Finding(
            level="wrong",
            about="disk",
            says=f"{size(free_bytes)} are free where {path} lies",
            todo="make room, or set data_dir to another disk",
        )


# `tokenbus doctor --keys`: asks each provider for its list of models, which needs a valid key and costs nothing.

ANSWERS_S = 10.0


async def try_provider_keys(settings: Settings, env: Mapping[str, str]) -> AsyncIterator[Finding]:
    """Try the key of every provider that has one. Uses a proxy from the environment, as fetchers do."""
    async with httpx.AsyncClient(timeout=ANSWERS_S) as client:
        tried = (_try(client, name, provider, env) for name, provider in sorted(settings.providers.items()))
        for finding in await asyncio.gather(*tried):
            if finding:
                yield finding


async def _try(
    client: httpx.AsyncClient, name: str, provider: ProviderSettings, env: Mapping[str, str]
) -> Finding | None:
    about = f"provider {name}"
    try:
        api = registry.get(provider.api)
        headers = {} if provider.auth else Key(name, provider, api, env).headers()
    except (SettingsError, KeyMissing):
        return None  # another check reports it
    except KeyUnusable as e:
        return Finding(level="wrong", about=about, says=str(e), todo="put the key there, alone, without line ends")
    if provider.auth:
        return Finding(level="note", about=about, says=f"{provider.auth} was not tried: only fetchers call it")
    if not headers:
        return None
    path: str = getattr(api, "models_path", "")  # a plug-in need not derive from ProviderBase
    if not path:
        return Finding(level="note", about=about, says=f"its key was not tried: {provider.api} has no free call")
    url = (provider.base_url or api.default_base_url).rstrip("/") + path
    try:
        answer = await client.get(url, headers={**getattr(api, "models_headers", {}), **headers})
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        return Finding(
            level="wrong",
            about=about,
            says=f"its key was not tried, for {url} gave no answer: {str(e) or type(e).__name__}",
            todo="fix base_url, or check this machine's name service, firewall and proxy",
        )
    return key_finding(about, answer.status_code)


def key_finding(about: str, status: int) -> Finding:
    """What the status of the list of models says of the key."""
    if status in (401, 403):
        todo = "replace the key, or fix the rights of its account, where fetchers run"
        return Finding(level="wrong", about=about, says=f"refuses the key: HTTP {status}", todo=todo)
    if status < 300:
        return Finding(level="ok", about=about, says="accepts the key")
    return Finding(level="note", about=about, says=f"did not show whether the key is valid: HTTP {status}")
