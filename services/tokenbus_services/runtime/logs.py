"""Structured logs: one event with fields per line; no user's text at info level, never a key."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

import structlog

from tokenbus_services.redaction.redactor import LEARNED, Redaction
from tokenbus_services.terminal_text import safe


def configure(level: str, *, service: str, secrets: Iterable[str] = ()) -> None:
    """Log JSON lines to stderr, including those of libraries; on a terminal, readable lines.

    ``secrets``, and those that the process learns later, are redacted everywhere, including tracebacks and debug lines
    of libraries.
    """
    person = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),  # a line that is not wanted costs next to nothing
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    render = [_made_safe, structlog.dev.ConsoleRenderer()] if person else [structlog.processors.JSONRenderer()]
    redact = Redaction(secrets)

    def without_secrets(logger: object, name: str, line: Any) -> Any:
        return LEARNED(redact(line))  # the renderer returns text, despite the annotation

    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render, without_secrets],
            foreign_pre_chain=shared,
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn.access", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("asyncio").addFilter(_no_removed_node)
    structlog.contextvars.bind_contextvars(service=service)


def _no_removed_node(record: logging.LogRecord) -> bool:
    """Drop redis-py's error about a node that left the Cluster while a command to it was in progress.

    redis-py forgets the node with its connection, which is closed when it is freed (redis/asyncio/cluster.py,
    `ClusterNode.__del__`).
    """
    return not record.getMessage().startswith("Unclosed ClusterNode object")


def _made_safe(logger: object, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape untrusted text in all fields; the console renderer prints text as it is."""
    return {key: safe(value) if isinstance(value, str) else value for key, value in event.items()}
