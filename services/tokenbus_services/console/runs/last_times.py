"""When runs said something last. A run's log has no times, so the ends of the topics say it of runs that are new to the
console.
"""

from __future__ import annotations

from typing import Any, cast, get_args

import msgspec

from tokenbus.bus.keys import DATA_FIELD, Keys, PublicTopic
from tokenbus.bus.server.server import Server
from tokenbus.events.run_info import RunInfo

_ENTRIES = 6_000
"""Newest entries that are read, of all topics and partitions together."""
_LEAST = 20


class _Said(msgspec.Struct):
    run: str = ""


_decode = msgspec.json.Decoder(_Said).decode


class LastTimes:
    """Read once, when the console begins to look."""

    def __init__(self) -> None:
        self._read_at_ms: int | None = None
        self._found: dict[str, int] = {}
        self._before_ms: dict[int, int] = {}
        """What is not found of a partition is older."""

    async def read(self, server: Server, keys: Keys) -> None:
        """Read the ends of the topics, unless that was done. Raises redis-py's errors."""
        if self._read_at_ms is not None:
            return
        topics = get_args(PublicTopic)
        count = max(_LEAST, _ENTRIES // (len(topics) * keys.partitions))
        pipe = server.client.pipeline(transaction=False)
        for partition in range(keys.partitions):
            for topic in topics:
                pipe.xrevrange(keys.topic(partition, topic), count=count)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        for number, entries in enumerate(replies):
            if not isinstance(entries, list):
                continue
            page = cast("list[tuple[bytes, dict[bytes, bytes]]]", entries)
            for entry, fields in page:
                self._note(fields.get(DATA_FIELD.encode(), b""), _ms(entry))
            if page:
                partition = number // len(topics)
                self._before_ms[partition] = max(self._before_ms.get(partition, 0), _ms(page[-1][0]))
        self._read_at_ms = server.clock.now_ms()

    def of(self, info: RunInfo, partition: int, now_ms: int) -> int:
        """The Unix time in ms at which this run, seen for the first time, said something last: or later than that, if
        it is not known any more.
        """
        if not info.events:
            return info.accepted_ms
        if self._read_at_ms is None or info.accepted_ms > self._read_at_ms:
            return now_ms
        known = self._found.get(info.run, self._before_ms.get(partition, now_ms))
        return max(info.accepted_ms, known)

    def _note(self, data: bytes, at_ms: int) -> None:
        try:
            run = _decode(data).run
        except msgspec.DecodeError:
            return
        self._found[run] = max(at_ms, self._found.get(run, 0))


def _ms(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])
