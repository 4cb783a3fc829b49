"""Tasks: calls that a server goes on with after it has answered, and that are asked for their state.

https://modelcontextprotocol.github.io/ext-tasks/specification/2026-07-28/tasks.html. The official package has no tasks
of its own; these are the messages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import mcp_types as types
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.alias_generators import to_camel

EXTENSION = "io.modelcontextprotocol/tasks"
FIRST_POLL_S, LEAST_POLL_S, LONGEST_POLL_S = 0.5, 0.02, 30.0
"""How soon a task is asked for its state, if the server does not say, and what it may say."""
MAX_TASK_ID_CHARS = 1024
CANCEL_S = 0.8
"""How long the cancel of a task may take: the worker may be about to end."""

Status = Literal["working", "input_required", "completed", "failed", "cancelled"]


class TaskStarted(types.Result):
    """The answer to a call that has become a task."""

    result_type: Literal["task"] = "task"
    task_id: str
    poll_interval_ms: float | None = None


class TaskState(types.Result):
    """A task as its server sees it."""

    task_id: str
    status: Status
    status_message: str | None = None
    poll_interval_ms: float | None = None
    input_requests: types.InputRequests | None = None
    result: types.CallToolResult | None = None
    error: types.ErrorData | None = None


class _Named(types.RequestParams):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    task_id: str


class _Update(_Named):
    input_responses: types.InputResponses


class GetTask(types.Request[_Named, Literal["tasks/get"]]):
    method: Literal["tasks/get"] = "tasks/get"
    params: _Named


class UpdateTask(types.Request[_Update, Literal["tasks/update"]]):
    method: Literal["tasks/update"] = "tasks/update"
    params: _Update


class CancelTask(types.Request[_Named, Literal["tasks/cancel"]]):
    method: Literal["tasks/cancel"] = "tasks/cancel"
    params: _Named


class Ack(BaseModel):
    """An answer without content."""


def get(task: str) -> GetTask:
    return GetTask(params=_Named(task_id=task))


def update(task: str, responses: types.InputResponses) -> UpdateTask:
    return UpdateTask(params=_Update(task_id=task, input_responses=responses))


def cancel(task: str) -> CancelTask:
    return CancelTask(params=_Named(task_id=task))


STATE = TypeAdapter[TaskState](TaskState)
ACK = TypeAdapter[Ack](Ack)

Resolve = Callable[[TaskStarted, ClaimContext], Awaitable[types.CallToolResult]]


class Tasks(ClientExtension):
    """Says to servers of the 2026 version that calls may become tasks."""

    identifier = EXTENSION

    def claims(self) -> Sequence[ResultClaim[Any]]:
        return (ResultClaim(result_type="task", model=TaskStarted, resolve=_never),)


async def _never(started: TaskStarted, context: ClaimContext) -> types.CallToolResult:
    raise AssertionError("calls are sent below the package's own handling of results")


def pause_s(poll_interval_ms: float | None) -> float:
    """How long to wait before the task is asked for again."""
    wanted = FIRST_POLL_S if poll_interval_ms is None else poll_interval_ms / 1000
    return min(max(wanted, LEAST_POLL_S), LONGEST_POLL_S)
