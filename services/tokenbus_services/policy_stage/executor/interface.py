"""The executor interface of a policy worker, and its simplest implementation: in the worker's own process.

Executor processes are in `pool`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tokenbus.bus.liveness import Liveness
from tokenbus_services.policy_stage.blame import Fault
from tokenbus_services.policy_stage.bus_client import PolicyClient
from tokenbus_services.policy_stage.executor import messages
from tokenbus_services.policy_stage.executor.calls import PolicyExecutor, load_policies
from tokenbus_services.policy_stage.executor.messages import FromExecutor, Setup


class RunInExecutor(Protocol):
    """Callbacks for a run in its executor. None is called after `finished` or `lost`."""

    def on_verdicts(self, message: messages.Verdicts) -> None:
        """Its policies returned verdicts."""
        ...

    def on_waiting(self) -> None:
        """It is waiting for a slot."""
        ...

    def on_finished(self) -> None:
        """All of it has been judged."""
        ...

    def on_lost(self, fault: Fault | None, *, suspect: bool) -> None:
        """The executor is gone, and the run must start again. ``fault``: it counts against this run.
        ``suspect``: it may have been this run's fault.
        """
        ...


class Executor(Protocol):
    """One executor, as seen by its worker."""

    @property
    def single(self) -> bool:
        """Whether it never has more than one run."""
        ...

    def open(
        self, run: str, policies: tuple[str, ...], failing: Mapping[str, messages.Failing], to: RunInExecutor
    ) -> int:
        """Start judging a run; return its task number."""
        ...

    def feed(self, task: int, frames: list[bytes]) -> None:
        """Pass on further drafts."""
        ...

    def close(self, task: int) -> None:
        """Stop judging: the run needs no more verdicts."""
        ...


class Executors(Protocol):
    """The executors of a worker."""

    @property
    def count(self) -> int:
        """Number of running processes."""
        ...

    @property
    def waiting_calls(self) -> int:
        """Number of policy calls waiting for a slot."""
        ...

    async def start(self, liveness: Liveness) -> None:
        """Start. Raises SettingsError if a policy cannot be loaded."""
        ...

    async def stop(self) -> None:
        """Stop all running work."""
        ...

    def may_block(self, policies: tuple[str, ...]) -> bool:
        """Whether one of these policies ended or blocked an executor recently."""
        ...

    async def shared(self) -> Executor:
        """Return an executor shared by several runs."""
        ...

    async def restricted(self) -> Executor:
        """Return an executor for a run whose policies `may_block`: one of its own if one is free, else one that it
        shares with such runs.
        """
        ...

    async def separate(self, waits: Callable[[], None], *, each_s: float) -> Executor:
        """Return an executor for a single run; closing its task ends it. ``waits`` is called every ``each_s`` until
        there is one, for `MAX_WAIT_S`.
        """
        ...


class InProcessExecutors:
    """The worker's process as the only executor: a policy that blocks or ends it costs the worker its leases."""

    def __init__(self, setup: Setup, client: PolicyClient) -> None:
        """Import the policies. Raises SettingsError if one cannot be loaded or its options are invalid."""
        self._client = client
        self._runs: dict[int, RunInExecutor] = {}
        self._tasks = 0
        self._executor = PolicyExecutor(
            load_policies(setup.policies),
            client,
            timeouts={name: policy.timeout_s for name, policy in setup.policies.items()},
            calls=setup.calls,
            reassure_s=setup.reassure_s,
            send=self._on_message,
        )

    @property
    def count(self) -> int:
        return 0

    @property
    def waiting_calls(self) -> int:
        return self._executor.waiting

    async def start(self, liveness: Liveness) -> None:
        pass

    async def stop(self) -> None:
        await self._executor.close()
        await self._client.aclose()

    def may_block(self, policies: tuple[str, ...]) -> bool:
        return False

    @property
    def single(self) -> bool:
        return False

    async def shared(self) -> Executor:
        return self

    async def restricted(self) -> Executor:
        return self

    async def separate(self, waits: Callable[[], None], *, each_s: float) -> Executor:
        return self

    def open(
        self, run: str, policies: tuple[str, ...], failing: Mapping[str, messages.Failing], to: RunInExecutor
    ) -> int:
        self._tasks += 1
        self._runs[self._tasks] = to
        self._executor.handle(messages.Open(self._tasks, run, policies, dict(failing)))
        return self._tasks

    def feed(self, task: int, frames: list[bytes]) -> None:
        self._executor.handle(messages.Feed(task, frames))

    def close(self, task: int) -> None:
        if self._runs.pop(task, None):
            self._executor.handle(messages.Close(task))

    def _on_message(self, message: FromExecutor) -> None:
        if (run := self._runs.get(message.task)) and deliver(message, run):
            self._runs.pop(message.task, None)


def deliver(message: FromExecutor, run: RunInExecutor) -> bool:
    """Pass an executor's message on to its run; return whether it is the last one."""
    match message:
        case messages.Verdicts():
            run.on_verdicts(message)
        case messages.WaitingForSlot():
            run.on_waiting()
        case messages.Finished() | messages.Defect():
            run.on_finished()
            return True
        case messages.Overran():
            pass  # the executor pool handles it
    return False
