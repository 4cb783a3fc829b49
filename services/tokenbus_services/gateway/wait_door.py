"""What runs wait for, behind the answers: the one door through which clients of the gateway see and decide it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from tokenbus import Approval, Client, WaitFate, WaitInfo
from tokenbus.bus.run_index import Position
from tokenbus.client.deployment import Deployment
from tokenbus.client.waits import count_waits, list_waits, waits_of
from tokenbus.events.requests import WaitDecision
from tokenbus.events.waits import Door
from tokenbus_services.gateway.audit import Changes
from tokenbus_services.gateway.callers import AccessControl, Caller
from tokenbus_services.gateway.problem import Problem, Refusal


class WaitDoor:
    """What the runs of a caller's tenant wait for, and for operators those of any."""

    def __init__(self, bus: Client, access: AccessControl, deployment: Deployment, changes: Changes) -> None:
        self._bus = bus
        self._access = access
        self._deployment = deployment
        self._changes = changes

    def listed(
        self, caller: Caller, *, tenant: str | None, newest_first: bool, limit: int, after: Position | None
    ) -> AsyncGenerator[tuple[Position, WaitInfo | None]]:
        """What is waited for, with places as `list_waits` yields them. ``tenant``: for operators; None: all. Raises
        ServerError.
        """
        whose = tenant if caller.operator else caller.tenant
        return list_waits(self._deployment, tenant=whose or None, newest_first=newest_first, limit=limit, after=after)

    async def count(self, caller: Caller) -> int:
        """How many waits of the caller's tenant are open, for operators of all. Raises ServerError."""
        return await count_waits(self._deployment, tenant=None if caller.operator else caller.tenant or None)

    async def of_run(self, run: str) -> list[WaitInfo]:
        """What a run waits for that the caller owns. Raises ServerError."""
        return await waits_of(self._deployment, run)

    async def decide(self, caller: Caller, door: Door, decision: WaitDecision) -> WaitFate:
        """Decide a wait of a run that the caller owns. Raises Refusal (403) for an approval if its key may decide none,
        (429) over its limit of requests; RequestInvalid, AlreadyDecided, WaitNotFound, DecisionPending, ServerError.
        """
        if isinstance(decision, Approval) and not caller.approves:
            why = "this key may not decide whether tools run: `approve` of the key forbids it"
            raise Refusal(Problem(status=403, code="approval_not_allowed", message=why, kind="auth"))
        await self._access.admit_write(caller)
        key = f"key {caller.key}" if caller.key else None
        by = ", ".join(name for name in (decision.by, key) if name)
        fate = await self._bus.decide(msgspec.structs.replace(decision, by=by or None, door=door, metadata=None))
        await self._changes.note(caller, door, "decide", run=decision.run, wait=decision.wait, decision=fate.decision)
        return fate
