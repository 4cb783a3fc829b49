"""A task of a worker that should never end by itself, and did."""

from __future__ import annotations

import asyncio

import structlog

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def log_defect(task: asyncio.Task[None]) -> None:
    """Tell of an exception that ended the task, as it happens and not at shutdown: a done-callback."""
    if not task.cancelled() and (error := task.exception()):
        log.error("task_ended", task=task.get_name(), exc_info=error)
