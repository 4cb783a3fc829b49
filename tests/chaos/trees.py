"""Runs that begin others during faults: some are cancelled, and several readers follow each tree to its end.

What the readers got, and the order that the server holds at the end, is a `Tree` for the judge.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from tests.chaos.record import Tree, place
from tests.waiting import eventually
from tokenbus import Client, TreeCursor
from tokenbus.errors import ServerError, TokenbusError
from tokenbus_services.mock_provider import Delivery, ModelRequest, Reply, Script, ToolCall, Turn

TOKEN = "tree-"
"""What the last word of each request of a tree begins with."""
_SAYS = " ".join(f"leaf{n}" for n in range(30))
_WORDS = Turn(says=Reply(text=_SAYS), delivery=Delivery(pace=60))


def _asks(*tools: str) -> Turn:
    calls = tuple(ToolCall(name=tool, arguments={"task": f"find {TOKEN}child"}) for tool in tools)
    return Turn(says=Reply(text="I ask.", tool_calls=calls))


SCRIPTS = {
    "tree": Script(name="tree", turns=(_asks("leaf", "branch"), Turn(says=Reply(text="Both are there.")))),
    "branch": Script(name="branch", turns=(_asks("leaf"), Turn(says=Reply(text="It is there.")))),
    "leaf": Script(name="leaf", turns=(_WORDS,)),
}
"""By model: a run with two children, of which one has another."""
MODELS = frozenset(SCRIPTS)
SETTINGS = "".join(
    f'[tools.{name}]\nkind = "run"\nprovider = "anthropic"\nmodel = "{name}"\n{more}'
    for name, more in (("leaf", ""), ("branch", 'tools = ["leaf"]\n'))
)
READERS = 2
_LONG_S = 900.0
_CANCELLED = 0.3
"""Share of the trees whose root is cancelled."""
_STEPS = 7
"""The second reader stops after so many steps, and goes on from its cursor."""
_READ_S = 20.0
"""How long the readers may take for the rest, once all runs have ended."""


def script_for(request: ModelRequest) -> Script | None:
    """The provider's answer to a run of a tree."""
    return SCRIPTS.get(request.model) if request.token.startswith(TOKEN) else None


class Trees:
    """One tree after the other in each of some places. Use inside ``async with``."""

    def __init__(self, client: Any, url: str, prefix: str, chance: random.Random, *, places: int) -> None:
        self._client = client
        self._prefix = prefix
        self._chance = chance
        self._bus = Client(url, prefix=prefix, reconnect_s=_LONG_S)
        self._enough = asyncio.Event()
        self._roots: dict[str, list[list[str]]] = {}
        """What the readers of each got."""
        self._reading: dict[str, list[asyncio.Task[None]]] = {}
        self._planting = [partial(self._plant, n) for n in range(places)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Trees:
        await self._bus.__aenter__()
        self._tasks = [asyncio.create_task(plant()) for plant in self._planting]
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._close()

    async def _close(self) -> None:
        tasks = [*self._tasks, *(task for each in self._reading.values() for task in each)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._bus.__aexit__(None, None, None)

    async def finish(self, numbers: list[int], settle_s: float) -> list[Tree]:
        """Begin no more, wait for the end of all, and return what came of them. ``numbers``: of partitions."""
        self._enough.set()
        await asyncio.gather(*self._tasks)
        with suppress(AssertionError):  # the judge reports what has no end, and what a reader did not get
            await eventually(lambda: all(t.done() for each in self._reading.values() for t in each), timeout=settle_s)
        found = [await self._tree(root, got, numbers) for root, got in self._roots.items()]
        await self._close()
        return found

    async def _tree(self, root: str, got: list[list[str]], numbers: list[int]) -> Tree:
        order: list[tuple[str, str]] = []
        for n in {place(root, number) for number in numbers}:
            entries = await self._client.xrange(f"{self._prefix}:{{{n}}}:log:tree/{root}")
            order += [(run.decode(), value.decode()) for _, fields in entries for run, value in fields.items()]
        whole = [task.done() and not task.exception() for task in self._reading[root]]
        return Tree(root=root, order=order, got=[each if ok else None for each, ok in zip(got, whole, strict=True)])

    async def _plant(self, place: int) -> None:
        number = 0
        while not self._enough.is_set():
            root = f"{TOKEN}{place}-{number}"
            number += 1
            request = {
                "id": root,
                "provider": "anthropic",
                "model": "tree",
                "messages": [{"role": "user", "content": f"go {root}"}],
                "tools": [{"name": "leaf"}, {"name": "branch"}],
                "on_failure": "restart",
            }
            await self._until_accepted(partial(self._bus.publish, request))
            self._roots[root] = [[] for _ in range(READERS)]
            self._reading[root] = [
                asyncio.create_task(self._read(root, got, stops=bool(n))) for n, got in enumerate(self._roots[root])
            ]
            if self._chance.random() < _CANCELLED:
                await asyncio.sleep(self._chance.uniform(0, 4))
                await self._until_accepted(partial(self._bus.cancel, root, reason="enough"))
            await asyncio.wait(self._reading[root], timeout=_READ_S)

    async def _until_accepted(self, command: Any) -> None:
        while True:
            try:
                await command()
            except ServerError:
                await asyncio.sleep(0.1)
            except TokenbusError:  # it has ended, or a server that failed over has lost it
                return
            else:
                return

    async def _read(self, root: str, got: list[str], *, stops: bool) -> None:
        cursor: TreeCursor | None = None
        while True:
            taken = 0
            with suppress(ServerError):
                async with aclosing(self._bus.follow_tree(root, after=cursor)) as steps:
                    async for step in steps:
                        cursor, taken = step.cursor, taken + 1
                        got.append(f"{step.event.run}:{step.event.seq}")
                        if stops and taken == _STEPS:
                            break
                    else:
                        return
            await asyncio.sleep(0.05)
