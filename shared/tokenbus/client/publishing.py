"""Onto the inbound stream: a request is checked here as intake checks it, then admitted while there is room."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import msgspec

from tokenbus.bus.scripts.call import Call, script
from tokenbus.bus.send import send
from tokenbus.bus.server import Server, translated
from tokenbus.core.intake import request_from
from tokenbus.core.plain import too_deep
from tokenbus.errors import RequestError, RequestInvalid, RequestTooLarge, ServerError, ServerFull
from tokenbus.events.requests import Cancel, Generate

_NOT_PLAIN = (bytes, bytearray, memoryview, datetime, date, time, timedelta, UUID, Decimal)
"""Types that msgspec would write in a form of its own. They are handed on as they are, so that the check names them."""

_ADMIT = script(
    "admit",
    """
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return false end
return redis.call('XADD', KEYS[1], '*', '__data__', ARGV[2])
""",
)


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


async def admit(server: Server, stream: str, data: bytes, *, most: int) -> None:
    """Append one entry, while the stream holds fewer than ``most``. Raises ServerFull, ServerUnavailable.

    Sent once: after ServerUnavailable it may or may not be there.
    """
    with translated(server, stream):
        taken = await send(server, Call(_ADMIT, [stream], [most, data]))
    if taken is None:
        raise ServerFull(stream, f"{most} requests wait to be taken in")


@contextmanager
def carrying(request: Generate | Mapping[str, object]) -> Generator[None]:
    """Errors that leave this block carry the request, so that the caller can try again with what was sent."""
    try:
        yield
    except (RequestError, ServerError) as e:
        e.request = request
        raise
