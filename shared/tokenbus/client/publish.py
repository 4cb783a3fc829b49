"""Requests on their way onto the inbound stream: each gets its id, and is checked here as intake checks it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import cast
from uuid import UUID

import msgspec

from tokenbus.core.request.json_values import too_deep
from tokenbus.core.request.parse import request_from
from tokenbus.core.request.tenant import tenant_of
from tokenbus.errors import RequestError, RequestInvalid, RequestTooLarge, ServerError
from tokenbus.events.requests import Cancel, Generate

_NOT_PLAIN = (bytes, bytearray, memoryview, datetime, date, time, timedelta, UUID, Decimal)
"""Types that msgspec would write in a form of its own. They are handed on as they are, so that the check names them."""


def with_id(
    request: Generate | Mapping[str, object], new_id: Callable[[], str]
) -> tuple[str, Generate | Mapping[str, object]]:
    """The request's run id, a new one where it has none, and the request with it. Raises RequestInvalid."""
    if isinstance(request, Generate):
        run = request.id or new_id()
        return run, msgspec.structs.replace(request, id=run)
    if request.get("type") == "cancel":
        raise RequestInvalid("type", "a cancel is sent with Client.cancel")
    given = request.get("id")
    run = new_id() if given is None else given
    if not isinstance(run, str):
        raise RequestInvalid("id", f"Expected `str`, got `{type(run).__name__}`")
    return run, {"type": "generate", **request, "id": run}


def encoded(request: Generate | Cancel | Mapping[str, object], *, limit: int) -> bytes:
    """The request's JSON. Raises RequestInvalid for what intake would refuse, RequestTooLarge over ``limit`` bytes."""
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
    """The tenant of a request that `encoded` took; empty text: none."""
    metadata = request.metadata if isinstance(request, Generate) else request.get("metadata")
    return tenant_of(cast("Mapping[str, object] | None", metadata))


@contextmanager
def carrying(request: Generate | Mapping[str, object]) -> Generator[None]:
    """Errors that leave this block carry the request, so that the caller can try again with what was sent."""
    try:
        yield
    except (RequestError, ServerError) as e:
        e.request = request
        raise
