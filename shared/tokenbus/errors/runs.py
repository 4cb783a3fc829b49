"""A run that ended badly or is unknown, an attempt that may not write, and a tool that gave no result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenbus.errors.base import TokenbusError

if TYPE_CHECKING:
    from tokenbus.events.error_info import ErrorInfo
    from tokenbus.events.run_result import RunResult


class RunError(TokenbusError):
    """A run that did not finish as requested."""

    code = "run_error"

    def __init__(self, run: str, message: str, result: RunResult | None = None) -> None:
        super().__init__(message)
        self.run = run
        self.result = result
        """What the run gave before it ended (from `Client.result`, its `Response`); None if nothing is known of it."""


class RunNotFound(RunError):
    """The run is unknown, or its records have expired."""

    code = "run_not_found"

    def __init__(self, run: str) -> None:
        super().__init__(run, f"unknown run {run}: never accepted, or its records have expired")


class RunLost(RunError):
    """The run was open, and the server has nothing of it any more: its keys were deleted or have expired.

    Publish the request again, under a new id.
    """

    code = "run_lost"
    retryable = True

    def __init__(self, run: str) -> None:
        super().__init__(run, f"run {run} was open, and the server has nothing of it any more")


class RunOpen(RunError):
    """The run is still open: follow it, or cancel it first."""

    code = "run_open"
    retryable = True

    def __init__(self, run: str) -> None:
        super().__init__(run, f"run {run} is still open and cannot be retried")


class RunNotRepeatable(RunError):
    """The run cannot be retried or resumed; ``problem`` says why."""

    code = "run_not_repeatable"

    def __init__(self, run: str, problem: str) -> None:
        super().__init__(run, f"run {run} cannot be retried or resumed: {problem}")
        self.problem = problem


class RunFailed(RunError):
    """The run ended `failed`."""

    code = "run_failed"

    def __init__(self, run: str, error: ErrorInfo, result: RunResult | None = None) -> None:
        super().__init__(run, f"run {run} failed: {error.code}: {error.message}", result)
        self.error = error
        self.retryable = error.retryable


class RunIncomplete(RunError):
    """The run ended `incomplete`: its stream was cut off. ``result`` has the partial output."""

    code = "run_incomplete"

    def __init__(self, run: str, reason: str, result: RunResult | None = None) -> None:
        super().__init__(run, f"run {run} is incomplete: {reason}", result)
        self.reason = reason
        self.retryable = bool(result and result.error and result.error.retryable)


class RunCancelled(RunError):
    """The run ended `cancelled`. ``result`` has the partial output."""

    code = "run_cancelled"

    def __init__(self, run: str, reason: str | None, result: RunResult | None = None) -> None:
        super().__init__(run, f"run {run} was cancelled" + (f": {reason}" if reason else ""), result)
        self.reason = reason


class AttemptRefused(TokenbusError):
    """The attempt may write nothing more: the run ended, was cancelled, or continued with a newer attempt."""

    code = "attempt_refused"

    def __init__(self, run: str, attempt: int, reason: str) -> None:
        super().__init__(f"run {run}: attempt {attempt} was refused: {reason}")
        self.run = run
        self.attempt = attempt
        self.reason = reason


class RecordNotFound(TokenbusError):
    """The run has no debug record: it was not recorded, is still open, or its record has expired."""

    code = "record_not_found"

    def __init__(self, run: str) -> None:
        super().__init__(f"no record of run {run}; `tokenbus records` lists the available ones")
        self.run = run


class ToolFailure(TokenbusError):
    """A tool could not produce a result; the model sees ``problem`` as an error result."""

    code = "tool_failure"

    def __init__(self, tool: str, kind: str, problem: str) -> None:
        super().__init__(f"tool {tool}: {kind}: {problem}")
        self.tool = tool
        self.kind = kind
        self.problem = problem
