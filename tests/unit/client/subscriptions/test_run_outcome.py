"""What a run's log says about a block whose text stopped growing."""

from __future__ import annotations

import pytest

from tokenbus.client.subscriptions.cursor import Gaps
from tokenbus.client.subscriptions.sentences import events_of, run_outcome
from tokenbus.events.public import BlockComplete, encode

COMPLETE = encode(BlockComplete(run="r", seq=4, turn=0, attempt=1, block=2, kind="text", content="Hello."))


@pytest.mark.parametrize("fields", [{b"__data__": b"{"}, {b"__data__": b"[]"}, {b"other": b"1"}])
def test_an_entry_that_is_no_event_is_counted_and_skipped(fields: dict[bytes, bytes]) -> None:
    gaps = Gaps(None)
    events = events_of("log", [(b"1-3", fields), (b"1-4", {b"__data__": COMPLETE})], gaps)
    assert run_outcome(2, events) == "complete"
    assert gaps.malformed == 1
