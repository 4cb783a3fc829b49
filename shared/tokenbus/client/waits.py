"""What runs wait for: the list of it, and the decisions."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_index import IndexReader, Position, fill, merged
from tokenbus.bus.run_record import STATUS, WAITS, wait_field
from tokenbus.bus.scripts.runs.waits import confirm
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import translated
from tokenbus.client.deployment import Deployment
from tokenbus.client.publishing import AnyRun, new_run_id, run_id_of
from tokenbus.errors import AlreadyDecided, DecisionPending, RequestInvalid, WaitNotFound
from tokenbus.events.requests import Answer, Approval, ToolResult, WaitDecision
from tokenbus.events.waits import DecisionReply, WaitFate, WaitInfo

PAGE = 64
"""Waits read from each sorted set at once, and in one pipeline."""
DECIDED_WAIT_S = 60.0
"""How long a decision may wait for intake before `DecisionPending` is raised."""
FIRST_LOOK_S, LONGEST_LOOK_S = 0.002, 0.1
_info_decoder = msgspec.json.Decoder(WaitInfo)
_reply_decoder = msgspec.json.Decoder(DecisionReply)


class RunWaits(ABC):
    """What a client does about what runs wait for."""

    if TYPE_CHECKING:
        _deployment: Deployment

    @abstractmethod
    async def _put_decision(self, decision: WaitDecision) -> None:
        """Put a decision on the inbound stream."""

    async def waiting(
        self,
        *,
        run: AnyRun | str | None = None,
        tenant: str | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> AsyncGenerator[WaitInfo]:
        """Yield what runs wait for: decisions on tool calls, answers, results of clients' tools. What waits longest
        comes first. Read in pages: stop when you have enough.

        ``run``: only what this run waits for. ``tenant``: only what runs of this tenant wait for. Raises
        RequestInvalid, ServerUnavailable.
        """
        if run is not None:
            for info in (await waits_of(self._deployment, run_id_of(run)))[:limit]:
                if tenant is None or info.tenant == tenant:
                    yield info
            return
        listed = list_waits(self._deployment, tenant=tenant, newest_first=newest_first, limit=limit)
        async with aclosing(listed):
            async for _, info in listed:
                if info is not None:
                    yield info

    async def approve(
        self,
        run: AnyRun | str,
        wait: str,
        *,
        arguments: Mapping[str, object] | None = None,
        by: str | None = None,
        decision_id: str | None = None,
        wait_s: float = DECIDED_WAIT_S,
    ) -> WaitFate:
        """Let a tool call run for which the run waits; ``arguments``: with these instead of its own. Returns once it is
        decided so.

        ``wait``: as the run's `Waiting` event or `waiting` names it. ``by``: who decides, for the log. A decision with
        the same ``decision_id`` is the same decision. Raises

        - AlreadyDecided, with the decision that counts, if somebody decided before, or the deadline did;
        - WaitNotFound if the run does not wait for this, or has ended;
        - RequestInvalid if the decision does not fit, such as arguments that do not match the tool's schema; it still
          waits then;
        - DecisionPending if no intake took it within ``wait_s`` seconds: repeat it with the same id;
        - ServerUnavailable, ServerFull.
        """
        edited = dict(arguments) if arguments is not None else None
        decided = Approval(run=run_id_of(run), decision="allow", arguments=edited, **_by(wait, by, decision_id))
        return await self.decide(decided, wait_s=wait_s)

    async def deny(
        self,
        run: AnyRun | str,
        wait: str,
        reason: str | None = None,
        *,
        by: str | None = None,
        decision_id: str | None = None,
        wait_s: float = DECIDED_WAIT_S,
    ) -> WaitFate:
        """Deny a tool call for which the run waits: the model reads that, and the ``reason``. As `approve`."""
        decided = Approval(run=run_id_of(run), decision="deny", reason=reason, **_by(wait, by, decision_id))
        return await self.decide(decided, wait_s=wait_s)

    async def answer(
        self,
        run: AnyRun | str,
        wait: str,
        content: Mapping[str, object] | None = None,
        *,
        decision: Literal["accept", "decline", "cancel"] = "accept",
        by: str | None = None,
        decision_id: str | None = None,
        wait_s: float = DECIDED_WAIT_S,
    ) -> WaitFate:
        """Answer a tool's question; ``content`` must match its schema. ``decision``: `decline` and `cancel` give none.
        As `approve`.
        """
        given = dict(content) if content is not None else None
        decided = Answer(run=run_id_of(run), decision=decision, content=given, **_by(wait, by, decision_id))
        return await self.decide(decided, wait_s=wait_s)

    async def tool_result(
        self,
        run: AnyRun | str,
        wait: str,
        content: object,
        *,
        is_error: bool = False,
        by: str | None = None,
        decision_id: str | None = None,
        wait_s: float = DECIDED_WAIT_S,
    ) -> WaitFate:
        """Give the result of a tool of the kind `client`: text, or what matches its ``result`` schema. As `approve`."""
        decided = ToolResult(run=run_id_of(run), content=content, is_error=is_error, **_by(wait, by, decision_id))
        return await self.decide(decided, wait_s=wait_s)

    async def decide(self, decision: WaitDecision, *, wait_s: float = DECIDED_WAIT_S) -> WaitFate:
        """Send a decision as it is on the bus; the four methods before make one. As `approve`."""
        return await send_decision(self._deployment, self._put_decision, decision, wait_s)


def _by(wait: str, by: str | None, decision_id: str | None) -> dict[str, Any]:
    return {"wait": wait, "by": by, "decision_id": decision_id or new_run_id()}


async def list_waits(
    deployment: Deployment, *, tenant: str | None, newest_first: bool, limit: int | None, after: Position | None = None
) -> AsyncGenerator[tuple[Position, WaitInfo | None]]:
    """Yield what is waited for, by the time since when, each with its place; and after each page the place up to which
    it was read. Raises ServerUnavailable.
    """
    keys = await deployment.keys()
    await deployment.refresh()  # more partitions may have been added
    sources = [
        IndexReader(keys.waiting(partition, tenant or ""), newest_first=newest_first, after=after, until_ms=None)
        for partition in range(keys.partitions)
    ]
    left = limit
    while left != 0:
        async with deployment.hub.reads:
            with translated(deployment.server):
                await fill(deployment.server.client, sources, PAGE)
                places = merged(sources, PAGE, newest_first=newest_first)
                found = await _read(deployment.server.client, keys, places)
        if not places:
            return
        for (_, place), info in zip(places, found, strict=True):
            if info is not None:
                yield place, info
                left = None if left is None else left - 1
                if left == 0:
                    return
        yield places[-1][1], None


async def count_waits(deployment: Deployment, *, tenant: str | None) -> int:
    """How many waits are open. Raises ServerUnavailable."""
    keys = await deployment.keys()
    await deployment.refresh()
    with translated(deployment.server):
        pipe: Any = deployment.server.client.pipeline(transaction=False)
        for partition in range(keys.partitions):
            pipe.zcard(keys.waiting(partition, tenant or ""))
        return sum(await pipe.execute())


async def _read(client: Any, keys: Keys, places: Sequence[tuple[int, Position]]) -> list[WaitInfo | None]:
    """What is waited for at these places; None where that is over."""
    pipe = client.pipeline(transaction=False)
    for partition, place in places:
        run, _, wait = place.run.rpartition("/")
        pipe.hmget(keys.within(partition).run(run), [STATUS, wait_field(wait)])
    replies: list[Any] = await pipe.execute() if places else []
    return [_info_decoder.decode(found) if status == b"open" and found else None for status, found in replies]


async def waits_of(deployment: Deployment, run: str) -> list[WaitInfo]:
    """What one run waits for, by the time since when. Raises ServerUnavailable."""
    keys = await deployment.keys_of(run)
    found: list[bytes] = []
    with translated(deployment.server):
        client: Any = deployment.server.client
        status, names = await client.hmget(keys.run(run), [STATUS, WAITS])
        if status == b"open" and names:
            wanted = [wait_field(name) for name in names.decode().split()]
            found = [value for value in await client.hmget(keys.run(run), wanted) if value]
    return sorted((_info_decoder.decode(each) for each in found), key=lambda info: (info.since_ms, info.wait))


async def send_decision(
    deployment: Deployment, put: Callable[[WaitDecision], Awaitable[None]], decision: WaitDecision, wait_s: float
) -> WaitFate:
    """Send a decision, and return it as it counts: of a durable run, once it is where the deployment's durability
    says. Raises as `Client.approve` does.
    """
    place = (await deployment.keys_of(decision.run)).decision(decision.run, decision.decision_id)
    await put(decision)
    look_s = FIRST_LOOK_S
    try:
        async with asyncio.timeout(wait_s):
            while True:
                with translated(deployment.server):
                    found: bytes | None = await deployment.server.client.get(place)
                    reply = _reply_decoder.decode(found) if found is not None else None
                    if reply and reply.fate and reply.fate.durable:
                        confirmed = msgspec.structs.replace(confirm(place), durable=True)
                        if not await run_script(deployment.server, confirmed):
                            reply = None  # a fail-over lost it since: it is decided again
                if reply is not None:
                    return _counted(decision, reply)
                await asyncio.sleep(look_s)
                look_s = min(2 * look_s, LONGEST_LOOK_S)
    except TimeoutError:
        raise DecisionPending(decision.run, decision.wait, decision.decision_id, wait_s) from None


def _counted(sent: WaitDecision, reply: DecisionReply) -> WaitFate:
    if reply.problem is not None:
        raise RequestInvalid("decision", reply.problem)
    if reply.fate is None:
        raise WaitNotFound(sent.run, sent.wait)
    if reply.fate.id != sent.decision_id:
        raise AlreadyDecided(sent.run, reply.fate)
    return reply.fate
