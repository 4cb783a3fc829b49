"""What a run's hash says of an attempt, as those read it who are about to work on it."""

from __future__ import annotations

from typing import get_args

import pytest

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import ENDED, UNENDED, RunStatus, read_attempt, read_status
from tokenbus.bus.scripts import RawPart, append_raw
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import ANY_FRAME

RUN = "r1"


async def hash_of(server: Server, keys: Keys, **fields: str | int) -> str:
    key = keys.run(RUN)
    if fields:
        await server.client.hset(key, mapping=fields)
        await server.client.pexpire(key, 60_000)
    return key


async def may_write(server: Server, keys: Keys, attempt: int) -> bool:
    partition = keys.partition_of(RUN)
    part = RawPart(RUN, keys.run(RUN), attempt, ANY_FRAME, False, b"data")
    reply = await run_script(
        server, append_raw(keys.topic(partition, "raw"), keys.lease(partition, "normalizer"), [part])
    )
    return reply[0] == b"ok"


@pytest.mark.parametrize(
    ("fields", "is_open"),
    [
        ({}, False),
        ({"status": "awaited"}, False),
        ({"status": "open", "attempt": 2, "raw": 0}, True),
        ({"status": "open", "attempt": 2, "raw": 0, "closed": 1}, True),
        ({"status": "open", "attempt": 2, "raw": 0, "closed": 2}, False),
        ({"status": "open", "attempt": 3, "raw": 0}, False),
        ({"status": "open", "attempt": 3, "raw": 0, "closed": 2}, False),
        ({"status": "cancelling", "attempt": 2, "raw": 0}, False),
        ({"status": "completed", "attempt": 2, "raw": 0, "closed": 2}, False),
    ],
)
async def test_an_attempt_is_open_if_the_server_takes_what_it_writes(
    server: Server, keys: Keys, fields: dict[str, str | int], is_open: bool
) -> None:
    key = await hash_of(server, keys, **fields)
    record = await read_attempt(server.client, key, 2)
    assert record.is_open is is_open
    assert await may_write(server, keys, 2) is is_open


async def test_further_fields_are_read_at_once_and_in_order(server: Server, keys: Keys) -> None:
    key = await hash_of(server, keys, status="open", attempt=1, let_go=1, request="{}")
    record = await read_attempt(server.client, key, 1, ["request", "deadline"])
    assert record.bypassed
    assert record.more == [b"{}", None]


async def test_an_unknown_run_has_no_status(server: Server, keys: Keys) -> None:
    assert await read_status(server.client, keys.run(RUN)) is None
    assert await read_status(server.client, await hash_of(server, keys, status="expiring")) == "expiring"


def test_a_run_that_was_accepted_has_ended_or_not() -> None:
    assert {*UNENDED, *ENDED, "awaited"} == {*get_args(RunStatus)}
    assert not {*UNENDED} & {*ENDED}
