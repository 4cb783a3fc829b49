"""`tokenbus repartition`: changes the number of partitions of a deployment at work, and shows it."""

from __future__ import annotations

import asyncio
import time
from typing import TypeAlias

from tokenbus.bus import layout as change
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import Layout
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import RepartitionRefused
from tokenbus_services import settings as configuration
from tokenbus_services.cli.audit import noted
from tokenbus_services.cli.connect import with_server
from tokenbus_services.cli.render import output

LOOK_S = 0.25
Line: TypeAlias = str | int | list[int] | None


async def show(*, as_json: bool) -> None:
    """Show by which numbers of partitions runs are placed, and what is open beyond the present one."""
    async with _server() as server:
        keys = _keys()
        now = await change.layout(server, keys)
        tail = await _open_runs(server, keys, range(now.placing, now.spread))
    facts: dict[str, Line] = {
        "partitions": now.placing,
        "earlier": list(now.numbers[1:]),
        "served": now.spread,
        "announced": now.announced,
        "open_beyond": tail,
    }
    _print(facts, _sentence(now, tail), as_json=as_json)


async def run(number: int, *, wait_s: float, as_json: bool) -> None:
    """Change the number; returns when new runs are placed by it. Raises RepartitionRefused, ServerError."""
    async with _server() as server:
        keys = _keys()
        now = await change.layout(server, keys)
        if now.placing == number and now.announced is None:
            raise RepartitionRefused(f"there are {number} partitions already")
        await change.announce(server, keys, now, number)
        now = await change.layout(server, keys)
        until = time.monotonic() + wait_s
        late = await change.lagging(server, keys, now)
        while late and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            late = await change.lagging(server, keys, now)
        if late:
            await change.give_up(server, keys, now)
            names = ", ".join(late[:5]) + (f" and {len(late) - 5} more" if len(late) > 5 else "")
            problem = f"nothing was changed: not ready after {wait_s:g} s: {names}"
            raise RepartitionRefused(problem)
        await change.place(server, keys, now)
        before = now.placing
        now = await change.layout(server, keys)
        await noted(server, keys, "repartition", partitions=now.placing, before=before)
    facts: dict[str, Line] = {"partitions": now.placing, "before": before, "served": now.spread}
    says = f"new runs are placed in {now.placing} partitions; runs that began in {before} stay in their partition"
    _print(
        facts, f"{says}\nset partitions = {now.placing} in the settings of every process that names a number", as_json
    )


async def give_up(*, as_json: bool) -> None:
    """Take back a change that another call announced and did not finish."""
    async with _server() as server:
        keys = _keys()
        await change.give_up(server, keys, await change.layout(server, keys))
        await noted(server, keys, "repartition.abandon")
    _print({"announced": None}, "the announced change is taken back", as_json=as_json)


async def forget(*, as_json: bool) -> None:
    """Stop looking runs up by earlier numbers. Raises RepartitionRefused while runs that they placed are kept."""
    async with _server() as server:
        keys = _keys()
        now = await change.layout(server, keys)
        if kept := await change.runs_elsewhere(server, keys, now):
            raise RepartitionRefused(f"runs of earlier numbers are kept, {kept} of them: wait until they expire")
        await change.forget(server, keys, now)
        await noted(server, keys, "repartition.forget", partitions=now.placing)
    _print(
        {"partitions": now.placing, "earlier": []},
        f"runs are looked up in {now.placing} partitions only",
        as_json=as_json,
    )


def _server() -> Server:
    settings = with_server(configuration.load())
    assert settings.redis_url
    return Server(settings.redis_url)


def _keys() -> Keys:
    return configuration.load().keys


async def _open_runs(server: Server, keys: Keys, partitions: range) -> int:
    found = 0
    with translated(server):
        for partition in partitions:
            counts = await server.client.hmget(keys.lease(partition, "parser"), ["open", "away"])
            found += sum(int(count or 0) for count in counts)
    return found


def _sentence(now: Layout, tail: int) -> str:
    says = f"{now.placing} partitions"
    if now.announced is not None:
        says += f"; a change to {now.announced} is announced and not finished"
    if len(now.numbers) > 1:
        says += f"; runs of {', '.join(map(str, now.numbers[1:]))} partitions may be kept"
    if now.spread > now.placing:
        says += f"; {tail} runs are open in partitions {now.placing} to {now.spread - 1}"
    return says


def _print(facts: dict[str, Line], says: str, as_json: bool) -> None:
    if as_json:
        output.print_json(facts)
    else:
        print(output.safe(says))
