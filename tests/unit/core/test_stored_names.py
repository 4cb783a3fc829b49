"""Saved state keeps the names under which its fields are stored: an upgrade finds what the version before saved."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import msgspec

from tokenbus.core.run.blocks.block_table import BlockTable
from tokenbus.core.run.checkpoint import LONG, Checkpoints
from tokenbus.core.run.gate.policy_gate import PolicyGate
from tokenbus.core.run.state import RunState
from tokenbus.events.frames import Accepted, RunLimits
from tokenbus.events.public import Chunk

STORED = Path(__file__).with_name("stored_names.json")
"""The names of wire version 1, by class."""


def test_no_stored_name_is_lost() -> None:
    for path, names in json.loads(STORED.read_text()).items():
        module, _, name = path.rpartition(".")
        found = getattr(importlib.import_module(module), name).__struct_encode_fields__
        assert set(names) <= set(found), path


def test_a_long_text_is_found_under_its_stored_name() -> None:
    text = "x" * (LONG + 1)
    gate = PolicyGate(
        unsent_drafts=[Chunk(run="r", seq=0, turn=0, attempt=1, block=0, kind="text", text=text, visible=True, depth=0)]
    )
    accepted = Accepted(provider="p", model="m", on_failure="fail", max_tool_depth=0, rules=RunLimits(), tools=[])
    state = RunState("r", accepted, 0, BlockTable(0, 1, 100, 0), gate=gate)
    saved = Checkpoints().save(state)
    assert saved
    [(path, _)] = msgspec.msgpack.decode(saved.head)[1]
    assert path == ["gate", "beginning", 0, "text"]
    loaded, _ = Checkpoints.load(saved.head, saved.new)
    assert loaded == state
