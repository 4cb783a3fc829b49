"""What a rate needs of the server's memory, disk and network for an hour: measured for each chunk, then computed.

``python -m tests.simulation.storage`` measures on a real server with an append-only file, separate and chained, and
prints the unit costs to be kept below. ``docs/operate/scale.md`` has the table that `table` makes of them.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.e2e.conftest import sender
from tests.e2e.fleet import CHAINED, SEPARATE, Kind, fleet
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import DEFAULT_PARTITIONS, Keys
from tokenbus.bus.run_record import ENDED, read_status
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer
from tokenbus_services.settings import RetentionSettings

RUNS, CHUNKS, PACE = 40, 500, 50.0
"""Runs of 500 chunks, 50 a second, as in `scale.py`."""
HOUR_S = 3600
RATES = (1_000, 10_000)
PARTITIONS, ENTRIES = DEFAULT_PARTITIONS, RetentionSettings().topic_entries
TOPICS_OF_A_CHUNK = 2
"""`visible` and `chunks`."""


class UnitCosts(msgspec.Struct, frozen=True):
    """Bytes on the server for one public chunk."""

    log: float
    """Memory of the run's log."""
    topic: float
    """Memory of one public topic."""
    run: float
    """Memory of an ended run's hash, for each run and not for each chunk."""
    written: float
    """What the append-only file grows by before it is rewritten."""
    received: float
    """What the server receives from the workers."""
    sent: float
    """What it sends to them. Readers come on top of that."""


MEASURED = UnitCosts(log=160, topic=155, run=1_200, written=1_400, received=970, sent=330)
"""Of separate workers, 40 runs of 50 chunks a second at once, 29 November 2026; chained ones send and receive less."""


class Needs(msgspec.Struct, frozen=True):
    """For one rate, in bytes and bytes a second."""

    rate: int
    logs: float
    """Ended runs, for an hour."""
    topics: float
    maxmemory: float
    machine: float
    """Memory of the machine: while the server writes a snapshot or a new file, what it changes is there twice."""
    disk: float
    """The append-only file, twice its size when it is rewritten, beside the new one."""
    written: float
    received: float
    sent: float


def needs(rate: int, costs: UnitCosts = MEASURED) -> Needs:
    """What this many chunks a second need, with the defaults of `retention` and of the server."""
    logs = rate * HOUR_S * costs.log + rate / CHUNKS * HOUR_S * costs.run
    topics = TOPICS_OF_A_CHUNK * min(rate * HOUR_S, PARTITIONS * ENTRIES) * costs.topic
    kept = logs + topics
    return Needs(
        rate=rate,
        logs=logs,
        topics=topics,
        maxmemory=kept / RetentionSettings().full_share,
        machine=2 * kept,
        disk=3 * kept,
        written=rate * costs.written,
        received=rate * costs.received,
        sent=rate * costs.sent,
    )


def table() -> str:
    """The table of the page."""
    found = [needs(rate) for rate in RATES]
    rows = [
        ("logs and results of ended runs, `retention.finished_run_s` = 1 h", [_size(one.logs) for one in found]),
        ("public topics, `retention.topic_entries` = 50,000, 8 partitions", [_size(one.topics) for one in found]),
        ("`maxmemory`, of which `full_share` is used", [_size(one.maxmemory) for one in found]),
        ("memory of the machine, while the file is rewritten", [_size(one.machine) for one in found]),
        ("disk, with an append-only file that is rewritten at twice its size", [_size(one.disk) for one in found]),
        ("written to disk", [f"{_size(one.written)}/s" for one in found]),
        ("network, to the server", [f"{_size(one.received)}/s" for one in found]),
        ("network, from the server, without readers", [f"{_size(one.sent)}/s" for one in found]),
    ]
    head = f"| | {' | '.join(f'{rate:,} chunks/s' for rate in RATES)} |\n|---|---|---|\n"
    return head + "".join(f"| {name} | {' | '.join(values)} |\n" for name, values in rows)


def _size(count: float) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6)):
        if count >= least / 10:
            return f"{count / least:.1f} {unit}" if count < 10 * least else f"{count / least:.0f} {unit}"
    return f"{count / 1e3:.0f} KB"


async def all_ended(client: Any, keys: Keys, runs: Sequence[str]) -> bool:
    """Looks at one run until that has ended, so that the look costs next to nothing."""
    for run in runs:
        if await read_status(client, keys.run(run)) not in ENDED:
            return False
    return True


async def measure(kinds: Sequence[Kind]) -> UnitCosts:
    """Measure the unit costs with these workers."""
    script = Script(name="paced", turns=(Turn(says=Reply(text="word " * CHUNKS), delivery=Delivery(pace=PACE)),))
    keys = Keys("storage", PARTITIONS)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "bus").mkdir()
        with EmbeddedServer(directory / "server", binary=binary(), appendonly=True) as process:
            async with (
                MockProvider([script]) as provider,
                Server(process.url) as server,
                fleet(directory / "bus", process.url, keys, provider.url, kinds),
            ):
                client: Any = server.client
                before = await client.info()
                send = sender(server, keys)
                runs = [await send("paced") for _ in range(RUNS)]
                await eventually(lambda: all_ended(client, keys, runs), timeout=300)
                after = await client.info()
                logs = sum([await client.memory_usage(keys.log(run), samples=0) for run in runs])
                hashes = sum([await client.memory_usage(keys.run(run), samples=0) for run in runs])
                entries = sum([await client.xlen(keys.log(run)) for run in runs])
                topics = [keys.topic(p, "chunks") for p in range(PARTITIONS)]
                used = sum([await client.memory_usage(topic, samples=0) or 0 for topic in topics])
                length = sum([await client.xlen(topic) for topic in topics])

    def grown(field: str) -> float:
        return (int(after[field]) - int(before[field])) / entries

    print(f"{entries / RUNS:.0f} events a run")
    return UnitCosts(
        log=logs / entries,
        topic=used / length,
        run=hashes / RUNS,
        written=grown("aof_current_size"),
        received=grown("total_net_input_bytes"),
        sent=grown("total_net_output_bytes"),
    )


async def main() -> None:
    for kinds in (SEPARATE, CHAINED):
        print(" ".join(kinds), await measure(kinds))


if __name__ == "__main__":
    asyncio.run(main())
