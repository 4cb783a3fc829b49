"""What a policy worker knows of its executors, and the simplest kind: no process of its own.

In `executor_pool` are those that are processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tokenbus.bus.liveness import Liveness
from tokenbus_services.policy_stage import messages
from tokenbus_services.policy_stage.blame import Fault
from tokenbus_services.policy_stage.bus_client import AskingClient
from tokenbus_services.policy_stage.executor import PolicyExecutor, load_policies
from tokenbus_services.policy_stage.messages import FromExecutor, Setup


class RunInExecutor(Protocol):
    """Who wants to know what becomes of a run in its executor. Nothing comes after `finished` or `lost`."""

    def said(self, message: messages.Said) -> None:
        """Its policies said something."""
        ...

    def waits(self) -> None:
        """It waits for its turn."""
        ...

    def finished(self) -> None:
        """All of it is judged."""
        ...

    def lost(self, fault: Fault | None, *, suspect: bool) -> None:
        """The executor is gone, and the run is to begin anew: by a fault of its own, of another, or of nobody knows
        whom (``suspect``)."""
        ...


class Executor(Protocol):
    """One executor, to its worker."""

    def open(
        self, run: str, policies: tuple[str, ...], failing: Mapping[str, messages.Failing], to: RunInExecutor
    ) -> int:
        """Judge a run; its task."""
        ...

    def feed(self, task: int, frames: list[bytes]) -> None:
        """Further drafts."""
        ...

    def close(self, task: int) -> None:
        """The run needs no judgement any more."""
        ...


class Executors(Protocol):
    """Where policies run."""

    @property
    def count(self) -> int:
        """Processes that run."""
        ...

    @property
    def waiting_calls(self) -> int:
        """Calls of policies that wait for others."""
        ...

    async def start(self, liveness: Liveness) -> None:
        """Start. Raises SettingsError where a policy cannot be had."""
        ...

    async def stop(self) -> None:
        """End all that is under way."""
        ...

    def may_block(self, policies: tuple[str, ...]) -> bool:
        """Whether one of them ended or blocked an executor lately."""
        ...

    async def shared(self) -> Executor:
        """One that several runs have."""
        ...

    async def separate(self, waits: Callable[[], None], *, each_s: float) -> Executor:
        """One for one run, which `close` of its task ends. ``waits`` is called now and then until there is one."""
        ...


class InProcessExecutors:
    """The worker itself, as one executor: a policy that blocks or ends it costs the worker its leases."""

    def __init__(self, setup: Setup, client: AskingClient) -> None:
        """Imports the policies. Raises SettingsError, where one cannot be had or its options are wrong."""
        self._client = client
        self._runs: dict[int, RunInExecutor] = {}
        self._tasks = 0
        self._executor = PolicyExecutor(
            load_policies(setup.policies),
            client,
            timeouts={name: policy.timeout_s for name, policy in setup.policies.items()},
            calls=setup.calls,
            reassure_s=setup.reassure_s,
            send=self._heard,
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

    async def shared(self) -> Executor:
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

    def _heard(self, message: FromExecutor) -> None:
        if (run := self._runs.get(message.task)) and deliver(message, run):
            self._runs.pop(message.task, None)


def deliver(message: FromExecutor, run: RunInExecutor) -> bool:
    """Tell a run what its executor says of it. Whether that is the last."""
    match message:
        case messages.Said():
            run.said(message)
        case messages.Waits():
            run.waits()
        case messages.Finished() | messages.Defect():
            run.finished()
            return True
        case messages.Overran():
            pass  # its pool does what is to be done
    return False
