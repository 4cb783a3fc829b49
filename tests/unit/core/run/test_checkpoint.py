"""Checkpoints of long runs: each text is written once, and what comes back is the state as it was."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.core.run.blocks.opaque import JOINED_CHARS, append_piece
from tokenbus.core.run.checkpoint import LONG, PIECE, Checkpoints, Snapshot
from tokenbus.core.run.gated_run import GatedRun, accept
from tokenbus.core.run.state import RunState
from tokenbus.core.run.state_machine import RunMachine
from tokenbus.events import normalized as n
from tokenbus.events.frames import Accepted, EventFrame, PolicyPlan, RunLimits, TextReading
from tokenbus.events.public import BlockComplete

HUGE = RunLimits(block_chars=2**40)


class Store:
    """The pieces as the server keeps them."""

    def __init__(self) -> None:
        self.checkpoints = Checkpoints()
        self.pieces: dict[int, bytes] = {}
        self.snapshot: Snapshot | None = None
        self.written = 0

    def save(self, state: RunState) -> None:
        self.snapshot = self.checkpoints.save(state)
        if self.snapshot:
            assert not self.snapshot.new.keys() & self.pieces.keys(), "a piece is written once"
            self.pieces |= self.snapshot.new
            self.written += len(self.snapshot.head) + sum(map(len, self.snapshot.new.values()))

    def load(self) -> RunState:
        assert self.snapshot
        state, self.checkpoints = Checkpoints.load(
            self.snapshot.head, {number: self.pieces[number] for number in self.snapshot.needs}
        )
        return state


def machine(**fields: object) -> RunMachine | GatedRun:
    accepted = Accepted(provider="p", model="m", on_failure="fail", max_tool_depth=3, rules=HUGE, tools=["t"])
    return accept("r", msgspec.structs.replace(accepted, **fields), 0)


def feed(run: RunMachine | GatedRun, *events: n.Normalized) -> None:
    run.handle(EventFrame(0, run.state.attempt, 1, list(events)))
    run.out.clear()
    run.effects.clear()


def meaning(state: RunState) -> object:
    """The state, with the parts of growing texts joined."""

    def joined(value: object) -> object:
        if isinstance(value, dict):
            return {
                k: "".join(v) if k in ("pieces", "raw") and isinstance(v, list) else joined(v)  # pyright: ignore
                for k, v in value.items()  # pyright: ignore
            }
        return [joined(v) for v in value] if isinstance(value, list) else value  # pyright: ignore

    return joined(msgspec.to_builtins(state, order="deterministic"))


def test_a_small_run_has_no_pieces() -> None:
    run = machine()
    feed(run, n.BlockStart(0, "text"), n.TextDelta(0, "short"))
    assert Checkpoints().save(run.state) is None


@pytest.mark.parametrize("name", ["pieces", "raw"])
@pytest.mark.parametrize("items", [[1, 2, 3], [{"x": 1}], ["a" * LONG, "b" * LONG], ["a" * (LONG + 1), "b"]], ids=repr)
def test_arguments_of_a_call_are_no_growing_text_whatever_their_names(name: str, items: list[object]) -> None:
    run, store = machine(policy_plan=PolicyPlan(("p",), "pass", 1000)), Store()
    arguments = msgspec.json.encode({name: items}).decode()
    feed(run, n.ToolCallStart(0, "id", "t"), n.ToolCallDelta(0, arguments), n.ToolCallDone(0))
    feed(run, n.BlockStart(1, "text"), n.TextDelta(1, "x" * (2 * LONG)))
    store.save(run.state)
    again = store.load()
    assert again.gate
    [end] = [event for event in again.gate.undecided if isinstance(event, BlockComplete)]
    assert end.input == {name: items}


steps = st.lists(
    st.tuples(st.sampled_from(["text", "thinking", "call", "stop", "save", "load"]), st.integers(1, 3 * LONG)),
    max_size=40,
)


@given(steps)
@pytest.mark.parametrize(
    "fields",
    [{}, {"reading": TextReading()}, {"policy_plan": PolicyPlan(("p",), "pass", 1000)}],
    ids=["chat", "prefill", "policies"],
)
def test_any_state_of_any_run_survives_a_save_and_restore(
    fields: dict[str, object], plan: list[tuple[str, int]]
) -> None:
    run, store, block, is_open = machine(**fields), Store(), -1, False
    for what, size in plan:
        text = "äb" * (size // 2) + "c"
        if what == "save":
            store.save(run.state)
        elif what == "load":
            store.save(run.state)
            if store.snapshot:
                again = store.load()
                assert meaning(again) == meaning(run.state)
                inner = RunMachine(again)
                run = GatedRun(inner) if again.gate else inner
        elif what == "stop" or is_open:
            if is_open and what == "stop":
                feed(run, n.BlockStop(block))
                is_open = False
            elif is_open:
                feed(run, n.TextDelta(block, text))
        else:
            block, is_open = block + 1, True
            if what == "call":
                feed(
                    run, n.ToolCallStart(block, f"id{block}", "t"), n.ToolCallDelta(block, text), n.ToolCallDone(block)
                )
                is_open = False
            else:
                feed(run, n.BlockStart(block, "text"), n.TextDelta(block, text))


def test_what_all_checkpoints_of_a_run_write_grows_with_the_run_and_not_with_its_square() -> None:
    published = []
    for blocks in (8, 16, 32):
        run, store, total = machine(), Store(), 0
        for block in range(blocks):
            feed(run, n.BlockStart(block, "text"))
            for _ in range(4):
                for _ in range(50):
                    feed(run, n.TextDelta(block, "0123456789" * 100))
                    total += 1000
                store.save(run.state)
            feed(run, n.BlockStop(block))
        assert meaning(store.load()) != meaning(run.state)  # the last block ended after it
        published.append(store.written / total)
    assert max(published) < 1.2, published


def test_a_block_that_ended_is_not_written_again() -> None:
    run, store = machine(), Store()
    feed(run, n.BlockStart(0, "text"), n.TextDelta(0, "x" * (3 * PIECE)))
    store.save(run.state)
    feed(run, n.TextDelta(0, "y" * (LONG + 1)), n.BlockStop(0))
    store.save(run.state)
    assert store.snapshot
    assert [len(piece) for piece in store.snapshot.new.values()] == [LONG + 1]
    assert meaning(store.load()) == meaning(run.state)


def test_no_piece_is_larger_than_what_a_command_should_carry() -> None:
    run, store = machine(), Store()
    feed(run, n.BlockStart(0, "text"), n.TextDelta(0, random.Random(1).choice("äx") * (5 * PIECE + 3)))
    store.save(run.state)
    assert len(store.pieces) == 6
    assert max(map(len, store.pieces.values())) <= 4 * PIECE
    assert meaning(store.load()) == meaning(run.state)


def test_open_text_is_kept_in_few_pieces_and_a_checkpoint_finds_its_long_ones_again():
    assert JOINED_CHARS <= LONG
    pieces: list[str] = []
    words = [f"{i} " for i in range(3_000)]
    for word in words:
        append_piece(pieces, word)
    assert "".join(pieces) == "".join(words)
    assert len(pieces) < 40
    long = "x" * (LONG + 1)
    append_piece(pieces, long)
    append_piece(pieces, "y")
    assert any(piece is long for piece in pieces)
