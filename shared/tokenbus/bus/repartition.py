"""Changes the number of partitions of a running deployment; layout.py explains how.

`announce`, wait until `lagging` is empty, `place`. Each may be repeated, also by another process after this one died.
`forget` ends the look-ups by earlier numbers once no run that they placed is kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from tokenbus.bus.keys import MAX_PARTITIONS, Keys
from tokenbus.bus.layout import CHANGED_WIRE_VERSION, SEEN, Layout, read_layout
from tokenbus.bus.scripts.layout import begin_added, change
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.topology import ALIVE_MS, GROUPS
from tokenbus.errors import RepartitionRefused

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
