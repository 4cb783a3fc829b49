"""What the normalizer does with one partition: an attempt reader for each run, its events into `events`."""

from __future__ import annotations

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import Arg, Commit
from tokenbus.core.attempt import AttemptReader
from tokenbus.events.failure import ErrorInfo
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, encode, raw_decoder
from tokenbus.events.normalized import Failed

RUNS_AN_ENTRY = 1000
"""Most runs in one entry: a Lua script can unpack some thousand values."""


class NormalizerLogic:
    """`Logic` of the normalizer (see tokenbus.bus.stage)."""

    def __init__(self, partition: int, keys: Keys) -> None:
        self._events = keys.topic(partition, "events")
        self._parser_lease = keys.lease(partition, "parser")
        self._readers: dict[str, AttemptReader] = {}
        self._frames: dict[str, list[EventFrame]] = {}

    def take(self, run: str, frame: bytes) -> None:
        raw = raw_decoder.decode(frame)
        reader = self._readers.get(run)
        if reader and raw.attempt < reader.attempt:
            return  # a copy from before
        if reader is None or raw.attempt > reader.attempt:
            reader = self._readers[run] = AttemptReader(raw.attempt)
        if events := reader.read(raw):
            self._say(run, EventFrame(raw.turn, raw.attempt, raw.at_ms, events))
        if reader.over:
            del self._readers[run]

    def fail(self, run: str, error: ErrorInfo) -> None:
        # Told to the run and not to an attempt of it, for which attempt it was may be what could not be read.
        self._say(run, EventFrame(0, CONTROL_ATTEMPT, 0, [Failed(error)]))
        self._readers.pop(run, None)

    def is_open(self, run: str) -> bool:
        return run in self._readers

    def flush(self, commit: Commit) -> None:
        size = 0
        # An entry has each run once; a second frame of a run (its next attempt began) goes into a second entry.
        while self._frames:
            fields: list[Arg] = []
            for run in list(self._frames)[:RUNS_AN_ENTRY]:
                frames = self._frames[run]
                data = encode(frames.pop(0))
                size += len(data)
                fields += (run, data)
                if not frames:
                    del self._frames[run]
            commit.append(self._events, fields)
        if size:
            commit.arrived(self._parser_lease, size)

    def mute(self) -> None:
        self._frames = {}

    def snapshot(self, run: str) -> bytes:
        return self._readers[run].save()

    def restore(self, run: str, state: bytes) -> None:
        self._readers[run] = AttemptReader.load(state)

    def recall(self, run: str, seq: int) -> None:
        """Nothing here depends on numbers."""

    def _say(self, run: str, frame: EventFrame) -> None:
        frames = self._frames.setdefault(run, [])
        if frames and frames[-1].attempt == frame.attempt:
            frames[-1].events.extend(frame.events)
        else:
            frames.append(frame)
