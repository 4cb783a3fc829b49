"""The expected content of the server: each stage's logic is fed its input once, entry by entry, without faults."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tests.commits import RecordingCommit
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.stream_reader import Entry, id_key
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, event_decoder

EventFields = dict[str, Any]


class Undisturbed:
    """One stage, and all that it says and remembers at any offset."""

    def __init__(self, logic: Callable[[], StageLogic]) -> None:
        self.logic = logic()
        self.offset = "0-0"
        self.published: defaultdict[str, list[EventFields]] = defaultdict(list)
        self.appended: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
        self._waiting: list[Entry] = []

    def feed(self, entries: Sequence[Entry]) -> None:
        """Input that came."""
        self._waiting += entries

    def advance(self, offset: str) -> None:
        """Work up to the offset that was committed."""
        assert id_key(offset) >= id_key(self.offset), "the offset went back"
        while self._waiting and id_key(self._waiting[0][0].decode()) <= id_key(offset):
            _, fields = self._waiting.pop(0)
            for run, frame in fields.items():
                self.logic.apply(run.decode(), frame)
            commit = RecordingCommit()
            self.logic.flush(commit)
            for log, event in commit.published:
                self.published[log].append(msgspec.json.decode(event))
            for stream, frames in commit.appended.items():
                self.appended[stream] += frames
        self.offset = offset

    def check_memory(self, logic: StageLogic, runs: Sequence[str]) -> None:
        """A new owner remembers what one remembers who was there all the time; but for the numbers, see `recall`."""
        for run in runs:
            assert logic.is_open(run) == self.logic.is_open(run), f"{run} is open for one and over for the other"
            if logic.is_open(run):
                known = [msgspec.msgpack.decode(_without_number(each, run)) for each in (logic, self.logic)]
                assert known[0] == known[1], f"a replay of {run} gives another state"


def _without_number(logic: StageLogic, run: str) -> bytes:
    logic.recall(run, 0)
    return logic.snapshot(run)


def normalized(frames: Sequence[tuple[str, bytes]]) -> dict[str, list[tuple[int, int, object]]]:
    """By run, the normalizer's output, independent of its frames."""
    by_run: defaultdict[str, list[tuple[int, int, object]]] = defaultdict(list)
    for run, data in frames:
        frame: EventFrame = event_decoder.decode(data)
        if frame.attempt != CONTROL_ATTEMPT:
            by_run[run] += [(frame.turn, frame.attempt, event) for event in frame.events]
    return dict(by_run)


def unjoined(log: Sequence[EventFields]) -> list[EventFields]:
    """Public events without their numbers, neighbouring chunks of a block as one."""
    joined: list[EventFields] = []
    for event in log:
        this = {name: value for name, value in event.items() if name != "seq"}
        last = joined[-1] if joined else this
        if this["type"] == last["type"] == "chunk" and _about(this) == _about(last) and last is not this:
            last["text"] += this["text"]
        else:
            joined.append(this)
    return joined


def _about(chunk: EventFields) -> EventFields:
    return {name: value for name, value in chunk.items() if name != "text"}


def log_of(redis: Any, keys: Keys, run: str) -> list[EventFields]:
    """A run's log as stored on the server."""
    return [msgspec.json.decode(fields[b"__data__"]) for _, fields in redis.xrange(keys.log(run))]
