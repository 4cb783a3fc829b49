"""Notes in a lease hash that this version did not write: a partition is loaded all the same."""

from __future__ import annotations

import pytest

from tokenbus.bus.stage.partition import IsolatedTries
from tokenbus.bus.stage.replay import NotedSteps

NESTED = b"\x91" * 10_000


@pytest.mark.parametrize("stored", [None, b"", b"\xff", b"\x91\xa1\xff", b"\x95\xa0\xa0\x00\x80" + NESTED])
def test_notes_of_a_careful_replay_that_cannot_be_read_count_as_none(stored: bytes | None):
    assert NotedSteps.parse(stored) == NotedSteps()


@pytest.mark.parametrize("stored", [None, b"", b"\xff", b"\xff 2 3"])
def test_tries_of_an_entry_that_cannot_be_read_count_as_none(stored: bytes | None):
    assert IsolatedTries.parse(stored).tries == 0
