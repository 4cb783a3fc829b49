"""Retries the request behind a dead letter, or explains why that is not possible.

A retry is always the request as a new run: the old run has ended as `failed`, which its subscribers have seen. The new
id is derived from the old one, or from the entry's position. So repeated retries always give the same new run.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import msgspec

from tokenbus.bus.dead_letters import StoredDeadLetter
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.run_record import read_status
from tokenbus.bus.server.server import Server
from tokenbus.client.client import Client, Run
from tokenbus.client.deployment import Deployment
from tokenbus.client.rerun import derived_id, request_again
from tokenbus.core.request.parse import decode_request
from tokenbus.errors import CannotRetry, RequestError, RunError, WireError
from tokenbus.events.public import PublicEvent
from tokenbus.events.requests import Generate


async def retry_dead_letter(bus: Client, server: Server, keys: Keys, dead: StoredDeadLetter) -> Run:
    """Publish the request behind the entry. Raises CannotRetry; ServerUnavailable and ServerFull, after which it may
    be retried.
    """
    try:
        deployment = Deployment(server, keys.prefix, keys.partitions)
        return await bus.publish(await dead_letter_request(deployment, dead, events=bus.follow))
    except (RequestError, RunError) as problem:
        raise CannotRetry(dead.id, str(problem)) from None


async def dead_letter_request(
    deployment: Deployment, dead: StoredDeadLetter, *, events: Callable[[str], AsyncGenerator[PublicEvent]]
) -> Generate:
    """The request behind the entry, as a new run. Raises CannotRetry, ServerUnavailable."""
    e = dead.entry
    try:
        if e.stream == (await deployment.keys()).requests:
            return _inbound(dead)
        if e.run is None:
            raise CannotRetry(dead.id, "it names no run")
        keys = await deployment.keys_of(e.run)
        status = await read_status(deployment.server.client, keys.run(e.run))
        if status not in (None, "failed"):
            raise CannotRetry(dead.id, f"run {e.run} is {status}: it continued without this entry")
        return await request_again(deployment, e.run, "retry", again=1, events=events(e.run))
    except (RequestError, RunError, WireError) as problem:
        raise CannotRetry(dead.id, str(problem)) from None


def _inbound(dead: StoredDeadLetter) -> Generate:
    """Return the request that the entry's bytes contain."""
    e = dead.entry
    if e.size:
        raise CannotRetry(dead.id, f"only {len(e.bytes)} of its {e.size} bytes are kept; publish the request again")
    request = decode_request({DATA_FIELD.encode(): e.bytes}, limit=len(e.bytes))
    if not isinstance(request, Generate):
        raise CannotRetry(dead.id, "it is a cancel, which has no effect any more")
    again = derived_id(e.run or f"{e.stream} {e.entry}", "retry", 1)
    if e.run is None:
        return msgspec.structs.replace(request, id=again)
    return msgspec.structs.replace(request, id=again, metadata={**(request.metadata or {}), "retry_of": e.run})
