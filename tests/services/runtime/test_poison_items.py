"""An item whose work raised: what its client reads, and what the operator does."""

from __future__ import annotations

import msgspec
import pytest

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem
from tokenbus.errors import BlobUnavailable, TokenbusError
from tokenbus.events.frames import decode_events
from tokenbus.events.normalized import Failed
from tokenbus_services.runtime.queue_work import WorkBroken, dead_letter_run
from tokenbus_services.settings import Settings

SECRET = "host-7.internal of tenant acme"


class OfOurs(TokenbusError):
    code = "of_ours"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError(SECRET), "the work failed"),
        (WorkBroken(BaseException(SECRET)), "work_broken: the work ended with BaseException"),
        (BlobUnavailable("blobs", SECRET), "blob_unavailable: the blob store is unavailable"),
        (OfOurs("the tool is gone"), "of_ours: the tool is gone"),
    ],
)
async def test_clients_read_no_text_of_an_unexpected_exception(server: Server, keys: Keys, error: Exception, told: str):
    settings = Settings(prefix=keys.prefix, partitions=keys.partitions)
    item = QueueItem("turns", "1-1", {b"r": b"work"}, 1)
    await dead_letter_run(server, settings, "fetcher", item, error)
    events = keys.topic(keys.partition_of("r"), "events")
    [(_, fields)] = await server.client.xrange(events)
    [failed] = decode_events(fields[b"r"]).events
    assert isinstance(failed, Failed)
    assert (failed.error.code, failed.error.message) == ("poison", told)
    [(_, dead)] = await server.client.xrange(keys.dead)
    text: str = msgspec.json.decode(dead[b"__data__"])["reason"]
    assert (SECRET in text) == (SECRET in str(error))
    await server.client.delete(events)
