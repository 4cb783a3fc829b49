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
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from redis.exceptions import RedisError

from tokenbus.bus.keys import WIRE_VERSION, Keys
from tokenbus.bus.liveness import rest
from tokenbus.bus.scripts import layout as scripts
from tokenbus.bus.server.run_scripts import evaluate, run_scripts
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import DeploymentMismatch

CHANGED_WIRE_VERSION = 2
"""Of a deployment whose number of partitions was changed: a client that knows one number alone must not use it."""
KNOWN_WIRE_VERSIONS = (WIRE_VERSION, CHANGED_WIRE_VERSION)
FIELDS = ("partitions", "wire_version", "numbers", "ever", "spread", "epoch", "announced")
CHANGED_LOOK_S = 0.05
STALE_S = 2.0
"""Workers read the layout more often than this."""
SEEN = "seen:"
"""Prefix of the fields in which workers confirm the epoch that they use, while a change is announced."""
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

    def check(self, keys: Keys) -> None:
        """Raises DeploymentMismatch if the deployment never had as many partitions as ``keys``."""
        if keys.numbers[0] not in self.ever:
            raise DeploymentMismatch("partitions", str(keys.numbers[0]), str(self.placing))


def layout_of(found: Sequence[bytes | None]) -> Layout:
    """Decode the values of `FIELDS`. Raises DeploymentMismatch for another release's deployment."""
    partitions, wire_version, numbers, ever, spread, epoch, announced = found
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
    )


def _numbers(text: bytes | None) -> list[int]:
    return [int(number) for number in text.split(b",")] if text else []


async def join_deployment(server: Server, keys: Keys, *, worker: str = "") -> Layout:
    """Agree with all other processes on the deployment's settings: the first one writes them, the others compare. What
    the server has lost, in a fail-over say, the process that knows a later epoch writes again.

    ``worker``: says, while a change is announced, that this worker works by the epoch of ``keys``. Raises
    DeploymentMismatch, ServerUnavailable or ServerFull.
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
        )
        reply: Any = await evaluate(server.client, call)
    layout = layout_of(reply)
    layout.check(keys)
    return layout


async def read_layout(server: Server, keys: Keys) -> Layout | None:
    """Return what the deployment has agreed on; None if there is none yet. Raises DeploymentMismatch and redis-py's
    errors.
    """
    found: list[bytes | None] = await server.client.hmget(keys.meta, list(FIELDS))
    return layout_of(found) if found[0] is not None or found[1] is not None else None


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
