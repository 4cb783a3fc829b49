"""The present and earlier numbers of partitions of a deployment: the hash ``<prefix>:meta``.

Runs are placed by ``crc32(run) mod P``. Several numbers P share one set of partitions, ``0`` to the largest P minus
one, and a run stays where it began. So a change of P moves nothing: new runs are placed by the new number, and a run
that is not found there is looked up by the earlier ones (`locate`).

A change has two steps. *Announced*: all workers serve the partitions of both numbers, look runs up by both, and confirm
that in ``meta``. *Placed*: intake places by the new number. Each change raises the epoch, and intake writes it into
every partition before it places by it (`fence`). A worker that has not read the new epoch can then create no run by the
old number (scripts/runs/accept.py), so no request becomes two runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from redis.exceptions import RedisError

from tokenbus.bus.keys import MAX_PARTITIONS, WIRE_VERSION, Keys
from tokenbus.bus.liveness import rest
from tokenbus.bus.scripts import layout as scripts
from tokenbus.bus.scripts.layout import begin_added, change
from tokenbus.bus.server.durability import Durability
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.topology import ALIVE_MS, GROUPS
from tokenbus.errors import DeploymentMismatch, RepartitionRefused

CHANGED_WIRE_VERSION = 2
"""Of a deployment whose number of partitions was changed: a client that knows one number alone must not use it."""
KNOWN_WIRE_VERSIONS = (WIRE_VERSION, CHANGED_WIRE_VERSION)
FIELDS = ("partitions", "wire_version", "numbers", "ever", "spread", "epoch", "announced", "durability")
CHANGED_LOOK_S = 0.05
STALE_S = 2.0
"""Workers read the layout more often than this."""
SEEN = "seen:"
"""Prefix of the fields in which workers confirm the epoch that they use, while a change is announced."""
ARCHIVE = "archive"
"""Field that exists once a recorder has archived runs."""
EPOCH = "epoch"
"""Field of a parser's lease: no run is created in this partition by an earlier epoch."""


class Layout(msgspec.Struct, frozen=True):
    """The deployment's agreed numbers."""

    placing: int
    """Number of partitions by which new runs are placed."""
    numbers: tuple[int, ...]
    """Numbers by which stored runs may be placed, the present one first."""
    ever: tuple[int, ...]
    """All numbers that the deployment ever had. A process with one of these in its settings uses the present one."""
    spread: int
    """Number of partitions that may have entries: the largest number ever."""
    epoch: int
    announced: int | None
    durability: Durability | None = None
    """What its writes wait for that wait; None: it has not said."""

    def check(self, keys: Keys) -> None:
        """Raises DeploymentMismatch if the deployment never had as many partitions as ``keys``."""
        if keys.numbers[0] not in self.ever:
            raise DeploymentMismatch("partitions", str(keys.numbers[0]), str(self.placing))


def layout_of(found: Sequence[bytes | None]) -> Layout:
    """Decode the values of `FIELDS`. Raises DeploymentMismatch for another release's deployment."""
    partitions, wire_version, numbers, ever, spread, epoch, announced, durability = found
    if wire_version is None or not (wire_version.isdigit() and int(wire_version) in KNOWN_WIRE_VERSIONS):
        theirs = wire_version.decode(errors="replace") if wire_version is not None else "not set"
        raise DeploymentMismatch("wire_version", " or ".join(map(str, KNOWN_WIRE_VERSIONS)), theirs)
    if partitions is None or not partitions.isdigit():
        raise DeploymentMismatch("partitions", "a number", "not set" if partitions is None else repr(partitions))
    placing = int(partitions)
    return Layout(
        placing=placing,
        numbers=tuple(dict.fromkeys([placing, *_numbers(numbers)])),
        ever=tuple(dict.fromkeys([placing, *_numbers(ever)])),
        spread=max(placing, int(spread or 0)),
        epoch=int(epoch or 0),
        announced=int(announced) if announced else None,
        durability=Durability.decode(durability),
    )


def _numbers(text: bytes | None) -> list[int]:
    return [int(number) for number in text.split(b",")] if text else []


async def join_deployment(server: Server, keys: Keys, *, worker: str = "", durability: str = "") -> Layout:
    """Agree with all other processes on the deployment's settings: the first one writes them, the others compare. What
    the server has lost, in a fail-over say, the process that knows a later epoch writes again.

    ``worker``: says, while a change is announced, that this worker works by the epoch of ``keys``. ``durability``: what
    clients are told of it; empty: nothing. Raises DeploymentMismatch, ServerUnavailable or ServerFull.
    """
    with translated(server, keys.meta):
        await server.clock.measure()
        wire_version = CHANGED_WIRE_VERSION if keys.epoch > 1 else WIRE_VERSION
        numbers, ever = (",".join(map(str, each)) for each in (keys.numbers, keys.ever))
        call = scripts.join(
            keys.meta,
            partitions=keys.numbers[0],
            wire_version=wire_version,
            seen=f"{SEEN}{worker}" if worker else "",
            epoch=keys.epoch,
            numbers=numbers,
            ever=ever,
            spread=keys.partitions,
            durability=durability,
        )
        reply: Any = await run_script(server, call)
    layout = layout_of(reply)
    layout.check(keys)
    return layout


async def read_layout(server: Server, keys: Keys) -> Layout | None:
    """Return what the deployment has agreed on; None if nothing is stored yet. Raises DeploymentMismatch and redis-py's
    errors.
    """
    found: list[bytes | None] = await server.client.hmget(keys.meta, list(FIELDS))
    return layout_of(found) if found[0] is not None or found[1] is not None else None


async def announce_archive(server: Server, keys: Keys) -> None:
    """Let readers look for ended runs in the deployment's archive. Raises redis-py's errors; idempotent."""
    await server.client.hset(keys.meta, ARCHIVE, "1")


async def has_archive(server: Server, keys: Keys) -> bool:
    """Whether the deployment has an archive. Raises redis-py's errors."""
    return await server.client.hget(keys.meta, ARCHIVE) is not None


async def widen_if_stale(server: Server, keys: Keys) -> None:
    """Read the deployment's numbers again if this process has not read them for a while: it may have been stopped
    during a change.
    """
    if time.monotonic() - keys.numbers_read_at < STALE_S:
        return
    with suppress(RedisError, OSError, TimeoutError, DeploymentMismatch):
        async with asyncio.timeout(STALE_S):
            if layout := await read_layout(server, keys):
                keys.widen(layout.numbers, layout.spread)


async def learn(server: Server, keys: Keys) -> None:
    """Apply what the deployment has agreed on, if there is one and ``keys`` may follow it. Raises ServerUnavailable."""
    with translated(server, keys.meta):
        layout = await read_layout(server, keys)
    if layout and keys.numbers[0] in layout.ever:
        keys.apply(layout.numbers, layout.spread, layout.epoch, layout.ever)
    keys.numbers_read_at = time.monotonic()


async def locate(server: Server, keys: Keys, *runs: str) -> bool:
    """Find the partitions of runs and note them in ``keys``; does nothing if each has only one possible partition.

    Returns whether all were found, or needed no look-up. A run that is not found counts as being where a new one would
    be. Raises redis-py's errors.
    """
    unsure = {run: places for run in runs if len(places := keys.places(run)) > 1}
    if not unsure:
        return True
    pipe = server.client.pipeline(transaction=False)
    for run, places in unsure.items():
        for partition in places:
            names = keys.within(partition)
            pipe.exists(names.run(run))
            pipe.exists(names.log(run))
    replies = iter(await pipe.execute())
    all_found = True
    for run, places in unsure.items():
        there = [(next(replies), next(replies)) for _ in places]
        # A log may outlive its run's hash, so the hash counts first.
        found = next((p for n in (0, 1) for p, each in zip(places, there, strict=True) if each[n]), None)
        all_found = all_found and found is not None
        if found is not None:
            keys.note(run, found)
    return all_found


async def changed(keys: Keys, epoch: int) -> None:
    """Wait until this process places runs by a later epoch."""
    while keys.epoch <= epoch:
        await rest(CHANGED_LOOK_S)


async def fence(server: Server, keys: Keys, layout: Layout) -> None:
    """Let no run be created by an earlier epoch, in any partition. Raises redis-py's errors."""
    calls = [scripts.fence(keys.lease(p, "parser"), epoch=layout.epoch) for p in range(layout.spread)]
    await run_scripts(server, calls)


# `announce`, wait until `lagging` is empty, `place`. Each may be repeated, also by another process after this one died.
# `forget` ends the look-ups by earlier numbers once no run that they placed is kept.


_COUNT = 1000


async def layout(server: Server, keys: Keys) -> Layout:
    """Return the deployment's layout. Raises RepartitionRefused if there is no deployment; ServerUnavailable."""
    with translated(server, keys.meta):
        found = await read_layout(server, keys)
    if found is None:
        raise RepartitionRefused(f"no service has ever started with prefix {keys.prefix!r} on this server")
    return found


async def announce(server: Server, keys: Keys, now: Layout, number: int) -> None:
    """Let all workers serve the partitions of ``number`` too. Raises RepartitionRefused, ServerUnavailable."""
    if not 1 <= number <= MAX_PARTITIONS:
        raise RepartitionRefused(f"{number} partitions: must be 1 to {MAX_PARTITIONS}")
    if now.announced not in (None, number):
        raise RepartitionRefused(f"a change to {now.announced} partitions is under way: finish that one first")
    if now.announced is not None:
        return
    for partition in range(now.spread, number):
        await _add_groups(server, keys, partition)
    fields: dict[str, str | int] = {
        "numbers": _joined([*now.numbers, number]),
        "ever": _joined([*now.ever, number]),
        "spread": max(now.spread, number),
    }
    await _change(server, keys, now, number, fields)


async def lagging(server: Server, keys: Keys, now: Layout) -> list[str]:
    """Workers and gateways that have not confirmed both numbers. Raises ServerUnavailable."""
    workers = await _workers(server, keys)
    return sorted(name for name, epoch in workers.items() if epoch is None or epoch < now.epoch)


async def place(server: Server, keys: Keys, now: Layout) -> None:
    """Place new runs by the announced number. Raises RepartitionRefused, ServerUnavailable."""
    assert now.announced is not None
    numbers = _joined(dict.fromkeys([now.announced, *now.numbers]))
    fields: dict[str, str | int] = {"partitions": now.announced, "numbers": numbers}
    await _change(server, keys, now, None, fields | {"wire_version": CHANGED_WIRE_VERSION})


async def give_up(server: Server, keys: Keys, now: Layout) -> None:
    """Take an announced change back. Raises RepartitionRefused, ServerUnavailable."""
    if now.announced is None:
        raise RepartitionRefused("no change is under way")
    await _change(server, keys, now, None, {})


async def runs_elsewhere(server: Server, keys: Keys, now: Layout) -> int:
    """Count the runs, open or ended, that an earlier number placed. Reads the names of all keys.

    Raises ServerUnavailable.
    """
    placed, counted = Keys(keys.prefix, now.placing), 0
    with translated(server):
        async for name in _names(server, f"{keys.prefix}:{{*}}:run:*"):
            place, _, run = name.partition("}:run:")
            counted += int(place.rpartition("{")[2]) != placed.partition_of(run)
    return counted


async def forget(server: Server, keys: Keys, now: Layout) -> None:
    """Stop looking runs up by earlier numbers. Only if `runs_elsewhere` is 0.

    Raises RepartitionRefused, ServerUnavailable.
    """
    await _change(server, keys, now, None, {"numbers": now.placing})


async def _change(server: Server, keys: Keys, now: Layout, announced: int | None, fields: dict[str, str | int]) -> None:
    flat = [part for field in fields.items() for part in field]
    call = change(keys.meta, epoch=now.epoch, announced="" if announced is None else announced, fields=flat)
    with translated(server, keys.meta):
        if not await run_script(server, call):
            raise RepartitionRefused("it was changed by someone else at the same time: try again")


async def _workers(server: Server, keys: Keys) -> dict[str, int | None]:
    """The live workers and gateways, and the epoch that each has confirmed."""
    with translated(server, keys.meta):
        await server.clock.measure()
        since = server.clock.now_ms() - ALIVE_MS
        names: dict[str, int | None] = {}
        # Gateways too: they look runs up, for their clients and for the spend.
        for members in (*map(keys.members, GROUPS), keys.gateway_members):
            found: list[bytes] = await server.client.zrange(members, since, "+inf", byscore=True)
            names |= dict.fromkeys(name.decode() for name in found)
        stored: dict[bytes, bytes] = await server.client.hgetall(keys.meta)
    for field, epoch in stored.items():
        worker = field.decode().removeprefix(SEEN)
        if worker in names and field.startswith(SEEN.encode()):
            names[worker] = int(epoch)
    return names


async def _add_groups(server: Server, keys: Keys, partition: int) -> None:
    """Let groups of subscribers that exist read the new partition from its beginning, whenever they come back."""
    prefix = keys.lease(0, "")
    with translated(server):
        leases = [name.removeprefix(prefix) async for name in _names(server, f"{prefix}*")]
        await run_scripts(server, [begin_added(keys.lease(partition, group)) for group in leases])


async def _names(server: Server, pattern: str) -> AsyncIterator[str]:
    async for name in server.client.scan_iter(match=pattern, count=_COUNT):
        yield name.decode()


def _joined(numbers: Sequence[int] | Any) -> str:
    return ",".join(map(str, dict.fromkeys(numbers)))
