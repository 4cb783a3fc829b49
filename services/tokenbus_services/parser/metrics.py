"""The parser's metrics of its runs. A batch that is processed twice, after a takeover, counts twice.

No label holds anything from a request: kinds, statuses and error classes are few and known.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from tokenbus.events.public import (
    BlockComplete,
    Chunk,
    PublicEvent,
    Restarted,
    Retrying,
    RunEnd,
    RunFailedEvent,
    Started,
    UsageReported,
)

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RunMetrics:
    """Counts public events."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.characters = 0
        """Of all chunks."""
        self._started = Counter("tokenbus_runs_started", "Runs that were accepted.", registry=registry)
        self._ended = Counter("tokenbus_runs_ended", "Runs that ended, by how.", ["status"], registry=registry)
        self._chunks = Counter("tokenbus_chunks", "Chunks written, by kind of block.", ["kind"], registry=registry)
        self._retries = Counter(
            "tokenbus_retries", "Attempts that failed and were followed by another.", ["error"], registry=registry
        )
        self._failures = Counter(
            "tokenbus_failures", "Runs that ended failed, by class of the error.", ["error"], registry=registry
        )
        self._tokens = Counter("tokenbus_tokens", "Tokens as providers counted them.", ["direction"], registry=registry)
        self._tools = Counter(
            "tokenbus_tool_results", "Tool results that runs received, by outcome.", ["outcome"], registry=registry
        )
        self._first_text = Histogram(
            "tokenbus_first_text_seconds",
            "From a run's acceptance to its first visible text.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._whole = Histogram(
            "tokenbus_run_seconds", "From a run's acceptance to its end.", registry=registry, buckets=_SECONDS
        )

    def count(self, event: PublicEvent) -> None:
        """Count one written event."""
        match event:
            case Chunk():
                self.characters += len(event.text)
                self._chunks.labels(event.kind).inc()
            case BlockComplete(kind="tool_result"):
                self._tools.labels("error" if event.is_error else "ok").inc()
            case Started():
                self._started.inc()
            case Retrying() | Restarted():
                self._retries.labels(event.error.kind).inc()
            case UsageReported():
                self._tokens.labels("input").inc(event.usage.input or 0)
                self._tokens.labels("output").inc(event.usage.output or 0)
            case RunEnd():
                self._end(event)
            case _:
                pass

    def _end(self, event: RunEnd) -> None:
        self._ended.labels(str(event.__struct_config__.tag)).inc()
        if isinstance(event, RunFailedEvent):
            self._failures.labels(event.error.kind).inc()
        if event.timing.first_visible_ms is not None:
            self._first_text.observe(event.timing.first_visible_ms / 1000)
        self._whole.observe(event.timing.total_ms / 1000)
