"""Measures processes and the server from outside, as an operator could."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.soak.judging import Series, Unit

FILES_OF_AN_EXECUTOR = 3
"""A worker's ends of an executor's socket and pipe, and its page. Executors are a pool: it has one for each call of the
busiest moment, 64 at most, and an unused one stays for a minute. So they are counted apart.
"""


class Sampler:
    """All series of a soak."""

    def __init__(self, pids: Mapping[str, int], client: Any, inputs: Sequence[str]) -> None:
        """``pids``: by name; `server` is the Redis or Valkey server that ``client`` reaches.

        ``inputs``: the streams that the stages read. Each is trimmed up to its oldest open run, so its size goes with
        the age of that run.
        """
        self._pids = dict(pids)
        self._inputs = inputs
        self._client = client
        self._series: dict[str, Series] = {}

    @property
    def series(self) -> list[Series]:
        """The measurements so far."""
        return list(self._series.values())

    async def sample(self, at_s: float) -> None:
        """Measure everything once. Raises OSError if a process has ended."""
        for name, pid in self._pids.items():
            self._add(f"{name}: memory", "bytes", at_s, resident(pid))
            executors = len([grandchild for child in _children(pid) for grandchild in _children(child)])
            self._add(f"{name}: executors", "sockets", at_s, executors)
            self._add(f"{name}: open files", "sockets", at_s, open_files(pid) - FILES_OF_AN_EXECUTOR * executors)
        memory: dict[str, Any] = await self._client.info("memory")
        clients: dict[str, Any] = await self._client.info("clients")
        inputs = [await self._client.memory_usage(key, samples=0) or 0 for key in self._inputs]
        self._add("server: inputs of stages", "level", at_s, sum(inputs))
        self._add("server: other used_memory", "bytes", at_s, memory["used_memory"] - sum(inputs))
        self._add("server: script cache", "count", at_s, memory["number_of_cached_scripts"])
        self._add("server: connections", "sockets", at_s, clients["connected_clients"])
        # One key per slot of ten seconds for an hour at any load: they grow only in the first hour.
        slots = [key async for key in self._client.scan_iter(match="*:{activity}:*", count=1000)]
        self._add("server: keys", "count", at_s, await self._client.dbsize() - len(slots))

    def _add(self, name: str, unit: Unit, at_s: float, value: float) -> None:
        series = self._series.setdefault(name, Series(name, unit))
        series.at_s.append(at_s)
        series.values.append(value)


def resident(pid: int) -> int:
    """Private memory of the process in bytes: growth of shared memory is not its own."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def open_files(pid: int) -> int:
    """Open files, including sockets."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except (FileNotFoundError, ProcessLookupError):  # an executor that ended meanwhile
        return []
