"""Prepares requests for the inbound stream: assigns ids and runs the same checks as intake."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from time import time_ns
from typing import Any, cast
from uuid import UUID

import msgspec

from tokenbus.core.request.bounds import RANDOM_BITS, tenant_of, uuid7
from tokenbus.core.request.json_values import too_deep
from tokenbus.core.request.parse import request_from
from tokenbus.errors import RequestError, RequestInvalid, RequestTooLarge, ServerError
from tokenbus.events.requests import Append, Cancel, Generate

_NOT_PLAIN = (bytes, bytearray, memoryview, datetime, date, time, timedelta, UUID, Decimal)
"""Types that msgspec would encode in its own form. They are passed through, so that the check reports them."""


def with_id(
    request: Generate | Mapping[str, object], new_id: Callable[[], str]
) -> tuple[str, Generate | Mapping[str, object]]:
    """Return the run id, a new one if the request has none, and the request with it. Raises RequestInvalid."""
    if isinstance(request, Generate):
        run = request.id or new_id()
        return run, msgspec.structs.replace(request, id=run)
    if not isinstance(cast("object", request), Mapping):  # from a program that no type checker read
        raise RequestInvalid("$", f"Expected `Generate` or a mapping, got `{type(request).__name__}`")
    if request.get("type") == "cancel":
        raise RequestInvalid("type", "a cancel is sent with Client.cancel")
    given = request.get("id")
    run = new_id() if given is None else given
    if not isinstance(run, str):
        raise RequestInvalid("id", f"Expected `str`, got `{type(run).__name__}`")
    return run, {"type": "generate", **request, "id": run}


def with_trace_context(
    request: Generate | Mapping[str, object],
) -> Generate | Mapping[str, object]:
    """Add the current OpenTelemetry span as the run's parent, if there is one and the request names none.

    Nothing is imported for it: a program that has a span has imported the package.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return request
    context: Any = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return request
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 1:02x}"
    if isinstance(request, Generate):
        return request if request.traceparent else msgspec.structs.replace(request, traceparent=traceparent)
    return {"traceparent": traceparent, **request}


def encoded(request: Generate | Cancel | Append | Mapping[str, object], *, limit: int) -> bytes:
    """Encode the request as JSON. Raises RequestInvalid if intake would refuse it, RequestTooLarge if it exceeds
    ``limit`` bytes.
    """
    try:
        value = msgspec.to_builtins(request, builtin_types=_NOT_PLAIN)
    except RecursionError:
        raise too_deep() from None
    except TypeError as e:
        raise RequestInvalid("$", str(e)) from None
    request_from(value)
    data = msgspec.json.encode(value)
    if len(data) > limit:
        raise RequestTooLarge(len(data), limit)
    return data


def tenant_in(request: Generate | Mapping[str, object]) -> str:
    """Return the tenant of a request that `encoded` accepted; empty if it has none."""
    metadata = request.metadata if isinstance(request, Generate) else request.get("metadata")
    return tenant_of(cast("Mapping[str, object] | None", metadata))


@contextmanager
def carrying(request: Generate | Append | Mapping[str, object]) -> Generator[None]:
    """Attach the request to errors raised in this block, so that the caller can publish the same request again."""
    try:
        yield
    except (RequestError, ServerError) as e:
        e.request = request
        raise


class RunIds:
    """Generates UUIDv7 ids, each greater than the one before it, even if the clock stands still or is set back.

    Method 2 of RFC 9562 section 6.2: within one millisecond the random part increases by a random step. Thread-safe.
    """

    def __init__(self, now_ms: Callable[[], int] = lambda: time_ns() // 1_000_000) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._ms = -1
        self._rest = 0

    def __call__(self) -> str:
        """Return a new id."""
        with self._lock:
            now = self._now_ms()
            if now > self._ms:
                # The top bit stays clear, so that the steps within one millisecond cannot overflow.
                self._ms, self._rest = now, secrets.randbits(RANDOM_BITS - 1)
            else:
                self._rest += 1 + secrets.randbits(32)
            return uuid7(self._ms, self._rest)


new_run_id = RunIds()
