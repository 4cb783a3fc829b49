"""A partition's memory against a model of the server: any cut of the input, any take-over, the same outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.commits import commit_call
from tests.contract.bus.toys import Tally, ToyLogic
from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.stream_reader import Entry, id_key
from tokenbus.bus.stage import checkpoints
from tokenbus.bus.stage.checkpoints import SavedState
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.bus.stage.partition import AppliedBatch, Partition
from tokenbus.errors import Malformed
from tokenbus.events.error_info import ErrorInfo

KEYS = Keys("t", 1)
STATE = KEYS.state(0, "toy")


class Store:
    """What the server keeps of one partition. It trims to the watermark exactly."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.offset = "0-0"
        self.watermark = "0-0"
        self.states: dict[bytes, bytes] = {}
        self.numbers: dict[str, int] = {}
        self.outputs: list[bytes] = []
        self.checkpointed = 0

    def after(self, begin: str, end: str | None = None) -> list[Entry]:
        return [
            (entry_id, fields)
            for entry_id, fields in self.entries
            if id_key(entry_id.decode()) > id_key(begin)
            and (end is None or id_key(entry_id.decode()) <= id_key(end))
            and id_key(entry_id.decode()) > id_key(self.watermark)
        ]

    def commit(self, part: Partition, work: AppliedBatch) -> None:
        assert id_key(self.watermark) <= id_key(part.watermark) <= id_key(part.offset)
        self.offset, self.watermark = part.offset, part.watermark
        for op, key, args in operations(work.commit):
            if op == "d":
                self.outputs.append(args[1])
            elif op == "h" and key == STATE:
                self.states[args[0].encode()] = args[1]
                self.checkpointed += len(args[1])
            elif op == "u" and key == STATE:
                del self.states[args[0].encode()]
            elif op == "h" and args[0] == "seq":
                self.numbers[key] = args[1]

    def take_over(self, logic: StageLogic, page: int) -> Partition:
        part = Partition(Lease(0, "1:a", self.offset, self.watermark), logic, keys=KEYS, topic="raw", group="toy")
        part.restore(self.states)
        needed = self.after(self.watermark, self.offset)
        for at in range(0, len(needed), page):
            part.replay(needed[at : at + page])
        for run in part.finish_replay(self.offset):
            logic.recall(run, self.numbers[KEYS.run(run)])
        return part


def operations(commit: Commit) -> Iterator[tuple[str, str, list[Any]]]:
    """The writes of a commit as (operation, key, arguments)."""
    call = commit_call(commit)
    args: list[Any] = list(call.args)[12:]
    while args:
        op = args[0]
        counted = {"d": 4, "x": 2, "h": 2}.get(op)
        length = counted + 1 + args[counted] if counted else 3
        this, args = args[:length], args[length:]
        key: str = call.keys[int(this[1]) - 1]
        yield op, key, this[3:] if op in ("x", "h") else this[2:]


frames = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.sampled_from([b"+1", b"+22", b"+333", b"+4444", b"end", b"poison"]),
    min_size=1,
    max_size=3,
)


def entries_of(inputs: list[dict[str, bytes]]) -> list[Entry]:
    return [(b"%d-0" % n, {run.encode(): frame for run, frame in fields.items()}) for n, fields in enumerate(inputs, 1)]


def undisturbed(entries: list[Entry]) -> tuple[list[bytes], list[dict[str, Any]]]:
    """The outputs, and the logic's state after each entry, of one owner who takes entry after entry."""
    store, logic, states = Store(entries), ToyLogic(0, KEYS), [dict[str, Any]()]
    part = store.take_over(logic, 1)
    for entry in entries:
        store.commit(part, part.apply_and_build([entry]))
        states.append(msgspec.to_builtins(logic.runs))
    return store.outputs, states


@settings(max_examples=200, deadline=None)
@given(st.lists(frames, max_size=40), st.data())
def test_any_cut_and_any_takeover_give_the_undisturbed_outputs_and_state(
    inputs: list[dict[str, bytes]], data: st.DataObject
):
    entries = entries_of(inputs)
    outputs, states = undisturbed(entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "CHECKPOINT_SPAN", data.draw(st.sampled_from([0, 5, 20, 1000])))
        store = Store(entries)
        logic = ToyLogic(0, KEYS)
        part = store.take_over(logic, 1)
        while fresh := store.after(store.offset):
            if data.draw(st.booleans()):
                logic = ToyLogic(0, KEYS)
                part = store.take_over(logic, data.draw(st.integers(1, 5)))
                assert msgspec.to_builtins(logic.runs) == states[id_key(store.offset)[0]]
            if data.draw(st.booleans()):  # a batch that was worked in and never committed, for its owner died
                part.apply_and_build(fresh[:3])
                logic = ToyLogic(0, KEYS)
                part = store.take_over(logic, 2)
            store.commit(part, part.apply_and_build(fresh[: data.draw(st.integers(1, 6))]))
            assert {run.decode() for run in store.states} <= set(logic.runs)
    assert store.outputs == outputs


class Hoarder(StageLogic):
    """A logic whose state is the list of its inputs."""

    def __init__(self) -> None:
        self.frames: dict[str, bytes] = {}

    def apply(self, run: str, frame: bytes) -> None:
        self.frames[run] = self.frames.get(run, b"") + frame

    def fail(self, run: str, error: ErrorInfo) -> None: ...

    def abandon(self, run: str, error: ErrorInfo) -> None: ...

    def is_open(self, run: str) -> bool:
        return run in self.frames

    def flush(self, commit: Commit) -> None: ...

    def discard_outputs(self) -> None: ...

    def snapshot(self, run: str) -> bytes:
        return self.frames[run]

    def restore(self, run: str, state: bytes) -> None:
        self.frames[run] = state


@pytest.mark.parametrize("runs", [1, 10])
def test_checkpoints_cost_no_more_than_the_input_and_keep_a_replay_short(runs: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoints, "CHECKPOINT_SPAN", 1000)
    monkeypatch.setattr(checkpoints, "MAX_CHECKPOINT_SPAN", 100_000)
    frame = b"x" * 50
    entries = entries_of([{f"r{n % runs}": frame} for n in range(500)])
    store = Store(entries)
    part = store.take_over(Hoarder(), 1)
    for entry in entries:
        store.commit(part, part.apply_and_build([entry]))
        to_replay = len(store.after(store.watermark, store.offset)) * len(frame)
        assert to_replay <= 1000 + sum(map(len, store.states.values())) + len(frame)
    assert store.states
    assert store.checkpointed <= 2.5 * len(entries) * len(frame)


def test_a_run_that_ends_and_begins_again_in_one_batch_leaves_no_old_checkpoint(monkeypatch: pytest.MonkeyPatch):
    """Its old state would be restored before what began after it."""
    monkeypatch.setattr(checkpoints, "CHECKPOINT_SPAN", 5)
    entries = entries_of([{"r": b"+1"}, {"r": b"+333"}, {"r": b"end"}, {"r": b"+1"}])
    store = Store(entries)
    part = store.take_over(ToyLogic(0, KEYS), 1)
    store.commit(part, part.apply_and_build(entries[:2]))
    assert set(store.states) == {b"r"}
    store.commit(part, part.apply_and_build(entries[2:]))
    assert store.states == {}
    logic = ToyLogic(0, KEYS)
    store.take_over(logic, 1)
    assert logic.runs["r"].total == 1


def test_a_checkpoint_that_the_watermark_passed_does_not_pull_it_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoints, "CHECKPOINT_SPAN", 10)
    entries = entries_of([{"silent": b"+1"}, *({"busy": b"+1"} for _ in range(50))])
    store = Store(entries)
    part = store.take_over(ToyLogic(0, KEYS), 1)
    for entry in entries[:-1]:
        store.commit(part, part.apply_and_build([entry]))
    before = store.watermark
    assert id_key(msgspec.msgpack.decode(store.states[b"silent"])[0]) < id_key(before)
    part = store.take_over(ToyLogic(0, KEYS), 1)
    assert part.watermark == before
    store.commit(part, part.apply_and_build(entries[-1:]))


BROKEN_CHECKPOINTS = {
    "no text": b"\x92\xa1\xff\xc4\x00",
    "no text, in pieces": b"\x93\xa1\xff\xc4\x00\x91\x01",
    "nested deeper than a decoder goes": b"\x93\xa30-1\xc4\x00" + b"\x91" * 10_000,
    "covers no entry": SavedState("nowhere", b"").encoded(),
    "ignores the input up to no entry": SavedState("nowhere", None).encoded(),
}


@pytest.mark.parametrize("broken", BROKEN_CHECKPOINTS.values(), ids=BROKEN_CHECKPOINTS)
def test_a_checkpoint_that_cannot_be_read_costs_its_own_run_alone(broken: bytes):
    part = Partition(Lease(0, "1:a", "1-0", "0-0"), logic := ToyLogic(0, KEYS), keys=KEYS, topic="raw", group="toy")
    whole = SavedState("1-0", msgspec.msgpack.encode(Tally(total=5))).encoded()
    stored = {b"broken": broken, b"\xff": SavedState("1-0", b"", [1]).encoded(), b"whole": whole}
    assert [name for name, _ in part.pieces_of(stored)] == ["\ufffd"]
    part.restore(stored)
    part.finish_replay("1-0")
    assert part.unread == ["broken", "\ufffd"]
    part.apply_and_build([(b"2-0", {b"broken": b"+1", b"whole": b"+2"})])
    assert (logic.runs["broken"].total, logic.runs["whole"].total) == (1, 7)


def test_a_checkpoint_that_cannot_be_read_and_is_not_needed_goes_with_its_run() -> None:
    entries = entries_of([{"a": b"+1"}, {"a": b"end"}])
    store = Store(entries)
    part = store.take_over(ToyLogic(0, KEYS), 1)
    store.commit(part, part.apply_and_build(entries[:1]))
    store.states[b"a"] = b"\xc1"
    part = store.take_over(ToyLogic(0, KEYS), 1)
    assert part.fail_unreadable({}) is None, "its input is there, so it continues"
    store.commit(part, part.apply_and_build(entries[1:]))
    assert store.states == {}


def test_the_text_of_a_defect_is_in_the_dead_letter_and_its_cause_and_not_in_the_runs_error() -> None:
    errors: list[ErrorInfo] = []

    class Broken(Hoarder):
        def apply(self, run: str, frame: bytes) -> None:
            if frame == b"malformed":
                raise Malformed("frame", "no frame of this bus")
            raise KeyError("61309 of tenant acme")

        def fail(self, run: str, error: ErrorInfo) -> None:
            errors.append(error)

        def snapshot(self, run: str) -> bytes:
            raise KeyError("61309 of tenant acme")

    part = Partition(Lease(0, "1:a", "0-0", "0-0"), Broken(), keys=KEYS, topic="raw", group="toy")
    taken = part.apply([(b"1-0", {b"a": b"defect"}), (b"2-0", {b"b": b"malformed"})])
    assert ["acme" in poison.reason for poison in taken.poison] == [True, False]
    assert [error.message for error in errors] == [
        "the entry cannot be processed",
        "malformed: frame: no frame of this bus",
    ]
    assert [str(poison.cause) for poison in taken.poison] == ["'61309 of tenant acme'", "None"]


def test_an_entry_that_was_applied_is_not_applied_again() -> None:
    lease = Lease(0, "1", "0-0", "0-0")
    made = Partition(lease, ToyLogic(0, KEYS), keys=KEYS, topic="raw", group="toy")
    made.apply_and_build([(b"1-0", {b"r": b"+1"}), (b"2-0", {b"r": b"+1"})])
    for again in (b"1-0", b"2-0"):
        with pytest.raises(ValueError, match="is not after 2-0"):
            made.apply([(again, {b"r": b"+1"})])
