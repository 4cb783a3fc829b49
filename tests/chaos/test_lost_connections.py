"""Which errors let the harness send a command again."""

from __future__ import annotations

import pytest
from redis.exceptions import RedisClusterException, RedisError

from tests.chaos.lost_connections import is_lost

CLOSED = "'NoneType' object has no attribute 'writelines'"


@pytest.mark.parametrize(
    "error", [RedisError(), RedisClusterException(), OSError(), RuntimeError(), AttributeError(CLOSED)]
)
def test_a_lost_connection_is_tried_again(error: Exception) -> None:
    assert is_lost(error)


@pytest.mark.parametrize("error", [AttributeError("'Crowd' object has no attribute 'visit'"), ValueError(), KeyError()])
def test_a_defect_of_the_harness_is_not(error: Exception) -> None:
    assert not is_lost(error)
