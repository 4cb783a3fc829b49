"""All runs that one policy worker judges: what they share, and what keeps them within bounds."""

from __future__ import annotations

import asyncio

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from tokenbus.bus import scripts
from tokenbus.bus.liveness import Liveness, rest, wait_briefly
from tokenbus.bus.run_record import read_status
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.stage import Stage
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, PolicyVerdict, PolicyVerdicts, encode
from tokenbus.policy.loading import PolicySpec, load
from tokenbus.policy.policy_runner import BoundPolicy
from tokenbus_services.policy_stage.bus_client import AskingClient
from tokenbus_services.policy_stage.call_slots import Seats
from tokenbus_services.policy_stage.logic import PolicyLogic
from tokenbus_services.policy_stage.run_task import Judging
from tokenbus_services.settings import Settings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

GROUP = "policy"
REASSURANCES = 3
"""So often, in the least time that a run waits for a worker, one that waits for a seat is told to be in hand."""


class Court:
    """Makes the logics of the partitions, and the judging of their runs. `open` it, then `close` it."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        """Imports the policies. Raises SettingsError, where one cannot be had or its options are wrong."""
        self._keys = settings.keys
        self._most = settings.limits.policy_waiting_events
        self._tick_s = settings.stages.tick_s
        self._links = {
            name: load(
                PolicySpec(
                    policy=policy.use,
                    options=policy.options,
                    on_error=policy.on_error,
                    timeout_s=policy.timeout_s,
                    name=name,
                ),
                f"policies.{name}",
            )
            for name, policy in settings.policies.items()
        }
        self._client = AskingClient(settings)
        limits = settings.limits
        self._seats = Seats(limits.policy_calls_per_worker, reassure_s=limits.policy_slack_s / REASSURANCES)
        self._server: Server | None = None
        self._stage: Stage | None = None
        self._opened = asyncio.Event()
        self._logics: dict[int, PolicyLogic] = {}
        self._waiting = 0
        self._room = asyncio.Event()
        self._room.set()
        self._sweeping: asyncio.Task[None] | None = None
        self._decisions = Counter(
            "tokenbus_policy_decisions", "What policies decided, by what.", ["policy", "action"], registry=registry
        )
        gauge = Gauge("tokenbus_policy_waiting_drafts", "Drafts that no policy has seen yet.", registry=registry)
        gauge.set_function(lambda: self._waiting)
        gauge = Gauge("tokenbus_policy_waiting_calls", "Calls of policies that wait for others.", registry=registry)
        gauge.set_function(lambda: self._seats.waiting)

    def logic(self, partition: int) -> PolicyLogic:
        """A new logic for a partition; one from before is closed."""
        if before := self._logics.pop(partition, None):
            before.close()
        made = self._logics[partition] = PolicyLogic(lambda run, names: self._judging(partition, run, names))
        return made

    async def open(self, server: Server, stage: Stage, liveness: Liveness | None = None) -> None:
        """Judge what comes. Raises what a client raises when it opens."""
        await self._client.__aenter__()
        self._server, self._stage = server, stage
        self._client.server = server
        self._opened.set()
        self._sweeping = (liveness or Liveness()).start(self._sweep(), name="partitions")

    async def close(self) -> None:
        """Stop; what is not judged by now, another worker judges."""
        if self._sweeping:
            self._sweeping.cancel()
        under_way = [judging for logic in self._logics.values() for judging in logic.close()]
        self._logics.clear()
        await asyncio.gather(*(judging.closed() for judging in under_way))
        await self._client.aclose()

    async def room(self) -> None:
        """Wait until there are few enough drafts in hand to read more."""
        while not await wait_briefly(self._room):
            pass

    async def _sweep(self) -> None:
        """Close what belongs to another by now."""
        assert self._stage
        while True:
            await rest(self._tick_s)
            for partition in [p for p in self._logics if self._stage.token_of(p) is None]:
                self._logics.pop(partition).close()

    def _judging(self, partition: int, run: str, names: tuple[str, ...]) -> Judging:
        token: str | None = None

        async def wanted(run: str) -> bool:
            nonlocal token
            await self._opened.wait()
            assert self._server
            assert self._stage
            client, key = self._server.client, self._keys.run(run)
            token = self._stage.token_of(partition)
            status = await retry_until_available(
                self._server, lambda: read_status(client, key), what="status of a run with policies"
            )
            return token is not None and status == "open"

        async def tell(run: str, steps: list[PolicyVerdict]) -> bool:
            assert token
            return await self._tell(partition, run, token, steps)

        return Judging(
            run,
            lambda: self._links_of(names),
            client=self._client,
            tell=tell,
            wanted=wanted,
            waiting=self._wait,
            seats=self._seats,
        )

    def _links_of(self, names: tuple[str, ...]) -> list[BoundPolicy]:
        return [self._links[name]() for name in names]

    async def _tell(self, partition: int, run: str, token: str, steps: list[PolicyVerdict]) -> bool:
        assert self._server
        server, keys = self._server, self._keys
        frame = EventFrame(0, CONTROL_ATTEMPT, server.clock.now_ms(), [PolicyVerdicts(token, steps)])
        call = scripts.rule(
            keys.run(run),
            keys.topic(partition, "events"),
            keys.lease(partition, "parser"),
            keys.lease(partition, GROUP),
            run=run,
            token=token,
            frame=encode(frame),
        )
        reply = await retry_until_available(server, lambda: run_script(server, call), what="ruling")
        if reply != b"ok":
            log.info("ruling_refused", run=run, reply=reply.decode())
            return False
        for step in steps:
            for decision in step.decisions:
                self._decisions.labels(decision.policy, decision.action).inc()
                log.info("policy_decided", run=run, policy=decision.policy, action=decision.action)
        return True

    def _wait(self, more: int) -> None:
        self._waiting += more
        if self._waiting > self._most:
            self._room.clear()
        elif self._waiting <= self._most // 2:
            self._room.set()
