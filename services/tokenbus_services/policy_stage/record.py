"""A run under policies, as stored on the server: its failed starts, and the verdicts of its policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.policies import Place, count_policy_start, note_place, note_unexplained, policy_starts
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, PolicyVerdict, PolicyVerdicts, RecordedDecision, encode
from tokenbus_services.policy_stage.failed_starts import RunStarts, Starts

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

GROUP = "policy"


class ServerRunRecord:
    """See `RunRecord`. Valid as long as the partition's lease has this token."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        run: str,
        policies: tuple[str, ...],
        *,
        token: str,
        on_decision: Callable[[RecordedDecision], None],
    ) -> None:
        """``on_decision``: called for each decision that was recorded."""
        self._server = server
        self._keys = keys
        self._run = run
        self._policies = policies
        self._token = token
        self._on_decision = on_decision
        self._partition = keys.partition_of(run)
        self._lease = keys.lease(self._partition, GROUP)

    async def starts(self) -> RunStarts | None:
        call = policy_starts(self._keys.run(self._run), self._lease, token=self._token, policies=self._policies)
        reply = await self._run_script(call, "starts of a run's policies")
        if isinstance(reply, bytes):
            return None
        in_shared, in_own, unexplained, *numbers = [int(value or 0) for value in reply]
        pairs = zip(self._policies, numbers[::2], numbers[1::2], strict=True)
        counted = {policy: Starts(count, failed_at) for policy, count, failed_at in pairs}
        return RunStarts(counted, lost_in_shared=in_shared, lost_in_own=in_own, unexplained=unexplained)

    async def note_place(self, place: Place) -> bool:
        call = note_place(self._keys.run(self._run), self._lease, token=self._token, place=place)
        return not isinstance(await self._run_script(call, "place of a run's policies"), bytes)

    async def note_unexplained(self, ends: int) -> bool:
        call = note_unexplained(self._keys.run(self._run), self._lease, token=self._token, ends=ends)
        return not isinstance(await self._run_script(call, "ends of a run's executors"), bytes)

    async def count(self, policy: str, starts: int, *, failed_at: int | None = None) -> Starts | None:
        call = count_policy_start(
            self._keys.run(self._run),
            self._lease,
            token=self._token,
            policy=policy,
            starts=starts,
            failed_at=failed_at or 0,
        )
        reply = await self._run_script(call, "count of a policy's start")
        return None if isinstance(reply, bytes) else Starts(*reply)

    async def append_verdicts(self, start: int, first: int, steps: list[PolicyVerdict]) -> bool:
        server, keys = self._server, self._keys
        worker = f"{self._token} {start}" if start else self._token
        frame = EventFrame(0, CONTROL_ATTEMPT, server.clock.now_ms(), [PolicyVerdicts(worker, steps, first)])
        call = scripts.append_verdicts(
            keys.run(self._run),
            keys.topic(self._partition, "events"),
            keys.lease(self._partition, "parser"),
            self._lease,
            run=self._run,
            token=self._token,
            frame=encode(frame),
        )
        reply = await self._run_script(call, "verdicts")
        if reply != b"ok":
            log.info("verdicts_refused", run=self._run, reply=reply.decode())
            return False
        for step in steps:
            for decision in step.decisions:
                self._on_decision(decision)
                log.info("policy_decided", run=self._run, policy=decision.policy, action=decision.action)
        return True

    async def _run_script(self, call: scripts.ScriptCall, what: str) -> Any:
        return await retry_until_available(self._server, lambda: run_script(self._server, call), what=what)
