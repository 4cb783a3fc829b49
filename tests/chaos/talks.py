"""Conversations during faults: several people write to each session, and several readers follow it to its end. Policies
judge what goes into the second one.

What they sent, what the readers got, and what the server holds at the end is a `Talk` for the judge.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from tests.chaos import guards, observer
from tests.chaos.record import Talk
from tests.waiting import eventually
from tokenbus import Client, Session, SessionMessage
from tokenbus.errors import AppendPending, RequestInvalid, ServerError, SessionNotFound
from tokenbus.events.requests import ContentPart, Interrupt, SessionItem, TextPart, Withdraw
from tokenbus.events.sessions import SessionEvent, session_ref
from tokenbus_services.mock_provider import Delivery, Reply, Script, Turn

MODEL = "talk"
TOKEN = "talk-"
SAYS = " ".join(f"word{n}" for n in range(24))
SCRIPT = Script(
    name=MODEL,
    turns=(Turn(says=Reply(text=SAYS), delivery=Delivery(pace=30)),),
    repeat_last=True,
)
WRITERS, READERS = 3, 2
_LONG_S = 900.0
_PAUSE_S = 0.4
_READ_S = 20.0
"""How long the readers may take for the rest, once nothing more comes."""


class Talks:
    """People write to so many sessions, and readers follow. Use inside ``async with``."""

    def __init__(
        self,
        client: Any,
        url: str,
        prefix: str,
        chance: random.Random,
        *,
        sessions: int,
        judged: bool = False,
        provider: str = "anthropic",
        partitions: int | None = None,
        most: int = 40,
    ) -> None:
        """``most``: appends of one writer. ``judged``: the deployment has policies. ``partitions``: of the deployment,
        if nothing is to be read from it.
        """
        self._config = {"provider": provider, "model": MODEL, "on_failure": "restart"}
        self._client = client
        self._prefix = prefix
        self._chance = chance
        self._enough = asyncio.Event()
        self._bus = Client(url, prefix=prefix, partitions=partitions, reconnect_s=_LONG_S)
        self._names = [f"talk{n}" for n in range(sessions)]
        self._most = most
        self._judged = set(self._names[1:2]) if judged else set[str]()
        self._sent: dict[str, list[list[str]]] = {name: [[] for _ in range(WRITERS)] for name in self._names}
        self._got: dict[str, list[list[str]]] = {name: [[] for _ in range(READERS)] for name in self._names}
        self._readers: list[asyncio.Task[None]] = []
        self._writing: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Talks:
        await self._bus.__aenter__()
        for name in self._names:
            session = self._bus.session(name)
            config = {**self._config, "input_policies": ["mask", "stop"]} if name in self._judged else self._config
            await self._until_accepted(partial(session.configure, config, append="made", wait_s=5))
            self._readers += [asyncio.create_task(self._read(session, got)) for got in self._got[name]]
            people = enumerate(self._sent[name])
            self._writing += [asyncio.create_task(self._write(session, n, sent)) for n, sent in people]
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._close()

    async def _close(self) -> None:
        for task in (*self._readers, *self._writing):
            task.cancel()
        await asyncio.gather(*self._readers, *self._writing, return_exceptions=True)
        await self._bus.__aexit__(None, None, None)

    async def finish(self, partitions: int, settle_s: float) -> list[Talk]:
        """Stop writing, wait for the end of all that was said, and return what came of it."""
        self._enough.set()
        await asyncio.gather(*self._writing)
        talks = [await self._finished(name, partitions, settle_s) for name in self._names]
        await self._close()
        return talks

    async def _finished(self, name: str, partitions: int, settle_s: float) -> Talk:
        ref, client = session_ref("", name), self._client
        places = [f"{self._prefix}:{{{n}}}:" for n in range(partitions)]
        at = places[0]
        for place in places:
            at = place if await client.exists(f"{place}session:{ref}") else at

        async def idle() -> bool:
            return await client.hget(f"{at}session:{ref}", "run") in (b"", None) and not await client.zcard(
                f"{at}session:{ref}:queue"
            )

        with suppress(AssertionError):  # the judge reports what has no end
            await eventually(idle, timeout=settle_s)
        log = await observer.entries_of(client, f"{at}log:{ref}")
        newest = str(len(log) - 1)
        with suppress(AssertionError):
            await eventually(lambda: all(got[-1:] == [newest] for got in self._got[name]), timeout=_READ_S)
        kept: dict[bytes, bytes] = await client.hgetall(f"{at}session:{ref}:appends")
        known = {append: fate for append, fate in kept.items() if append[:1] not in b"!^"}
        try:
            history = [(m.role, _text(m.content)) for m in await self._bus.session(name).messages()]
        except ServerError:  # lost with a server
            history = []
        return Talk(
            session=name,
            log=[entry.event for entry in log],
            sent=self._sent[name],
            got=[list(got) for got in self._got[name]],
            fates={append.decode(): json.loads(fate)["state"] for append, fate in known.items()},
            history=history,
            withheld_text=(guards.MASKED, guards.STOP) if name in self._judged else (),
        )

    async def _write(self, session: Session, writer: int, sent: list[str]) -> None:
        while not self._enough.is_set() and len(sent) < self._most:
            append = f"{session.name}-{writer}-{len(sent)}"
            first = self._chance.choices(("I", f"I {guards.MASKED}", f"I {guards.STOP}"), (6, 2, 1))[0]
            item = self._item(f"{first} say {TOKEN}{append}", sent)
            sent.append(append)
            for _ in range(2 if self._chance.random() < 0.2 else 1):
                await self._until_accepted(partial(session.append, item, append=append, wait_s=5))
            await asyncio.sleep(self._chance.uniform(0, 2 * _PAUSE_S))

    def _item(self, text: str, sent: Sequence[str]) -> SessionItem:
        match self._chance.choices(
            ("enqueue", "steer", "now", "interrupt", "reject", "add", "cut", "withdraw"), (6, 1, 2, 1, 1, 1, 1, 1)
        )[0]:
            case "steer":
                return SessionMessage(content=text, when_busy="steer")
            case "now":
                return SessionMessage(content=text, when_busy="steer", now=True)
            case "interrupt":
                return SessionMessage(content=text, when_busy="interrupt")
            case "reject":
                return SessionMessage(content=text, when_busy="reject")
            case "add":
                return SessionMessage(content=text, run=False)
            case "cut":
                return Interrupt()
            case "withdraw" if sent:
                return Withdraw(append=sent[-1])
            case _:
                return SessionMessage(content=text)

    async def _until_accepted(self, append: Callable[[], Awaitable[object]]) -> None:
        """The append's id makes sure that it is accepted once."""
        while True:
            try:
                await append()
            except (ServerError, AppendPending):
                await asyncio.sleep(0.1)
            except RequestInvalid:  # a server that failed over has lost the session
                return
            else:
                return

    async def _read(self, session: Session, got: list[str]) -> None:
        cursor = None
        while True:
            with suppress(ServerError, SessionNotFound):
                async for step in session.follow(after=cursor):
                    cursor, event = step.cursor, step.event
                    own = isinstance(event, SessionEvent)
                    got.append(str(event.session_seq) if own else f"{event.run}:{event.seq}")
            await asyncio.sleep(0.1)


def _text(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(p.text for p in content if isinstance(p, TextPart))
