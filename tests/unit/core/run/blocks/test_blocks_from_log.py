"""The open blocks of a run whose state is lost, from its log."""

from __future__ import annotations

import pytest

from tokenbus.core.run.blocks.block_table import OpenBlocks
from tokenbus.events.public import BlockStarted, encode

BEGUN = encode(BlockStarted(run="r", seq=0, turn=0, attempt=1, block=3, kind="text"))


@pytest.mark.parametrize(
    "entry",
    [b"", b"{", b"[]", b'{"type":"chunk","run":"\xff"}', b'{"type":"chunk","more":' + b"[" * 10_000],
    ids=["nothing", "cut", "no object", "no text", "nested deeper than a decoder goes"],
)
def test_an_entry_that_is_no_event_is_passed_over(entry: bytes):
    blocks = OpenBlocks()
    for data in (entry, BEGUN, entry):
        blocks.read(data)
    assert list(blocks.by_number) == [3]
