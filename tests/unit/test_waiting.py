"""The helper that other tests wait with: it must neither pass early nor hide what it waited for."""

from __future__ import annotations

import pytest

from tests.waiting import eventually, eventually_sync


async def test_the_first_true_answer_is_returned():
    answers = iter([0, None, "", "found"])
    assert await eventually(lambda: next(answers)) == "found"


async def test_a_coroutine_may_ask():
    answers = iter([False, True])

    async def ask() -> bool:
        return next(answers)

    assert await eventually(ask) is True


def test_a_failing_assertion_is_a_not_yet():
    tries: list[int] = []

    def third_time() -> bool:
        tries.append(1)
        assert len(tries) == 3
        return True

    assert eventually_sync(third_time)


async def test_what_never_comes_true_fails_with_the_last_answer():
    with pytest.raises(AssertionError, match="last answer: 0"):
        await eventually(lambda: 0, timeout=0.01)
    with pytest.raises(AssertionError, match="last answer: still wrong"):
        eventually_sync(_wrong, timeout=0.01)


async def test_any_other_error_is_raised_at_once():
    with pytest.raises(ZeroDivisionError):
        await eventually(lambda: 1 / 0)


def _wrong() -> bool:
    raise AssertionError("still wrong")
