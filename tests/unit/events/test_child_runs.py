"""The ids of child runs, and where their tree is."""

from __future__ import annotations

import pytest

from tokenbus.bus.keys import Keys
from tokenbus.events.child_runs import child_id, depth_of, parent_call, root_of
from tokenbus.events.sessions import SessionRun, session_ref, session_run


@pytest.mark.parametrize("root", ["r", "0198c6e2-7b1e-7a44", "a~b", SessionRun(session_ref("t", "n"), "0" * 8, 3).id])
def test_an_id_says_the_parent_the_call_and_the_depth(root: str) -> None:
    child = child_id(root, 3)
    inner = child_id(child, 12)
    assert (parent_call(root), parent_call(child), parent_call(inner)) == (None, (root, 3), (child, 12))
    assert [root_of(run) for run in (root, child, inner)] == [root] * 3
    assert [depth_of(run) for run in (root, child, inner)] == [0, 1, 2]
    assert session_run(child) is None


@pytest.mark.parametrize("root", ["r1", "r2", SessionRun(session_ref("t", "n"), "0" * 8, 3).id])
def test_a_tree_is_in_one_partition(root: str) -> None:
    keys = Keys("t", 64)
    keys.widen([7], 64)
    inner = child_id(child_id(root, 3), 0)
    assert keys.partition_of(inner) == keys.partition_of(root)
    assert keys.places(inner) == keys.places(root)
