"""Isolate entries that break the connection of every reader, or whose read gets an error reply.

The server counts such an entry of a work queue as delivered, so it comes back to one worker after the other. Other
entries in the broken reply are counted as delivered too, which wrongly suggests that their workers died. An entry of a
stage's input is not counted, but nothing after it can be read.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from redis.exceptions import RedisError

from tokenbus.bus.scripts import ScriptCall
from tokenbus.bus.scripts import entries as scripts
from tokenbus.bus.server.error_replies import ValueTooLarge, is_final, may_pass
from tokenbus.bus.server.retry import ISOLATED_TRIES, retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import Entry, Unreadable

BROKEN_DELIVERIES = 3
"""Check an entry separately after this many deliveries, the last of them to a worker that never received it."""
MAX_INSPECTED = 32
MAX_BAD_FIELDS = 3
"""Fields of one entry that may fail; after that, the rest of the entry counts as unreadable too."""
READ_BYTES = 512 * 1024
"""Bytes of entries that one call of `read_one_by_one` reads; the rest is left to the next call."""


async def may_be_an_entry(server: Server, error: Exception) -> bool:
    """Whether an entry may have caused this read error: the server answers other commands."""
    return isinstance(error, ValueTooLarge) or (
        isinstance(error, RedisError | OSError)
        and not may_pass(error)
        and not is_final(error)
        and await server.answers()
    )


async def never_arrived(
    server: Server,
    stream: str,
    *,
    group: str,
    consumer: str,
    held: Collection[tuple[str, str]],
    least: int = BROKEN_DELIVERIES,
) -> list[tuple[str, int]]:
    """Ids and delivery counts of entries that were delivered to this worker, and others before it, but never
    arrived, after at least ``least`` deliveries. The count of an entry that an earlier worker had begun is above
    `BEGUN`.
    """
    client: Any = server.client
    pending = await client.xpending_range(
        stream, group, min="-", max="+", count=len(held) + MAX_INSPECTED, consumername=consumer
    )
    found = [(each["message_id"].decode(), int(each["times_delivered"])) for each in pending]
    return [(i, n) for i, n in found if n >= least and (stream, i) not in held][:MAX_INSPECTED]


async def why_unreadable(server: Server, stream: str, entry_id: str) -> Exception | None:
    """The error of reading this entry alone; None if it can be read."""
    found = await _read_alone(server, stream, entry_id)
    return found if isinstance(found, Exception) else None


async def names_in(server: Server, stream: str, entry_id: str) -> dict[bytes, int]:
    """Names and sizes in bytes of an entry's fields, read without their values."""
    call = scripts.field_sizes(stream, entry=entry_id)
    flat: list[Any] = await retry_until_available(server, lambda: run_script(server, call), what="names in an entry")
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def type_and_id(server: Server, stream: str, entry_id: str) -> tuple[str, str]:
    """Type and id at the top level of a request, unparsed; empty if there is none.

    The server searches for them, in JSON with or without FastStream's binary header, and returns nothing else of the
    entry.
    """
    call = scripts.find_request(stream, entry=entry_id)
    kind, run = await retry_until_available(
        server, lambda: run_script(server, call), what="id of a request", tries=ISOLATED_TRIES
    )
    return kind.decode(errors="replace"), run.decode(errors="replace")


async def read_one_by_one(
    server: Server, stream: str, *, after: str, count: int, last: str = "+"
) -> tuple[list[Entry], Unreadable | None]:
    """Read up to ``count`` entries after ``after`` and up to ``last``, one at a time.

    Returns the entries before the first unreadable one, and that one, if any. Raises redis-py's errors.
    """
    call = scripts.ids(stream, after=after, last=last, count=count)
    ids: list[bytes] = await retry_until_available(server, lambda: run_script(server, call), what=f"ids in {stream}")
    entries: list[Entry] = []
    size = 0
    for entry_id in ids:
        found = await _read_alone(server, stream, entry_id.decode())
        if isinstance(found, Exception):
            return entries, await _read_fields(server, stream, entry_id, found)
        entries += found
        size += sum(len(value) for _, fields in found for value in fields.values())
        if size >= READ_BYTES:
            break
    return entries, None


async def _read_fields(server: Server, stream: str, entry_id: bytes, error: Exception) -> Unreadable:
    """Read each field of an unreadable entry separately, so that a bad frame affects only its own run."""
    sizes = await names_in(server, stream, entry_id.decode())
    fields: dict[bytes, bytes] = {}
    bad: dict[bytes, int] = {}
    for n, (name, size) in enumerate(sizes.items()):
        value = error
        if len(sizes) > 1 and len(bad) < MAX_BAD_FIELDS:
            value = await _isolated(server, scripts.value(stream, entry=entry_id, place=2 * n + 2))
        if isinstance(value, Exception):
            bad[name] = size
        else:
            fields[name] = value
    reason = f"the entry cannot be read: {str(error) or type(error).__name__}"
    return Unreadable((entry_id, fields), bad, reason)


async def _isolated(server: Server, call: ScriptCall) -> bytes | Exception:
    try:
        what = "a field of an entry"
        return await retry_until_available(server, lambda: run_script(server, call), what=what, tries=ISOLATED_TRIES)
    except (RedisError, OSError) as e:
        return e


async def _read_alone(server: Server, stream: str, entry_id: str) -> list[Entry] | Exception:
    """The entry (none if it has been deleted), or the error of reading it alone."""
    try:
        return await retry_until_available(
            server,
            lambda: server.client.xrange(stream, entry_id, entry_id),
            what=f"entry {entry_id} of {stream}",
            tries=ISOLATED_TRIES,
        )
    except (RedisError, OSError) as e:
        return e
